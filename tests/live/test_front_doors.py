# SPDX-License-Identifier: Apache-2.0
"""Other ways into a real vLLM than its HTTP server or our router: AsyncLLM without a server, gRPC, batches,
render, Dynamo, Ray Serve LLM, vLLM's front-end in Rust, sessions of /v1/realtime; and servers behind a router
without our code: one outermost span per request, each leg its role. The test plays that router by vLLM's
contract (its toy proxy's and its EPD proxy's), with OpenTelemetry or without; docs/router.md lists the real
ones that were tried by hand.

Each starts an engine of its own and runs only with `scripts/test --full`. Packages that vLLM does not need
are installed beside it, without what they require: theirs is a vLLM for CUDA.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import NoOpTracer, SpanKind, Tracer
from websockets.sync.client import ClientConnection, connect

from lab import free_ports, server_commands, tiny_models, ttft_client
from lab.injection import InjectionControl
from lab.local_deployment import build_receiver_command, build_router_command
from lab.local_servers import LocalServer, run_servers
from lab.server_commands import ServerCommand, VllmOptions, build_vllm_environment
from lab.ttft_client import TimedResponse
from tests.live.bench import LiveDeployment
from tests.live.conftest import DeploymentDeck
from tests.live.test_alone import run_alone
from tests.stack.running_stack import wait_until
from ttft_otel.hooks import target_check
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.stages import INTERMEDIATE_ROLES
from ttft_otel.router.disagg.request_plan import KEEP_BLOCKS_PARAMS
from ttft_otel.tracing import clock

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ARRIVAL_S = 20.0  # until a span must have come
TOKENS = {"model": "tiny", "prompt": "hello world " * 20, "max_tokens": 3, "stream": True}
# A function that only its embedding workers call; vLLM 0.31, for which Dynamo 1.6 is made, has it.
DYNAMO = (
    "from vllm.v1.engine import utils\n"
    "vars(utils).setdefault('get_engine_zmq_addresses', None)\n"
    "from dynamo.vllm.main import main\n"
    "main()"
)
PROGRAMS, CALLED = str(Path(__file__).with_name("engine_programs.py")), 8
# May be of another release than the engine core.
RUST_BINARY = os.environ.get("VLLM_RUST_FRONTEND_PATH", "")
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
SMALL = ("--enforce-eager", "--max-model-len", "4096")
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


@dataclass(frozen=True)
class FrontDoor:
    """What a front door is started with.

    receiver: ours, empty. environment: of a traced vLLM; packages on this process's PYTHONPATH are on its,
    too. model: the text model's folder. folder: for files of the test.
    """

    receiver: LocalServer
    environment: dict[str, str]
    model: str
    folder: Path

    def wait_for_requests(
        self, is_wanted: Callable[[dict[str, Any]], bool] = bool, count: int = 1
    ) -> list[dict[str, Any]]:
        """Those of the receiver's requests, once `count` of them are there."""

        def list_found() -> list[dict[str, Any]]:
            answer = httpx.get(f"{self.receiver.url}/api/requests", timeout=10)
            answer.raise_for_status()
            return [each for each in answer.json() if is_wanted(each)]

        wait_until(lambda: len(list_found()) >= count, ARRIVAL_S)
        found = list_found()
        assert len(found) == count, found
        return found


@pytest.fixture
def door(tmp_path: Path) -> Iterator[FrontDoor]:
    """For one front door."""
    model = tiny_models.build_model(tiny_models.TEXT_RECIPE)
    own = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with LocalServer(build_receiver_command(tmp_path / "spans.db")) as receiver:
        environment = {
            **build_vllm_environment(VllmOptions(model, env=own)),
            "TTFT_OTEL": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }
        yield FrontDoor(receiver, environment, str(model), tmp_path)


def check_stages(*reports: dict[str, Any]) -> None:
    """Their stages add up, without those of HTTP."""
    for report in reports:
        assert not {"receive", "egress"} & set(report["stages"])
        assert {"prefill.queue", "prefill.compute", "output"} <= set(report["stages"])
        assert report["unattributed_ms"] == 0.0
        check_sum(report)


def check_sum(report: dict[str, Any]) -> None:
    """Its stages and what is unattributed add up."""
    total = sum(report["stages"].values()) + report["unattributed_ms"]
    assert total == pytest.approx(report["ttft_ms"], abs=0.01)


