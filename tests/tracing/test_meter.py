# SPDX-License-Identifier: Apache-2.0
"""Our counts on the host's own /metrics, also where several API servers share one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import tracing_fakes
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from ttft_otel.model.names import env_names, metric_names
from ttft_otel.tracing import clock, guard, handoff, meter, recorder
from ttft_otel.tracing.asgi import TracingMiddleware
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.settings import Settings


def read_value(name: str, **labels: str) -> float:
    """A sample of the registry that vLLM shows; 0 when it has none yet."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


def make_trace() -> RequestTrace:
    """A sampled trace."""
    return RequestTrace(1, start_context("", "", Settings()), timing_requested=False)


def test_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records sent are the sender's own count, drops are counted with their reason."""
    TracingMiddleware(object(), Settings(), print, print)  # type: ignore[arg-type] # never called
    sender = tracing_fakes.MemorySender()
    monkeypatch.setattr(handoff, "_process_sender", sender)
    monkeypatch.setattr(meter._collectors[0], "counts", handoff.get_counts)
    lost = read_value(f"{metric_names.DROPPED}_total", reason="handoff")
    for sender.full in (False, False, True):
        recorder.send_record(make_trace(), sender)

    assert read_value(f"{metric_names.RECORDS}_total") == 2
    assert read_value(f"{metric_names.DROPPED}_total", reason="handoff") == lost + 1


def test_pending(no_state_left: None) -> None:
    """How many requests wait for their first token is read at the scrape."""
    TracingMiddleware(object(), Settings(), print, print)  # type: ignore[arg-type] # never called
    trace = make_trace()
    recorder.register_engine_request(trace, "a")
    recorder.register_engine_request(trace, "b")

    assert read_value(metric_names.PENDING) == 2
    trace.arrive = clock.now_us() - 3_000_000
    assert 3.0 <= (read_value(metric_names.OLDEST_PENDING) or 0) < 60
    recorder.forget_trace(trace)
    assert read_value(metric_names.PENDING) == read_value(metric_names.OLDEST_PENDING) == 0


def test_errors(guard_keeps: None) -> None:
    """A hook that failed shows with its place."""
    meter.register_collector(recorder.awaiting_traces, dict)
    with guard.Guard("some place"):
        raise ValueError

    assert read_value(f"{metric_names.HOOK_ERRORS}_total", place="some place") == 1


SERVER = Path(__file__).parent / "shared_metrics_server.py"
WAIT_S = 120.0  # for exporters to start and to count, on a busy machine; takes 3
# Of each server: records to lose, errors to make, requests pending.
SERVERS = ((3, 1, 2), (4, 2, 5))
Samples = dict[tuple[str, str], float]


@contextmanager
def start_server(folder: Path, numbers: tuple[int, int, int]) -> Iterator[str]:
    """A process of shared_metrics_server.py; gives its URL."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {
        meter.ENV_SHARED_METRICS: str(folder),
        "PYTHONPATH": str(SERVER.parents[1]),
        env_names.OTEL_EXPORTER_OTLP_ENDPOINT: "http://127.0.0.1:9",
    }
    command = [sys.executable, str(SERVER), *map(str, numbers)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
            process.wait(WAIT_S)


def read_samples(url: str, data: bytes | None = None) -> Samples:
    """What /metrics shows, by name and the value of the only label; with `data` by a POST."""
    with urllib.request.urlopen(url, data, timeout=WAIT_S) as answer:
        text = answer.read().decode()
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("ttft_otel") and sample.name != metric_names.OLDEST_PENDING
    }


def wait_for_samples(url: str, wanted: Samples) -> Samples:
    """The samples once they are those wanted; the last ones when time is up."""
    until = time.monotonic() + WAIT_S
    while (found := read_samples(url)) != wanted and time.monotonic() < until:
        time.sleep(0.1)
    return found


def test_sums_of_all_servers(tmp_path: Path) -> None:
    """Every server shows all metrics of all, with their labels: the exporters' losses, too.

    Records and losses are there at 0 from the start, so that a first loss is an increase.
    """
    losses, errors, pending = (sum(numbers) for numbers in zip(*SERVERS, strict=True))
    unlost = {(f"{metric_names.LOST}_total", reason): 0.0 for reason in meter.LOSS_REASONS}
    records = (f"{metric_names.RECORDS}_total", "")
    before: Samples = {(metric_names.PENDING, ""): pending, records: 0.0, **unlost}
    after = before | {
        records: losses,
        (f"{metric_names.HOOK_ERRORS}_total", "a place"): errors,
        (f"{metric_names.LOST}_total", "foreign"): losses,
    }
    with ExitStack() as stack:
        urls = [stack.enter_context(start_server(tmp_path, numbers)) for numbers in SERVERS]
        assert wait_for_samples(urls[0], before) == before
        for url in urls:
            read_samples(url, b"{}")
        for url in urls:
            assert wait_for_samples(url, after) == after
