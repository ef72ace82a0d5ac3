# SPDX-License-Identifier: Apache-2.0
"""Servers that need other options, each started for its own test: tracing off, full, short of memory,
several processes, `ttft-otel demo`; and ranks of a model with experts, which work in step and wait for each
other.

These tests take minutes and run only with `scripts/test --full`. The ranks are vLLM's DPEngineCoreProc, whose
communicator has two calls from lab/vllm_plugins/cpu_experts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opentelemetry.instrumentation import auto_instrumentation

from lab import free_ports, local_deployment, session_processes, tiny_models, ttft_client
from lab.injection import InjectionControl
from lab.local_deployment import DeploymentPlan, start_deployment
from lab.local_servers import LocalServer
from lab.otlp_sinks import MetricSink
from lab.server_commands import VllmOptions, build_vllm_environment
from lab.ttft_client import TimedRequest
from tests import test_wheel
from tests.live.bench import (
    LiveDeployment,
    make_parent_header,
    make_trace_id,
    read_breakdown,
    read_metric,
    read_output_tokens,
)
from tests.live.conftest import GUARD, DeploymentDeck
from tests.live.test_injected import check_stage
from ttft_otel.commands.main import main
from ttft_otel.commands.serve import REQUESTS
from ttft_otel.model import stages
from ttft_otel.model.names import env_names, keys, metric_names
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.tracing import meter

END_METRICS = (
    metric_names.GEN_AI_SERVER_REQUEST_DURATION,
    metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
    metric_names.QUEUE_REASON_DURATION,
    metric_names.QUEUE_HELD_DURATION,
)
DELAY_US = 300_000
pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


@contextmanager
def run_alone(
    deck: DeploymentDeck,
    folder: Path,
    extra: tuple[str, ...] = (),
    *,
    traced: bool = True,
    chunk: int = 512,
    warm: bool = True,
    env: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[LiveDeployment]:
    """Run one server with the text model. extra: flags. warm: send it some requests. options: VllmOptions."""
    deck.stop_running()
    control = InjectionControl(folder / "control.json")
    model = options.pop("model", None) or tiny_models.build_model(tiny_models.TEXT_RECIPE)
    chosen = VllmOptions(**{"model": model, "control": control.path, "extra": extra, **options})
    plan = DeploymentPlan(
        "mono",
        chosen,
        folder=folder,
        traced=traced,
        env={**GUARD, **(env or {})},
        chunk_tokens=chunk,
    )
    with start_deployment(plan) as running:
        bench = LiveDeployment(running, control)
        for _ in range(3 if warm else 0):
            ttft_client.send_timed_request(bench.front_url, max_tokens=2)
        yield bench


def test_auto_instrumentation_traces(deck: DeploymentDeck, tmp_path: Path) -> None:
    """With what opentelemetry-instrument sets, and no TTFT_OTEL, a server is traced as ever."""
    env = {
        "PYTHONPATH": str(Path(auto_instrumentation.__file__).parent),
        "OTEL_PYTHON_DISTRO": "ttft_otel",
    }
    with run_alone(deck, tmp_path, traced=False, env=env) as bench:
        answer, trace = bench.send_traced()
        found = bench.fetch_ttft(trace)

    assert read_breakdown(answer)[stages.UNATTRIBUTED] == found[keys.UNATTRIBUTED_US] == 0


def test_preemption_is_stall_and_its_tokens_are_counted(
    deck: DeploymentDeck, tmp_path: Path
) -> None:
    """A prompt half computed has to leave for others' tokens: stall, and its tokens counted again.

    39 blocks of 32 tokens (and the null block). Three short requests hold 3 each, and 4 after 13
    tokens; the long one is admitted while its 28 fit, and does not fit any more when it gets there.
    """
    extra = ("--num-gpu-blocks-override", "40", "--block-size", "32", "--no-enable-prefix-caching")
    trace = make_trace_id()
    header = make_parent_header(trace)
    short = TimedRequest(words=60, max_tokens=60, extra={"ignore_eos": True})
    late = TimedRequest(words=850, max_tokens=2, headers=header)
    with run_alone(deck, tmp_path, extra, max_model_len=1024, chunk=64) as bench:
        bench.control.set_injections({"forward": 30})
        with ThreadPoolExecutor(3) as pool:
            for number in range(3):
                first = replace(short, prompt=f"s{number}")
                pool.submit(ttft_client.send_timed_request, bench.front_url, first)
            time.sleep(0.3)
            answer = ttft_client.send_timed_request(bench.front_url, late)
        found = bench.fetch_ttft(trace)

    assert answer.status == 200
    assert found[keys.PREEMPTIONS] > 0, found
    assert found[keys.RECOMPUTED_TOKENS] > 0
    assert found[keys.name_stage_attribute("prefill.stall")] > 200_000
    assert found[keys.UNATTRIBUTED_US] == 0


def test_vllms_own_span_hangs_under_our_server_span(deck: DeploymentDeck, tmp_path: Path) -> None:
    """With vLLM's own tracing on, its span llm_request is in the same trace, below our server span."""
    port = free_ports.find_free_port()
    receiver = f"http://127.0.0.1:{port}"
    env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    extra = ("--otlp-traces-endpoint", f"{receiver}/v1/traces")
    sink = local_deployment.build_receiver_command(tmp_path / "own.db", port)
    with LocalServer(sink), run_alone(deck, tmp_path, extra, env=env) as bench:
        _, trace = bench.send_traced(max_tokens=3)

        def wait_for(key: str, value: str, receiver: str = "") -> Any:
            found = bench.wait_for_trace(
                trace, lambda got: any(span[key] == value for span in got), receiver
            )
            return next(span for span in found if span[key] == value)

        theirs, ours = wait_for("name", "llm_request", receiver), wait_for("kind", "server")

    assert theirs["parent_id"] == ours["span_id"]