def run_to_end(argv: Sequence[str], environment: dict[str, str]) -> str:
    """What a program prints, which must succeed."""
    done = subprocess.run(
        argv, env=os.environ | environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def require_packages(module: str, packages: str) -> pytest.MarkDecorator:
    """Skip a test without a module, and say how these packages come beside the environment."""
    folder = f"/tmp/{module}"
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"no {module}: uv pip install --python .venv --target {folder} --no-deps {packages}, "
        f"then run this test with PYTHONPATH={folder}",
    )


def test_calls_without_a_server(door: FrontDoor) -> None:
    """Of AsyncLLM's own callers, as Dynamo's workers: what the caller's clock has more is its own wake-up.

    A request whose caller left is told as cancelled, and in which stage.
    """
    told = run_to_end(
        (sys.executable, PROGRAMS, "call_engine", door.model, str(CALLED)), door.environment
    )
    lines = [line.split() for line in told.splitlines() if line.startswith("request ")]
    printed = {name: text for _, name, text in lines}
    # The exporter may still send when its host has ended.
    found = door.wait_for_requests(bool, CALLED + 1)
    reports = {each["request_id"]: each for each in found}

    assert reports["left"]["error"] == "cancelled" and reports["left"]["died_in"]
    # vLLM's and our first ones take longer.
    called = [reports[f"r-{number}"] for number in range(2, CALLED)]
    check_stages(*called)
    beyond = [int(printed[each["request_id"]]) / 1000 - each["ttft_ms"] for each in called]
    assert min(beyond) > 0  # the caller cannot have it before it was processed
    assert statistics.median(beyond) < statistics.median(each["ttft_ms"] for each in called)


@require_packages(
    "smg_grpc_servicer",
    "smg-grpc-servicer smg-grpc-proto grpcio-health-checking grpcio-reflection",
)
def test_grpc(door: FrontDoor) -> None:
    """Requests to vLLM's gRPC server have a trace, under the caller's span."""
    from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

    port = free_ports.find_free_port()
    place = ("--host", "127.0.0.1", "--port", str(port))
    argv = (*VLLM, "serve", door.model, "--grpc", *place, *SMALL)
    own = door.environment | {"SMG_VLLM_SERVICER_WARMUP": "off"}
    server = LocalServer(ServerCommand("grpc", argv, own, port)).start()
    try:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        until = time.monotonic() + 600
        while server.is_alive and time.monotonic() < until:
            try:
                grpc.channel_ready_future(channel).result(timeout=5)
                break
            except grpc.FutureTimeoutError:
                continue
        assert server.is_alive, server.read_log_tail()
        request = vllm_engine_pb2.GenerateRequest(
            request_id="mine",
            tokenized=vllm_engine_pb2.TokenizedInput(input_ids=list(range(5, 50))),
            sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=4, top_p=1.0, n=1),
            stream=True,
        )
        generate = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate
        assert list(generate(request, metadata=tuple(PARENT.items()), timeout=120))
        # It warms itself up with requests of its own, which have traces, too.
        found = door.wait_for_requests(lambda each: each["trace_id"] == TRACE_ID)
        check_stages(*found)
    finally:
        server.stop()


def test_batch(door: FrontDoor) -> None:
    """Each line of a batch file is a request of its own."""
    words = [{"role": "user", "content": "hello world"}]
    body = {"model": door.model, "messages": words, "max_tokens": 3}
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(2)
    ]
    wanted, got = door.folder / "in.jsonl", door.folder / "out.jsonl"
    wanted.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ("-i", str(wanted), "-o", str(got))
    run_to_end((*VLLM, "run-batch", *files, "--model", door.model, *SMALL), door.environment)
    assert len(got.read_text().splitlines()) == len(lines)
    check_stages(*door.wait_for_requests(bool, len(lines)))


