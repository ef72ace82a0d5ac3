# SPDX-License-Identifier: Apache-2.0
"""The exporter's benchmark compares like with like, and counts only what was exported."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks import exporter, sdk_exporter
from benchmarks.exporter_records import SPANS_PER_REQUEST, build_request_spans
from benchmarks.process_cpu import read_process_cpu_s
from ttft_otel.tracing import handoff


def _describe_span(span: ReadableSpan, names_by_id: Mapping[int, str]) -> tuple[object, ...]:
    parent = names_by_id.get(span.parent.span_id) if span.parent else None
    times = (span.start_time, span.end_time)
    return span.name, parent, span.kind, times, span.status.status_code, dict(span.attributes or {})


def _describe_spans(spans: list[ReadableSpan]) -> list[tuple[object, ...]]:
    names_by_id = {span.context.span_id: span.name for span in spans}
    return [_describe_span(span, names_by_id) for span in spans]


def test_reference_makes_same_spans() -> None:
    """The SDK's tracer makes the spans that the exporter makes: names, parents, kinds, times, attributes."""
    templates = build_request_spans(1)
    memory = InMemorySpanExporter()
    provider = sdk_exporter.build_provider(memory)
    sdk_exporter.make_spans(provider.get_tracer("test"), templates)
    provider.shutdown()
    made = _describe_spans(list(memory.get_finished_spans()))
    assert len(made) == SPANS_PER_REQUEST
    assert made == _describe_spans(templates)


def test_cpu_of_other_process() -> None:
    """The CPU clock that is read by process ID is the one that the kernel accounts."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    measured = read_process_cpu_s(os.getpid())
    after = resource.getrusage(resource.RUSAGE_SELF)
    # Accounted in ticks of up to 10 ms, where the clock counts nanoseconds.
    assert before.ru_utime + before.ru_stime - 0.02 <= measured
    assert measured <= after.ru_utime + after.ru_stime + 0.02


@pytest.mark.parametrize("counter", ["dropped", "overflowed", "failed", "foreign"])
def test_loss_ends_measurement(counter: str) -> None:
    """A lost record or span is no cheaper span: the benchmark stops."""

    class LosingSender:
        def get_counts(self) -> dict[str, Any]:
            counts = dict.fromkeys((*handoff.SHARED_COUNTERS, "dropped"), 0)
            return counts | {counter: 1}

    with pytest.raises(RuntimeError, match="lost"):
        exporter.wait_until_exported(LosingSender(), 1)  # type: ignore[arg-type]
