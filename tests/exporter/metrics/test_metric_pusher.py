# SPDX-License-Identifier: Apache-2.0
"""Metrics leave the exporter process by OTLP: at its end, in time, and after an outage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

from ttft_otel.exporter.exporter_counters import ExporterCounters
from ttft_otel.exporter.metrics.metric_series import SeriesRegistry
from ttft_otel.exporter.metrics.request_metrics import MetricPusher, RequestMetrics
from ttft_otel.exporter.otlp_exporter import build_metric_exporter
from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.model.names import env_names, keys, metric_names, span_names
from ttft_otel.model.record import Record
from ttft_otel.tracing import handoff
from ttft_otel.tracing.measurement import encode_for_exporter
from ttft_otel.tracing.settings import Settings

RecordMaker = Callable[..., Record]
EVERY = 10  # one request in so many is sampled


def send_requests(sender: handoff.RecordSender, make_record: RecordMaker, number: int) -> None:
    """Hand requests over, most of them not sampled."""
    for each in range(number):
        record = msgspec.structs.replace(make_record(each), flags=int(each % EVERY == 0))
        assert sender.send(encode_for_exporter(record))


def read_counts(collector: Any) -> dict[str, int]:
    """Values by metric, of the newest push alone."""
    if not collector.pushes:
        return {}
    counts: dict[str, int] = {}
    for resource in collector.pushes[-1]:
        for metric in resource.scope_metrics[0].metrics:
            points = getattr(metric, metric.WhichOneof("data")).data_points
            counts[metric.name] = sum(point.count for point in points)
    return counts


@pytest.fixture
def sender(collector: Any) -> Iterator[handoff.RecordSender]:
    """A sender whose exporter process counts."""
    made = handoff.RecordSender(Settings(on=True, endpoint=collector.url, metrics=True))
    yield made
    made.close(30)


def test_everything_is_counted_and_some_is_exported(
    sender: handoff.RecordSender, collector: Any, make_record: RecordMaker, eventually: Any
) -> None:
    """The process counts all requests, exports the sampled ones' spans, and marks both resources."""
    send_requests(sender, make_record, 200)
    sender.close(30)

    eventually(lambda: read_counts(collector).get(metric_names.TTFT_DURATION) == 200)
    assert read_counts(collector) == {
        metric_names.TTFT_DURATION: 200,
        metric_names.STAGE_DURATION: 400,
        metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: 200,
    }
    assert {span.name for span in collector.spans()} >= {span_names.TTFT, "receive"}
    assert len({span.trace_id for span in collector.spans()}) == 200 // EVERY
    instances = set()
    for resource in (collector.pushes[-1][0].resource, collector.received[0].resource):
        found = {each.key: each.value.string_value for each in resource.attributes}
        assert found[keys.METRICS_SOURCE] == keys.METRICS_FROM_EXPORTER
        instances.add(found["service.instance.id"])
    assert len(instances) == 1
    counts = sender.get_counts()
    assert (counts["counted"], counts["foreign"], counts["merged"]) == (200, 0, 0)


def test_standard_interval_and_temporality(
    collector: Any, make_record: RecordMaker, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard variables say how often, and whether each push has everything or what is new."""
    monkeypatch.setenv(env_names.OTEL_METRIC_EXPORT_INTERVAL, "50")
    settings = Settings(on=True, endpoint=collector.url, metrics=True, temporality="delta")
    sender = handoff.RecordSender(settings)
    try:
        send_requests(sender, make_record, 10)
        eventually(lambda: collector.pushes, 30)
        send_requests(sender, make_record, 5)
        eventually(lambda: len(collector.pushes) > 1, 30)
    finally:
        sender.close(30)
    total = 0
    for push in collector.pushes:
        for metric in push[0].scope_metrics[0].metrics:
            if metric.name == metric_names.TTFT_DURATION:
                histogram = metric.exponential_histogram
                delta = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
                assert histogram.aggregation_temporality == delta
                total += sum(point.count for point in histogram.data_points)
    assert total == 15


@pytest.mark.parametrize("is_delta", [False, True])
def test_outage(
    is_delta: bool,
    collector: Any,
    make_record: RecordMaker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a receiver has not taken comes with a later push; an outage is two lines in the log."""
    monkeypatch.setenv(env_names.OTEL_EXPORTER_OTLP_ENDPOINT, collector.url)
    registry = SeriesRegistry(ResourceCache(1, True), is_delta)
    metrics = RequestMetrics(registry, ExporterCounters())
    pusher = MetricPusher(metrics, build_metric_exporter("http/protobuf"), "there")
    collector.status = 400  # the SDK tries again by itself where a later try could help
    for number in range(3):
        metrics.add_record(make_record(number))
        pusher.push()
    collector.status = 200
    metrics.add_record(make_record(3))
    pusher.push()

    counts = [
        sum(point.count for point in metric.exponential_histogram.data_points)
        for push in collector.pushes
        for metric in push[0].scope_metrics[0].metrics
        if metric.name == metric_names.TTFT_DURATION
    ]
    assert counts == ([1, 1, 1, 1] if is_delta else [4])
    lines = [each.getMessage() for each in caplog.records if each.name == "ttft_otel"]
    assert len(lines) == 2 and "there fails" in lines[0] and "there works" in lines[1]


def test_off_sends_no_metrics(collector: Any, make_record: RecordMaker) -> None:
    """Without the variable there are spans, no metrics and no mark."""
    sender = handoff.RecordSender(Settings(on=True, endpoint=collector.url))
    assert sender.send(encode_for_exporter(make_record()))
    sender.close(30)

    assert collector.spans() and not collector.pushes
    resource_keys = {each.key for each in collector.received[0].resource.attributes}
    assert keys.METRICS_SOURCE not in resource_keys