def test_render(door: FrontDoor) -> None:
    """A render server's time is a leg of its own before the server that takes its tokens."""
    flags = ("--served-model-name", "tiny", "--max-model-len", "4096", "--host", "127.0.0.1")
    words = {
        "render": ("launch", "render", door.model),
        "mono": ("serve", door.model, "--enforce-eager", "--enable-scale-out"),
    }
    commands = []
    for name, own in words.items():
        port = free_ports.find_free_port()
        argv = (*VLLM, *own, *flags, "--port", str(port))
        commands.append(ServerCommand(name, argv, door.environment, port))
    parent = {**PARENT, "x-request-id": "both"}
    with run_servers(*commands, timeout=600, logs=door.folder / "logs") as (first, second):
        body = {"model": "tiny", "prompt": "hello world " * 20, "max_tokens": 3}
        url = f"{first.url}/v1/completions/render"
        (made,) = httpx.post(url, json=body, headers=parent, timeout=60).raise_for_status().json()
        url = f"{second.url}/inference/v1/generate"
        httpx.post(url, json=made, headers=parent, timeout=60).raise_for_status()
        (report,) = door.wait_for_requests(lambda each: len(each["roles"]) > 1)

    assert {"render.receive", "render.preprocess", "mono.prefill.compute"} <= set(report["stages"])
    check_sum(report)


def ask_until_ready(url: str, server: LocalServer) -> float:
    """Ask once, and again under TRACE_ID as soon as that was answered; milliseconds until its first bytes."""
    until = time.monotonic() + 600
    with httpx.Client(base_url=url, timeout=120) as client:
        while server.is_alive and time.monotonic() < until:
            try:
                if client.post("/v1/completions", json=TOKENS).is_success:
                    break
            except httpx.TransportError:
                pass  # nobody listens yet
            time.sleep(1)
        assert server.is_alive, server.read_log_tail()
        return time_first_bytes(client, PARENT)


def time_first_bytes(client: httpx.Client, headers: dict[str, str]) -> float:
    """Milliseconds from a request to the answer's first bytes."""
    begun, first = time.monotonic(), 0.0
    with client.stream("POST", "/v1/completions", json=TOKENS, headers=headers) as answer:
        for _ in answer.raise_for_status().iter_raw():
            first = first or time.monotonic() - begun
    return first * 1000


