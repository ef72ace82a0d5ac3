# SPDX-License-Identifier: Apache-2.0
"""Our counts on the host's own /metrics."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, generate_latest

from ttft_otel import testing
from ttft_otel.model.names import metric_names
from ttft_otel.tracing import guard, handoff, meter, recorder
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
    sender = testing.MemorySender()
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
    recorder.forget_trace(trace)
    assert read_value(metric_names.PENDING) == 0


def test_errors(guard_keeps: None) -> None:
    """A hook that failed shows with its place."""
    meter.register_collector(recorder.awaiting_traces, dict)
    with guard.Guard("some place"):
        raise ValueError

    assert read_value(f"{metric_names.HOOK_ERRORS}_total", place="some place") == 1


def test_watch_twice() -> None:
    """A second application in the process does not register twice."""
    for _ in range(3):
        meter.register_collector(recorder.awaiting_traces, dict)

    assert generate_latest().count(f"# TYPE {metric_names.PENDING} gauge".encode()) == 1
