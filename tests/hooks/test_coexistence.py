# SPDX-License-Identifier: Apache-2.0
"""Other tracers around a real server with our hooks: one trace with the right parents, and nothing breaks.

At the end actors of a real Ray, with the variables that vLLM copies to its engine cores there; nothing else
here needs Ray (`pip install ray`).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from lab import free_ports
from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.model.names import env_names, span_names

SERVER: Final = Path(__file__).with_name("instrumented_server.py")
# With OpenAI's package, which another product instruments; its arguments: PRODUCT URL.
CLIENT: Final = """
import importlib
import sys

import openai
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

product, url = sys.argv[1:]
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
importlib.import_module(product).OpenAIInstrumentor().instrument()
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
client.completions.create(model="model", prompt="a prompt")
"""
TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"
CALLER: Final = "b7ad6b7169203331"
TRACEPARENT: Final = f"00-{TRACE_ID}-{CALLER}-01"
KIND_SERVER: Final = Span.SPAN_KIND_SERVER


class Sink:
    """Keeps spans by their instrumentation's scope."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = {}
        outer = self

        class Handler(SilentHandler):
            def do_POST(self) -> None:
                body = self.read_body()
                if self.path == "/v1/traces":
                    for each in ExportTraceServiceRequest.FromString(body).resource_spans:
                        for scope in each.scope_spans:
                            outer.spans.setdefault(scope.scope.name, []).extend(scope.spans)
                self.send_answer(200)

        self.server = HttpServerThread(Handler)


@pytest.fixture
def sink() -> Iterator[Sink]:
    """A receiver for what all tracers send."""
    made = Sink()
    yield made
    made.server.close()


def send_plain(port: int, env: dict[str, str], traceparent: str) -> Any:
    """Send one request without a tracer; the answer."""
    headers = {"content-type": "application/json"}
    headers |= {"traceparent": traceparent} if traceparent else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", b"{}", headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def call_server(
    sink: Sink,
    *tool: str,
    traceparent: str = TRACEPARENT,
    send: Callable[[int, dict[str, str], str], Any] = send_plain,
    **env: str,
) -> tuple[Any, str]:
    """Start the server by a tool, call it once, end it; the answer, and what it logged."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "TTFT_OTEL", "DD_")) and name != "LD_PRELOAD"
    }
    kept |= {
        env_names.TTFT_OTEL: "1",
        env_names.OTEL_EXPORTER_OTLP_ENDPOINT: sink.server.url,
        # What the tools export to where nobody says otherwise.
        env_names.OTEL_EXPORTER_OTLP_PROTOCOL: "http/protobuf",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
    }
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*tool, sys.executable, str(SERVER)],
        env=kept | env,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline() or "0")
        assert port, process.communicate()[1]
        said = send(port, kept | env, traceparent)
        return said, process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.communicate()


def find_tool(name: str) -> str:
    """A console script of this environment, or of the folder that PYTHONPATH has."""
    folders = [os.path.dirname(sys.executable), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = shutil.which(name, path=os.pathsep.join(f for e in folders for f in (e, f"{e}/bin")))
    if found is None:
        pytest.skip(f"{name} is missing; pip install it")
    return found


def split_spans(sink: Sink) -> tuple[Span, list[Span]]:
    """Our span of the request, and those of others."""
    (ours,) = [span for span in sink.spans.pop(span_names.SCOPE) if span.kind == KIND_SERVER]
    return ours, [span for spans in sink.spans.values() for span in spans]


@pytest.mark.parametrize("traceparent", [TRACEPARENT, pytest.param("", marks=pytest.mark.full)])
def test_fastapi_instrumentation(sink: Sink, traceparent: str) -> None:
    """The user's FastAPI span stays, below the caller's, and ours hangs below it, in one trace."""
    if find_spec("opentelemetry.instrumentation.fastapi") is None:
        pytest.skip("pip install opentelemetry-instrumentation-fastapi")
    said, log = call_server(
        sink,
        find_tool("opentelemetry-instrument"),
        traceparent=traceparent,
        OTEL_PYTHON_DISTRO="distro",
        OTEL_TRACES_EXPORTER="otlp",
    )
    assert said["tracers"] == "opentelemetry.sdk.trace"
    assert "unexpected middleware stack" not in log
    ours, theirs = split_spans(sink)
    (outer,) = [span for span in theirs if span.kind == KIND_SERVER]

    assert outer.parent_span_id.hex() == (CALLER if traceparent else "")
    assert (ours.trace_id, ours.parent_span_id) == (outer.trace_id, outer.span_id)


def test_ddtrace(sink: Sink) -> None:
    """Under ddtrace-run the server answers, and our span is below the caller's."""
    said, log = call_server(sink, find_tool("ddtrace-run"), DD_TRACE_ENABLED="true")
    ours, _ = split_spans(sink)

    assert "ddtrace" in said["tracers"]
    assert "ttft-otel" not in log
    assert (ours.trace_id.hex(), ours.parent_span_id.hex()) == (TRACE_ID, CALLER)


