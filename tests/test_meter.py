# SPDX-License-Identifier: Apache-2.0
"""Our counts on the host's own /metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY, generate_latest

from ttft_otel import guard, meter, names, recorder
from ttft_otel.asgi import Middleware
from ttft_otel.context import start
from ttft_otel.settings import Settings
from ttft_otel.trip import Trip


def value(name: str, **labels: str) -> float:
    """A sample of the registry that vLLM shows; 0 when it has none yet."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_records() -> None:
    """Records sent and dropped are counted, drops with their reason."""
    sent = value(f"{names.METRIC_RECORDS}_total")
    lost = value(f"{names.METRIC_DROPPED}_total", reason="handoff")
    meter.sent()
    meter.dropped("handoff")

    assert value(f"{names.METRIC_RECORDS}_total") == sent + 1
    assert value(f"{names.METRIC_DROPPED}_total", reason="handoff") == lost + 1


def test_pending(nothing_left: None) -> None:
    """How many requests wait for their first token is read at the scrape."""
    Middleware(object(), Settings(), print, print)  # type: ignore[arg-type] # never called
    trip = Trip(1, start("", "", Settings()), asked=False)
    recorder.register(trip, "a")
    recorder.register(trip, "b")

    assert value(names.METRIC_PENDING) == 2
    recorder.forget(trip)
    assert value(names.METRIC_PENDING) == 0


def test_errors(keep: None) -> None:
    """A hook that failed shows with its place."""
    meter.watch(recorder.awaiting, dict)
    with guard.Guard("some place"):
        raise ValueError

    assert value(f"{names.METRIC_ERRORS}_total", place="some place") == 1


def test_watch_twice() -> None:
    """A second application in the process does not register twice."""
    for _ in range(3):
        meter.watch(recorder.awaiting, dict)

    assert generate_latest().count(f"# TYPE {names.METRIC_PENDING} gauge".encode()) == 1
