# SPDX-License-Identifier: Apache-2.0
"""Metrics of exporter processes through the real collector: the same series, and each request once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from lab.otlp_sinks import QUICK_FLUSH_CONFIG, MetricSink, SpanSink
from lab.stack.stack_parts import COLLECTOR_CONFIG
from tests.stack import known_requests, otlp_requests
from tests.stack.running_stack import StackStarter, wait_until
from ttft_otel.model.names import metric_names, span_names
from ttft_otel.model.record import Record
from ttft_otel.tracing import handoff
from ttft_otel.tracing.measurement import encode_for_exporter
from ttft_otel.tracing.settings import Settings

METRICS = (
    *(
        metric_names.TTFT_DURATION,
        metric_names.STAGE_DURATION,
        metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
    ),
    *(
        metric_names.GEN_AI_SERVER_REQUEST_DURATION,
        metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
        metric_names.QUEUE_REASON_DURATION,
        metric_names.QUEUE_HELD_DURATION,
    ),
)
OWN_LABELS = ("instance", "collector.instance.id")
SeriesSums = dict[tuple[str, frozenset[tuple[str, Any]]], tuple[int, float]]


class CountingStack:
    """A collector with sinks behind it."""

    def __init__(self, starter: StackStarter) -> None:
        self.spans, self.metrics = SpanSink(), MetricSink()
        self.collector = starter.start_collector(
            COLLECTOR_CONFIG, QUICK_FLUSH_CONFIG, env={**self.spans.env, **self.metrics.env}
        )

    def sum_series(self) -> SeriesSums:
        """Count and sum of every series of a histogram, whatever process it is from."""
        sums: SeriesSums = {}
        for metric in METRICS:
            for labels, point in self.metrics.get_series(metric):
                kept = frozenset(item for item in labels.items() if item[0] not in OWN_LABELS)
                count, total = sums.get((metric, kept), (0, 0.0))
                sums[metric, kept] = (count + point.count, round(total + point.sum, 6))
        return sums

    def send_counted(self, records: list[Record], temporality: str = "cumulative") -> None:
        """Send through a real exporter process that counts, and wait until it has drained."""
        sender = handoff.RecordSender(
            Settings(on=True, endpoint=self.collector.http, metrics=True, temporality=temporality)
        )
        try:
            for record in records:
                data = encode_for_exporter(record)
                assert not data or sender.send(data)
        finally:
            sender.close(60)

    def close(self) -> None:
        """Stop everything."""
        self.collector.stop()
        self.metrics.close()
        self.spans.stop()


@pytest.fixture
def counting(bench: StackStarter) -> Iterator[CountingStack]:
    """A collector of this test's own."""
    made = CountingStack(bench)
    yield made
    made.close()


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Known requests of all roles, with slow and failed ones."""
    rows = [row for row in known_requests.build_known_requests() if not row.number % 8 or row.error]
    return known_requests.list_known_records(rows)


def count_outermost(records: list[Record]) -> int:
    """Requests that metrics count."""
    return sum(record.outermost and record.ttft is not None for record in records)


def settle(stack: CountingStack, many: int) -> SeriesSums:
    """The series, three pushes after so many TTFTs were in them: a second count of them would show."""
    wait_until(lambda: stack.metrics.sum_field(metric_names.TTFT_DURATION) >= many)
    time.sleep(3)
    return stack.sum_series()


@pytest.fixture(scope="module")
def derived(bench: StackStarter, records: list[Record]) -> SeriesSums:
    """The series that a collector makes of these requests' spans."""
    deriving = CountingStack(bench)
    try:
        otlp_requests.post_records(deriving.collector.http, records, portion=100)
        return settle(deriving, count_outermost(records))
    finally:
        deriving.close()


@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
def test_same_series_as_derived(
    derived: SeriesSums, counting: CountingStack, records: list[Record], temporality: str
) -> None:
    """The process's own metrics are those that the collector makes of the same spans; none counts twice."""
    counting.send_counted(records, temporality)
    found = settle(counting, count_outermost(records))

    assert counting.spans.list_spans()
    assert {metric for metric, _ in derived} == set(METRICS)
    assert found.keys() == derived.keys()
    for key, (count, total) in derived.items():
        assert found[key] == (count, pytest.approx(total, abs=1e-5)), key


def test_exact_when_few_are_sampled(counting: CountingStack, records: list[Record]) -> None:
    """With one request of ten sampled all are counted, and a tenth of the traces comes out."""
    requests = sorted({record.trace_id for record in records})
    sampled = set(requests[::10])
    mixed = [
        msgspec.structs.replace(record, flags=int(record.trace_id in sampled)) for record in records
    ]
    counting.send_counted(mixed)
    settle(counting, count_outermost(records))

    assert counting.metrics.sum_field(metric_names.TTFT_DURATION) == count_outermost(records)
    assert set(counting.spans.group_by_trace()) == sampled
    exemplars = counting.metrics.list_exemplars()
    assert exemplars and {each.trace_id.hex() for each in exemplars} <= sampled


def test_foreign_metrics_stay_out(counting: CountingStack, records: list[Record]) -> None:
    """The collector passes on our metrics under our labels, and nothing else that calls itself one."""
    body = ExportMetricsServiceRequest()
    scope = body.resource_metrics.add().scope_metrics.add()
    scope.scope.name = span_names.SCOPE
    for name in ("someones.metric", metric_names.TTFT_DURATION):
        point = scope.metrics.add(name=name).sum.data_points.add(as_int=1)
        point.attributes.add(key="user.id").value.string_value = "secret"
        scope.metrics[-1].sum.aggregation_temporality = 2
    posted = otlp_requests.post_export(counting.collector.http, body, path="/v1/metrics")
    assert posted == 200
    counting.send_counted(records[:10])
    wait_until(lambda: counting.metrics.sum_field(metric_names.TTFT_DURATION) >= 1)
    time.sleep(3)  # some pushes, in which the foreign ones would be

    assert "someones.metric" not in {name for name, _ in counting.metrics.points}
    assert not any("user.id" in dict(labels) for _, labels in counting.metrics.points)