def test_two_engines_give_one_record_each_with_its_rank(
    deck: DeploymentDeck, tmp_path: Path
) -> None:
    """With --data-parallel-size 2 every request has one ttft span, which names its engine's rank."""
    extra = ("--data-parallel-size", "2")
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with run_alone(deck, tmp_path, extra, env=env) as bench:
        check_one_trace_per_rank(bench, ranks={0, 1})


@pytest.mark.parametrize(
    ("flag", "runner", "places"),
    [
        ("--pipeline-parallel-size", "v2", {"pipeline": "pipeline", "forward": "prefill.compute"}),
        ("--tensor-parallel-size", "v1", {"forward": "prefill.compute"}),
        ("--tensor-parallel-size", "v2", {"forward": "prefill.compute"}),
    ],
)
def test_two_workers_of_one_engine(
    deck: DeploymentDeck, tmp_path: Path, flag: str, runner: str, places: dict[str, str]
) -> None:
    """Nothing is unattributed, of one chunk or several; a delay of a rank is in its stage alone.

    With two pipeline stages on the V1 runner vLLM itself fails on CPU.
    """
    changes: dict[str, Any] = {"runner": runner, "async_scheduling": runner == "v2"}
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with run_alone(deck, tmp_path, (flag, "2"), env=env, chunk=256, **changes) as bench:

        def once(words: int = 40) -> dict[str, int]:
            return bench.read_one(max_tokens=1, words=words)

        found = [once(words) for words in (40, 600, 40, 600)]
        assert all(each[stages.UNATTRIBUTED] == 0 for each in found), found
        assert all(("pipeline" in each) == ("pipeline" in places) for each in found), found
        # The parts of dispatch add up to it; a delay before the step is sent is in the first of them.
        with bench.control.inject_delay("schedule", DELAY_US / 1000):
            _, trace = bench.send_traced(max_tokens=1)
        parts = read_dispatch_parts(bench, trace)
        assert DELAY_US <= parts["schedule"] < 2 * DELAY_US, parts
        # Long ones: two workers on two cores are far apart from one request to the next.
        for place, stage in places.items():
            check_stage(bench, place, stage, once, 800, 100)


def read_dispatch_parts(bench: LiveDeployment, trace: str) -> dict[str, int]:
    """Microseconds of each part of `dispatch`; fails unless they add up to it."""
    dispatch = bench.fetch_ttft(trace)[keys.name_stage_attribute("dispatch")]
    parts: Counter[str] = Counter()
    for span in bench.wait_for_trace(trace, bool):
        if (part := span["attributes"].get(keys.PART)) in stages.STAGE_PARTS["dispatch"]:
            parts[part] += (span["end_ns"] - span["start_ns"]) // 1000
    assert parts.total() == dispatch, (parts, dispatch)
    return parts


