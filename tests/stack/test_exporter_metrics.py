# SPDX-License-Identifier: Apache-2.0
"""Metrics of exporter processes through the real collector: the same series, and each request once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from lab.otlp_sinks import QUICK_FLUSH_CONFIG, MetricSink, SpanSink
from lab.stack.stack_parts import COLLECTOR_CONFIG
from tests.stack import known_requests, otlp_requests
from tests.stack.running_stack import RunningCollector, StackStarter, wait_until
from ttft_otel.model.names import metric_names, span_names
from ttft_otel.model.record import Record
from ttft_otel.tracing import handoff
from ttft_otel.tracing.measurement import encode_for_exporter
from ttft_otel.tracing.settings import Settings

METRICS = (
    metric_names.TTFT_DURATION,
    metric_names.STAGE_DURATION,
    metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
    metric_names.GEN_AI_SERVER_REQUEST_DURATION,
    metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
    metric_names.QUEUE_REASON_DURATION,
    metric_names.QUEUE_HELD_DURATION,
)
OWN_LABELS = ("instance", "collector.instance.id")
SeriesSums = dict[tuple[str, frozenset[tuple[str, Any]]], tuple[int, float]]


@dataclass
class CountingStack:
    """A collector with sinks behind it, for all tests: each looks at what has come since it began."""

    collector: RunningCollector
    spans: SpanSink
    metrics: MetricSink

    def count_ttfts(self) -> int:
        """Requests that have been counted."""
        return int(self.metrics.sum_field(metric_names.TTFT_DURATION))

    def sum_series(self) -> SeriesSums:
        """Count and sum of every series of a histogram, whatever process it is from."""
        sums: SeriesSums = {}
        for metric in METRICS:
            for labels, point in self.metrics.get_series(metric):
                kept = frozenset(item for item in labels.items() if item[0] not in OWN_LABELS)
                count, total = sums.get((metric, kept), (0, 0.0))
                sums[metric, kept] = (count + point.count, total + point.sum)
        return sums

    def send_counted(self, records: list[Record], temporality: str = "cumulative") -> None:
        """Send through a real exporter process that counts, and wait until it has drained."""
        settings = Settings(
            on=True, endpoint=self.collector.http, metrics=True, temporality=temporality
        )
        # Of each process its own: cumulative series of one instance would replace each other.
        own = {"OTEL_RESOURCE_ATTRIBUTES": f"service.instance.id=sent-{time.time_ns()}"}
        with mock.patch.dict(os.environ, own):
            sender = handoff.RecordSender(settings)
            try:
                handed = [data for record in records if (data := encode_for_exporter(record))]
                assert all(map(sender.send, handed))
                # While the host lives, there is no limit of time.
                wait_until(lambda: sender.get_counts()["finished"] == len(handed), 60)
            finally:
                sender.close(60)

    def collect_new(self, send: Callable[[], None], many: int) -> SeriesSums:
        """What `send` adds, three pushes after so many TTFTs were in it: a second count would show."""
        before, counted = self.sum_series(), self.count_ttfts()
        send()
        wait_until(lambda: self.count_ttfts() >= counted + many)
        time.sleep(3)
        found = {}
        for key, (count, total) in self.sum_series().items():
            old_count, old_total = before.get(key, (0, 0.0))
            if count > old_count:
                found[key] = (count - old_count, total - old_total)
        return found


@pytest.fixture(scope="module")
def counting(bench: StackStarter) -> Iterator[CountingStack]:
    """The collector of this module."""
    spans, metrics = SpanSink(), MetricSink()
    env = {**spans.env, **metrics.env}
    with bench.start_collector(COLLECTOR_CONFIG, QUICK_FLUSH_CONFIG, env=env) as collector:
        yield CountingStack(collector, spans, metrics)
    metrics.close()
    spans.stop()


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Known requests of all roles, with slow and failed ones."""
    rows = [row for row in known_requests.build_known_requests() if not row.number % 8 or row.error]
    return known_requests.list_known_records(rows)


def count_outermost(records: list[Record]) -> int:
    """Requests that metrics count."""
    return sum(record.outermost and record.ttft is not None for record in records)


def test_same_series_as_derived(counting: CountingStack, records: list[Record]) -> None:
    """The process's own metrics are those that the collector makes of the same spans; none counts twice."""
    many, url = count_outermost(records), counting.collector.http
    derived = counting.collect_new(
        lambda: otlp_requests.post_records(url, records, portion=100), many
    )
    assert {metric for metric, _ in derived} == set(METRICS)
    for temporality in ("cumulative", "delta"):
        spans = len(counting.spans.list_spans())
        found = counting.collect_new(partial(counting.send_counted, records, temporality), many)

        assert len(counting.spans.list_spans()) > spans
        assert found.keys() == derived.keys()
        for key, (count, total) in derived.items():
            assert found[key] == (count, pytest.approx(total, abs=1e-5)), (key, temporality)


def test_exact_when_few_are_sampled(counting: CountingStack, records: list[Record]) -> None:
    """With one request of ten sampled all are counted, and a tenth of the traces comes out."""
    traces = {each: f"{number + (7 << 64):032x}" for number, each in enumerate(
        sorted({record.trace_id for record in records})
    )}  # fmt: skip
    sampled = set([*traces.values()][::10])
    renamed = [msgspec.structs.replace(each, trace_id=traces[each.trace_id]) for each in records]
    mixed = [msgspec.structs.replace(each, flags=int(each.trace_id in sampled)) for each in renamed]
    many, before = count_outermost(records), counting.count_ttfts()
    counting.collect_new(lambda: counting.send_counted(mixed), many)

    assert counting.count_ttfts() == before + many
    ours = set(traces.values())
    assert set(counting.spans.group_by_trace()) & ours == sampled
    exemplars = {each.trace_id.hex() for each in counting.metrics.list_exemplars()} & ours
    assert exemplars and exemplars <= sampled


# Last in this file: what calls itself TTFT here is no histogram.
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
    before = counting.count_ttfts()
    counting.send_counted(records[:10])
    wait_until(lambda: counting.count_ttfts() > before)
    time.sleep(3)  # some pushes, in which the foreign ones would be

    assert "someones.metric" not in {name for name, _ in counting.metrics.points}
    assert not any("user.id" in dict(labels) for _, labels in counting.metrics.points)