@require_packages("dynamo", "ai-dynamo ai-dynamo-runtime")
def test_dynamo(door: FrontDoor) -> None:
    """A request through Dynamo's frontend to its worker: our stages in its trace, which reaches the client's.

    Its own spans alone are what tests/golden/foreign/dynamo.json has.
    """
    port = free_ports.find_free_port()
    own = door.environment | {
        "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(door.folder / "kv"),
        "DYN_TCP_RPC_HOST": "127.0.0.1", "OTEL_EXPORT_ENABLED": "1",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{door.receiver.url}/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }  # fmt: skip
    flags = ("--model", door.model, "--served-model-name", "tiny", *SMALL)
    worker_argv = (sys.executable, "-c", DYNAMO, *flags)
    words = ("-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port))
    frontend = LocalServer(
        ServerCommand("frontend", (sys.executable, *words), own, port),
        door.folder / "frontend.log",
    )
    worker = LocalServer(
        ServerCommand("worker", worker_argv, own, port), door.folder / "worker.log"
    )
    with contextlib.ExitStack() as ended:
        for server in (worker, frontend):
            ended.callback(server.start().stop)
        waited_ms = ask_until_ready(frontend.url, worker)
        # Of the frontend's span alone there is a request without stages, of ours alone one without a caller.
        (report,) = door.wait_for_requests(
            lambda each: each["trace_id"] == TRACE_ID and bool(each["stages"] and each["before"]),
        )
    check_stages(report)
    assert report["ttft_ms"] < waited_ms
    assert report["before"]["caller"] == "dynamo"


@require_packages("ray", "ray grpcio-reflection pyarrow msgpack")
def test_ray_serve(door: FrontDoor) -> None:
    """A request to Ray Serve LLM has its replica's stages, in the client's trace."""
    port = free_ports.find_free_port()
    argv = (sys.executable, PROGRAMS, "serve_by_ray", door.model, str(port))
    command = ServerCommand("ray", argv, door.environment, port)
    server = LocalServer(command, door.folder / "ray.log")
    with contextlib.ExitStack() as ended:
        ended.callback(server.start().stop)
        waited_ms = ask_until_ready(server.url, server)
        (report,) = door.wait_for_requests(lambda each: each["trace_id"] == TRACE_ID)
    check_stages(report)
    assert report["ttft_ms"] < waited_ms


@pytest.mark.skipif(
    not os.access(RUST_BINARY, os.X_OK),
    reason="no VLLM_RUST_FRONTEND_PATH: python3 -m pip download 'vllm==0.32.*' --no-deps, then "
    "python3 -m zipfile -e vllm-*.whl /tmp/vllm-wheel; chmod +x /tmp/vllm-wheel/vllm/vllm-rs; "
    "run this test with VLLM_RUST_FRONTEND_PATH=/tmp/vllm-wheel/vllm/vllm-rs",
)
def test_rust_frontend(door: FrontDoor) -> None:
    """Of requests to vLLM's Rust front-end the engine core's own spans, alone and behind our router."""
    own = door.environment | {
        target_check.RUST_FRONTEND: "1",
        "VLLM_RUST_FRONTEND_PATH": RUST_BINARY,
    }
    mono = server_commands.build_mono_command(VllmOptions(Path(door.model), env=own))
    router = build_router_command({"mono": [f"http://{mono.host}:{mono.port}"]}, door.environment)
    with run_servers(mono, router, timeout=600, logs=door.folder / "logs") as (vllm, front):
        with httpx.Client(base_url=vllm.url, timeout=60) as client:
            waited_ms = time_first_bytes(client, {"x-request-id": "alone"})
        (alone,) = door.wait_for_requests(lambda each: "alone" in each["request_id"])
        with httpx.Client(base_url=front.url, timeout=60) as client:
            routed_ms = time_first_bytes(client, {})
        time.sleep(3)  # the engine core's span and the router's come by two exporters
        (routed,) = door.wait_for_requests(lambda each: "router" in each["roles"])
        assert len(door.wait_for_requests(bool, 2)) == 2
        said = vllm.log_path.read_text(errors="replace")

    assert {"prefill.queue", "prefill.compute", "sample", "output"} <= set(alone["stages"])
    assert not {"receive", "preprocess", "ipc", "egress"} & set(alone["stages"])
    check_sum(alone)
    assert alone["ttft_ms"] < waited_ms
    assert {"router.route", "mono.prefill.queue", "mono.prefill.compute"} <= set(routed["stages"])
    check_sum(routed)
    assert 0 < routed["unattributed_ms"] < routed["ttft_ms"] < routed_ms
    # At the start: once what is not seen, and once who sends.
    assert said.count(f"{target_check.RUST_FRONTEND} is set") == 1
    assert said.count("front-end without its hooks") == 1


INPUT_BYTES = 5 * 16000 * 2  # 16-bit samples
QUIET_S = 2.0  # without a message: the answer to an input has ended
PAUSE_S = 3.0  # in which nobody speaks
DELAY_MS = 400.0
INPUTS = 5  # of the first utterance, before two that come at once


@dataclass
class Utterance:
    """What a client saw of one: when it sent each input, and when the first words of the answer came."""

    sent_ns: list[int] = field(default_factory=list)
    waited_ms: list[float] = field(default_factory=list)


def send(socket: ClientConnection, kind: str, **content: Any) -> None:
    """Send an event."""
    socket.send(json.dumps({"type": kind, **content}))


def make_noise() -> str:
    """Speech for one input; other noise each time, because equal audio is encoded once."""
    return base64.b64encode(os.urandom(INPUT_BYTES)).decode()


def read_answer(socket: ClientConnection, timeout_s: float) -> str:
    """The last event's type, once the answer is done, or nothing comes for `timeout_s`."""
    kind = ""
    while kind != "transcription.done":
        try:
            event = json.loads(socket.recv(timeout=timeout_s))
        except TimeoutError:
            break
        kind = event["type"]
        assert kind != "error", event
    return kind


def speak(socket: ClientConnection, control: InjectionControl) -> Utterance:
    """One utterance: INPUTS one after the other, the third and the fourth delayed, then two at once."""
    told = Utterance()
    send(socket, "input_audio_buffer.commit")
    for number in range(INPUTS):
        time.sleep(PAUSE_S)
        control.set_injections({2: {"multimodal": DELAY_MS}, 3: {"encoder": DELAY_MS}}.get(number))
        told.sent_ns.append(time.time_ns())
        begun = time.monotonic()
        send(socket, "input_audio_buffer.append", audio=make_noise())
        event = json.loads(socket.recv(timeout=120))
        told.waited_ms.append((time.monotonic() - begun) * 1000)
        assert event["type"] == "transcription.delta", event
        read_answer(socket, QUIET_S)
    control.set_injections()
    for _ in range(2):
        told.sent_ns.append(time.time_ns())
        send(socket, "input_audio_buffer.append", audio=make_noise())
    send(socket, "input_audio_buffer.commit", final=True)
    assert read_answer(socket, 120) == "transcription.done"
    return told


@pytest.fixture(scope="module")
def session(
    deck: DeploymentDeck, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Utterance, list[dict[str, Any]]]:
    """Two utterances in one WebSocket: what the client saw of the first, and all that was traced."""
    folder = tmp_path_factory.mktemp("realtime")
    model = tiny_models.write_speech_model(folder / "speech")
    extra = ("--load-format", "dummy")
    with run_alone(deck, folder, extra, model=model, max_model_len=4096, warm=False) as bench:
        address = bench.front_url.replace("http", "ws", 1)
        with connect(f"{address}/v1/realtime", max_size=None) as socket:
            assert json.loads(socket.recv(timeout=60))["type"] == "session.created"
            send(socket, "session.update", model="tiny")
            told = speak(socket, bench.control)
            speak(socket, bench.control)
        found = wait_until(
            lambda: len(rows := bench.get_json("/api/requests")) >= 2 * (INPUTS + 2) and rows,
            ARRIVAL_S,
        )
    return told, sorted(found, key=lambda each: each["start_ns"])


def test_each_input(session: tuple[Utterance, list[dict[str, Any]]]) -> None:
    """A trace each, exact sums; it begins when its input came, and ends before the client had words."""
    told, found = session
    assert len(found) == 2 * (INPUTS + 2)
    assert len({each["trace_id"] for each in found}) == len(found)
    assert len({each["request_id"] for each in found}) == 2  # utterances
    for each in found:
        assert not each["error"] and each["unattributed_ms"] == 0.0, each
        assert not {"receive", "egress"} & set(each["stages"])
        assert {"preprocess", "encoder.compute", "prefill.compute", "output"} <= set(each["stages"])
        assert sum(each["stages"].values()) == pytest.approx(each["ttft_ms"], abs=0.01)
    for number, waited_ms in enumerate(told.waited_ms):
        late_ms = (found[number]["start_ns"] - told.sent_ns[number]) / 1e6
        assert 0 <= late_ms < PAUSE_S * 1000  # the pause is before it
        assert late_ms + found[number]["ttft_ms"] < waited_ms + 1


def test_delays(session: tuple[Utterance, list[dict[str, Any]]]) -> None:
    """A delay in one input is in its own stage, and in no other input."""
    _, found = session
    for first in (0, INPUTS + 2):
        inputs = found[first : first + INPUTS]
        for number, stage in ((2, "preprocess"), (3, "encoder.compute")):
            own = inputs[number]["stages"]
            assert own[stage] >= DELAY_MS
            assert sum(own.values()) - own[stage] < DELAY_MS
            others = [
                each["stages"][stage] for at, each in enumerate(inputs) if at not in (0, number)
            ]
            assert max(others) < DELAY_MS


REQUESTS = 20
ROUTING_S = 0.03  # what the router takes before it calls anybody
LEGS = {
    "pd": ("prefill", "decode"),
    "epd": ("encode", "prefill_decode"),
    "epd3": ("encode", "prefill", "decode"),
}


def send_through_foreign_router(
    bench: LiveDeployment, shape: str, stream: bool, tracer: Tracer
) -> str:
    """Send one request through the instances of `shape` as vLLM's proxies do; its ID."""
    name = f"foreign-{os.urandom(8).hex()}"

    def call_instance(role: str, **fields: Any) -> TimedResponse:
        headers: dict[str, str] = {}
        with tracer.start_as_current_span("their call", kind=SpanKind.CLIENT):
            propagate.inject(headers)
            url = bench.fleet.get_url(role)
            named = {"request_id": name, "headers": headers}
            answer = ttft_client.send_timed_request(url, **named, **fields)
        assert answer.status == 200, answer.body
        return answer

    asked: dict[str, Any] = {"prompt": bench.new_prompt(), "words": 200, "max_tokens": 3}
    asked["pictures"] = () if shape == "pd" else (bench.new_picture_seed(),)
    alone = {**asked, "max_tokens": 1, "stream": False}
    extra: dict[str, Any] = {}
    with tracer.start_as_current_span("their request", kind=SpanKind.SERVER):
        time.sleep(ROUTING_S)
        for role in LEGS[shape]:
            if role == "encode":
                answer = call_instance(role, **{**alone, "words": 0})
                extra["ec_transfer_params"] = answer.json()["ec_transfer_params"]
            elif role == "prefill":
                kept = {**extra, "kv_transfer_params": KEEP_BLOCKS_PARAMS}
                answer = call_instance(role, **alone, extra=kept)
                extra["kv_transfer_params"] = answer.json()["kv_transfer_params"]
            else:
                call_instance(role, **asked, stream=stream, extra=extra)
    return name


def count_first_tokens(
    bench: LiveDeployment, rows: list[dict[str, Any]]
) -> tuple[Counter[tuple[str, bool]], Counter[str]]:
    """Spans of first tokens in these requests' traces: by role and outermost; outermost by request."""
    counts: Counter[tuple[str, bool]] = Counter()
    outermost: Counter[str] = Counter()
    for trace_id in {row["trace_id"] for row in rows}:
        for span in bench.get_json(f"/api/trace/{trace_id}")["spans"]:
            if span["name"] in (span_names.TTFT, span_names.ENCODE):
                own = span["attributes"]
                counts[own[keys.ROLE], own[keys.OUTERMOST]] += 1
                outermost[own[keys.REQUEST_ID]] += own[keys.OUTERMOST]
    return counts, outermost


def check_once(bench: LiveDeployment, shape: str, traced: bool) -> None:
    """Each request has exactly one outermost span, each leg its role; the time in the foreign router is
    reported with its error, and is in no sum.
    """
    legs, tracer = LEGS[shape], NoOpTracer()
    if traced:  # its spans come to our receiver
        who = {"service.name": "their-router", "host.name": socket.gethostname()}
        provider = TracerProvider(resource=Resource(who))
        exporter = OTLPSpanExporter(f"{bench.fleet.get_url('receiver')}/v1/traces")
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("their.tracer")
    sent = [
        send_through_foreign_router(bench, shape, number % 2 == 0, tracer)
        for number in range(REQUESTS)
    ]
    many = REQUESTS if traced else REQUESTS * len(legs)

    def list_rows() -> list[dict[str, Any]]:
        """What the report has of these, once it has this many requests and all their last legs."""
        reported = bench.get_json("/api/requests?last=500")
        found = [row for row in reported if row["request_id"] in sent]
        whole = sum(not row["pending"] for row in found)
        has_caller = all(row["before"] for row in found)
        return found if (len(found), whole, has_caller) == (many, REQUESTS, traced) else []

    rows = wait_until(list_rows, ARRIVAL_S)
    # Each instance's exporter sends when its batch is due.
    first_tokens = REQUESTS * len(legs)
    wait_until(lambda: count_first_tokens(bench, rows)[0].total() >= first_tokens, ARRIVAL_S)
    counts, outermost = count_first_tokens(bench, rows)

    assert counts == {(role, role not in INTERMEDIATE_ROLES): REQUESTS for role in legs}
    assert outermost == dict.fromkeys(sent, 1)
    whole = [row for row in rows if not row["pending"]]
    assert len(whole) == REQUESTS and all(row["closed"] for row in whole)
    for row in whole if traced else ():
        assert tuple(row["roles"]) == legs
        before = row["before"]
        assert before["caller"] == "their-router"
        assert before["error_ms"] == clock.WALL_ERROR_US / 1000
        # It ends with the connection, and with vLLM's event loop, which other requests' ends may hold.
        assert ROUTING_S * 1000 <= before["ms"] < ROUTING_S * 1000 + 100
        reported = sum(row["stages"].values()) + row["unattributed_ms"]
        assert reported == pytest.approx(row["ttft_ms"], abs=0.001)


@pytest.mark.parametrize("traced", [False, True])
def test_prefill_and_decode_count_once(pd: LiveDeployment, traced: bool) -> None:
    """Prefill with do_remote_decode, decode with what prefill answered, both kv_both: decode is outermost."""
    check_once(pd, "pd", traced)


@pytest.mark.parametrize("traced", [False, True])
def test_an_encoder_does_not_count(epd: LiveDeployment, traced: bool) -> None:
    """The encoder, then prefill_decode with what the encoder announced: prefill_decode is outermost."""
    check_once(epd, "epd", traced)


def test_three_count_once(epd3: LiveDeployment) -> None:
    """The encoder, prefill (consumer of encodings and kv_both) and decode: one trace, decode is outermost."""
    check_once(epd3, "epd3", traced=True)