def check_one_trace_per_rank(bench: LiveDeployment, ranks: set[int]) -> int:
    """Send requests at once; each has one ttft span, of one of these ranks. Returns how many were sent."""
    traces = [make_trace_id() for _ in range(24)]
    many = [TimedRequest(max_tokens=3, headers=make_parent_header(trace)) for trace in traces]
    assert all(
        answer.status == 200 for answer in ttft_client.send_timed_requests(bench.front_url, many)
    )
    seen = set()
    for trace in traces:
        found = bench.fetch_ttft(trace)
        assert found[keys.UNATTRIBUTED_US] == 0
        seen.add(found[keys.RANK])
    assert seen == ranks
    return len(traces)


@pytest.mark.parametrize("flags", [("--api-server-count", "2"), ()], ids=["two", "one"])
def test_shared_metrics_page(deck: DeploymentDeck, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """With --api-server-count 2, and in a folder that the operator names, each scrape has all our metrics.

    Every request has one ttft span, whichever process served it.
    """
    folder = tmp_path / "shared"
    folder.mkdir()
    # Charts set it for a single server, too; two servers get a folder of vLLM's own without it.
    env = {} if flags else {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    with run_alone(deck, tmp_path, flags, env=env) as bench:
        count = check_one_trace_per_rank(bench, ranks={0})
        time.sleep(3 * meter.PUBLISH_PAUSE_S)
        pages = []
        for _ in range(8):  # whichever process answers
            with urllib.request.urlopen(f"{bench.front_url}/metrics", timeout=20) as answer:
                pages.append(answer.read().decode())
    for page in pages:
        found = dict(re.findall(r"^(ttft_otel_[^ ]+) ([^ ]+)$", page, re.M))
        # A stream has two records; the three requests at the start are counted, too.
        assert float(found[f"{metric_names.RECORDS}_total"]) >= 2 * count
        assert float(found[metric_names.PENDING]) == 0
        for reason in meter.LOSS_REASONS:
            assert float(found[f'{metric_names.LOST}_total{{reason="{reason}"}}']) == 0
    assert bool(list(folder.glob("*.db"))) == bool(env)


def test_ends_are_counted_by_two_api_servers(deck: DeploymentDeck, tmp_path: Path) -> None:
    """With --api-server-count 2 the processes' histograms together have every request once, sampled or not.

    Durations fit into the clients' own, tokens into their `usage`; what held the queues is the queues.
    """
    sink, shared = MetricSink(), tmp_path / "shared"
    shared.mkdir()
    env = {
        env_names.TTFT_OTEL_METRICS: "1",
        env_names.OTEL_EXPORTER_OTLP_METRICS_ENDPOINT: f"{sink.env['TTFT_PROMETHEUS_URL']}/v1/metrics",
        env_names.OTEL_METRIC_EXPORT_INTERVAL: "1000",
        env_names.OTEL_TRACES_SAMPLER: "always_off",
        # Prometheus' metrics of several processes beside ours over OTLP: neither disturbs the other.
        "PROMETHEUS_MULTIPROC_DIR": str(shared),
    }
    # Of a body that streams vLLM tells its usage only if it is asked.
    usage: tuple[dict[str, Any], ...] = ({}, {"stream_options": {"include_usage": True}})
    many = [
        TimedRequest(
            prompt=f"q{number}",
            max_tokens=8,
            stream=bool(number % 2),
            extra={"ignore_eos": True, **usage[number % 2]},
        )
        for number in range(16)
    ]
    flags = ("--api-server-count", "2")
    try:
        with run_alone(deck, tmp_path, flags, env=env, max_num_seqs=2) as bench:
            before = {metric: sum_settled(sink, metric) for metric in END_METRICS}
            bench.control.set_injections({"forward": 20})
            answers = ttft_client.send_timed_requests(bench.front_url, many)
            bench.control.set_injections({})
            refused = bench.send_request(bench.front_url, model="made-up", stream=False)
            after = {metric: sum_settled(sink, metric) for metric in END_METRICS}
        durations = sink.get_series(metric_names.GEN_AI_SERVER_REQUEST_DURATION)
    finally:
        sink.close()
    found = {
        metric: (after[metric][0] - before[metric][0], after[metric][1] - before[metric][1])
        for metric in END_METRICS
    }

    assert {labels.get(keys.ERROR_TYPE, "") for labels, _ in durations} == {"", "404"}
    # Both processes have answered, each with sums of its own.
    assert len({labels["instance"] for labels, _ in durations}) == 2
    client_s = sum(answer.total_us for answer in (*answers, refused)) / 1e6
    count, request_s = found[metric_names.GEN_AI_SERVER_REQUEST_DURATION]
    assert count == len(many) + 1
    assert 0.5 * client_s < request_s <= client_s
    # Steps of 20 ms at least, and no more of them than `usage` tells tokens after the first.
    tokens = [read_output_tokens(answer) for answer in answers]
    assert tokens == [8] * len(many)
    count, token_s = found[metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN]
    assert count == len(many)
    assert 0.02 * count <= token_s <= request_s / 7
    # Two run at a time, so that the others wait: for the same time by reason and by what held them.
    _, waited_s = found[metric_names.QUEUE_REASON_DURATION]
    assert found[metric_names.QUEUE_HELD_DURATION][1] == pytest.approx(waited_s, abs=1e-4)
    assert waited_s >= 6 * 0.02 * len(many)


def sum_settled(sink: MetricSink, metric: str) -> tuple[float, float]:
    """Count and sum of a metric, once three pushes have changed nothing."""
    deadline = time.monotonic() + 60
    last = (-1.0, -1.0)
    while time.monotonic() < deadline:
        found = (sink.sum_field(metric), sink.sum_field(metric, "sum"))
        if found == last and found[0]:
            return found
        last = found
        time.sleep(3.5)
    raise AssertionError(f"{metric} does not settle: {last}")


def test_injected(deck: DeploymentDeck, tmp_path: Path) -> None:
    """A vLLM without ttft-otel in its environment is traced, with PYTHONPATH and TTFT_OTEL alone."""
    folder = test_wheel.build_injected_folder(tmp_path)
    python = test_wheel.make_host_python(tmp_path / "host")
    env = {"PYTHONPATH": str(folder)}
    with run_alone(deck, tmp_path, python=str(python), env=env, control=None) as bench:
        check_one_trace_per_rank(bench, ranks={0})
        log = bench.fleet.servers["mono"].log_path.read_text(errors="replace")
    assert re.search(r"ttft-otel \S+: role mono, (\d+) of \1 targets active", log)


def test_off_is_plain_vllm(deck: DeploymentDeck, tmp_path: Path) -> None:
    """Without TTFT_OTEL log lines, processes and sockets equal those of a vLLM without our plugin."""
    shapes = {}
    for name, env in (("plain", {"VLLM_PLUGINS": "none"}), ("off", {"TTFT_OTEL": ""})):
        folder = tmp_path / name
        folder.mkdir()
        with run_alone(deck, folder, env=env, traced=False, control=None) as bench:
            server, sockets = bench.fleet.servers["mono"], 0
            ttft_client.send_timed_request(bench.front_url, max_tokens=3)
            time.sleep(1)
            pids = session_processes.list_session_pids(server.pid)
            for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").glob("*")):
                with contextlib.suppress(OSError):
                    sockets += os.readlink(link).startswith("socket:")
            shapes[name] = (sockets, len(pids))
            text = server.log_path.read_text(errors="replace")
            # Paths and plugins' names have our package's in them.
            told = "\n".join(line for line in text.splitlines() if "plugins" not in line.lower())
            assert "ttft" not in re.sub(r"\S*[/']ttft\S*|\S*ttft_\w+\S*", "", told)

    assert shapes["off"] == shapes["plain"]


@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_drafts_are_a_part_of_output(deck: DeploymentDeck, tmp_path: Path, method: str) -> None:
    """On the V1 runner the first token waits for a drafter, by n-grams or a layer: `draft` of `output`."""
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method == "eagle":
        head = tiny_models.write_eagle_head(tmp_path / "head", tiny_models.TEXT_RECIPE)
        drafts |= {"model": str(head)}
    else:
        drafts |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with run_alone(deck, tmp_path, ("--speculative-config", json.dumps(drafts))) as bench:
        answer, trace = bench.send_traced(words=80, max_tokens=60)
        ttft = bench.fetch_ttft(trace)
        spans = bench.wait_for_trace(trace, bool)
        drafted = sum(read_metric(bench.front_url, "vllm:spec_decode_num_draft_tokens_total"))
    assert answer.status == 200 and drafted > 0
    (draft,) = [span for span in spans if span["attributes"].get(keys.PART) == "draft"]
    (output,) = [span for span in spans if span["attributes"].get(keys.STAGE) == "output"]
    assert ttft[keys.UNATTRIBUTED_US] == 0
    assert output["start_ns"] <= draft["start_ns"] < draft["end_ns"] <= output["end_ns"]
    if method == "eagle":
        assert draft["end_ns"] - draft["start_ns"] > 100_000  # it computes


def trace_at_rank(bench: LiveDeployment, rank: int) -> str:
    """The trace of one request to this rank."""
    return bench.send_traced(max_tokens=1, headers=make_rank_header(rank))[1]


def make_rank_header(rank: int) -> dict[str, str]:
    """The header that chooses a rank."""
    return {"X-data-parallel-rank": str(rank)}


def test_both_ranks_close(ranks: LiveDeployment) -> None:
    """Nothing is unattributed on either rank, of one chunk or several, alone or beside the other's work."""
    for turn in range(4):
        for words in (40, 900):
            found = ranks.read_one(headers=make_rank_header(turn % 2), max_tokens=1, words=words)
            assert found[stages.UNATTRIBUTED] == 0, found
    for rank in (0, 1):
        assert ranks.fetch_ttft(trace_at_rank(ranks, rank))[keys.RANK] == rank
    assert ranks.list_complaints("mono") == []


def test_a_late_rank_is_dispatch(ranks: LiveDeployment) -> None:
    """What another rank takes before it meets this one is in dispatch alone, in its part dp_sync."""
    once = partial(ranks.read_one, headers=make_rank_header(0), max_tokens=1)
    check_stage(ranks, "other_rank", "dispatch", once, 400, 100)
    with ranks.control.inject_delay("other_rank", DELAY_US / 1000):
        parts = read_dispatch_parts(ranks, trace_at_rank(ranks, 1))

    assert 0.9 * DELAY_US <= parts["dp_sync"] <= 1.2 * DELAY_US, parts


def test_a_batch_for_another_rank_holds_the_queue(ranks: LiveDeployment) -> None:
    """Who comes to a rank without requests, while the other one answers, waits for that one's step."""
    long = {"headers": make_rank_header(0), "max_tokens": 60, "extra": {"ignore_eos": True}}
    with ranks.control.inject_delay("forward", 100), ThreadPoolExecutor(1) as pool:
        pool.submit(ranks.send_request, ranks.front_url, **long)
        time.sleep(1)
        found = [ranks.fetch_ttft(trace_at_rank(ranks, 1)) for _ in range(6)]

    queued = sum(each.get(keys.name_stage_attribute("prefill.queue"), 0) for each in found)
    held = sum(each.get(keys.name_held_attribute("other_rank"), 0) for each in found)
    assert queued >= 100_000, found
    assert held >= 0.95 * queued, found
    assert all(each[keys.UNATTRIBUTED_US] == 0 for each in found)


def test_ten_requests_of_ones_own(tmp_path: Path) -> None:
    """It starts vLLM, some of ten requests wait for a place, sums are exact; the slowest one is named."""
    model = tiny_models.build_model(tiny_models.TEXT_RECIPE)
    mark = f"OF_THIS_TEST={tmp_path}"  # inherited by whatever it starts
    env = {
        **os.environ,
        **dict([mark.split("=")]),
        **build_vllm_environment(VllmOptions(model=model, runner="v1")),
    }
    database = tmp_path / "spans.db"
    words = [*("demo", "--model", str(model), "--db", str(database)), "--", "--enforce-eager"]
    done = subprocess.run(
        [sys.executable, "-m", "ttft_otel.commands.main", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    with open_reader(database) as reader:
        found = reader.list_latest(RequestFilter())
    asked = [each for each in found if each.request_id.startswith("demo-")]
    slowest = max(asked, key=lambda each: each.ttft_us)

    assert len(asked) == REQUESTS and all(each.closed for each in found)
    assert any(dict(each.list_wait_reasons("prefill.queue")).get("max_num_seqs") for each in asked)
    (asking,) = re.findall(r"ttft-otel (explain .*)$", done.stdout, re.M)
    assert asking.split()[-1] == slowest.request_id
    answered = CliRunner().invoke(main, asking.split())
    assert answered.exit_code == 0 and "prefill.queue has" in answered.output, answered.output
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            assert mark.encode() not in path.read_bytes(), path