@pytest.mark.parametrize(
    ("product", "is_one_trace"),
    # OpenInference's sends no traceparent; who instruments the HTTP client, too, has one trace.
    (
        ("opentelemetry.instrumentation.openai", True),
        ("openinference.instrumentation.openai", False),
    ),
)
def test_client_instrumentation(sink: Sink, product: str, is_one_trace: bool) -> None:
    """OpenLLMetry's span around a client's call is the parent of ours; OpenInference's is beside it."""
    try:
        importlib.import_module(product)
    except ImportError:
        package = product.replace(".", "-")
        others = "opentelemetry-semantic-conventions-ai openinference-instrumentation"
        others += " openinference-semantic-conventions"
        pytest.skip(
            f"pip install --no-deps --target FOLDER {package} {others}, and set PYTHONPATH=FOLDER"
        )

    def send(port: int, env: dict[str, str], _: str) -> None:
        command = [sys.executable, "-c", CLIENT, product, f"http://127.0.0.1:{port}"]
        subprocess.run(command, env=env, check=True, timeout=60)

    call_server(sink, send=send)
    ours, (theirs,) = split_spans(sink)

    assert (ours.trace_id == theirs.trace_id) is is_one_trace
    assert ours.parent_span_id == (theirs.span_id if is_one_trace else b"")


ROOT: Final = Path(__file__).parents[2]
# As CoreEngineActorManager makes its actors (vllm/v1/engine/utils.py), and as they load plugins.
DRIVER = """
import os, ray
from ttft_otel import plugin
plugin.register()
from vllm.ray.ray_env import get_env_vars_to_copy
copied = {name: os.environ[name] for name in get_env_vars_to_copy() if name in os.environ}
ray.init()

@ray.remote
class Actor:
    def has_hooks(self):
        from vllm.plugins import load_general_plugins
        from ttft_otel.hooks.wrap import find_patcher
        load_general_plugins()
        return find_patcher() is not None

actor = Actor.options(runtime_env=ray.runtime_env.RuntimeEnv(env_vars=copied)).remote()
print("hooks:", ray.get(actor.has_hooks.remote()))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of a Ray on this machine that has not heard of TTFT_OTEL, and its address."""
    own = {name: os.environ[name] for name in os.environ if not name.startswith(("TTFT_", "OTEL_"))}
    # Actors as important as all else: by default they starve on a busy machine.
    own |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    own["PYTHONPATH"] = f"{ROOT}:{own.get('PYTHONPATH', '')}"
    port = free_ports.find_free_port()
    start = ("start", "--head", f"--port={port}", "--include-dashboard=false", "--block")
    with subprocess.Popen(
        (sys.executable, "-m", "ray.scripts.scripts", *start),
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as head:
        said = ""
        while "Ray runtime started" not in said:
            line = head.stdout.readline()  # type: ignore[union-attr]
            assert line, said
            said += line
        (host,) = re.findall(r"Local node IP: (\S+)", said)
        yield {**own, "RAY_ADDRESS": f"{host}:{port}"}
        head.terminate()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("ray") is None, reason="pip install ray")
@pytest.mark.parametrize("switch", ["1", "0"])
def test_actors_have_hooks(cluster: dict[str, str], switch: str) -> None:
    """An actor has the hooks if the server has them, though its Ray was started without the variable."""
    answer = subprocess.run(
        (sys.executable, "-c", DRIVER),
        env={**cluster, env_names.TTFT_OTEL: switch},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert f"hooks: {switch == '1'}" in answer.stdout, answer.stderr[-3000:]
