# SPDX-License-Identifier: Apache-2.0
"""Metrics of exporter processes through the real collector: the same series, and each request once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from tests.stack import known_requests, otlp_requests
from tests.stack.otlp_requests import PUSH_S, CollectorFront
from tests.stack.running_stack import wait_until
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


def sum_series(front: CollectorFront) -> SeriesSums:
    """Count and sum of every series of a histogram, whatever process it is from."""
    sums: SeriesSums = {}
    for metric in METRICS:
        for labels, point in front.metrics.get_series(metric):
            kept = frozenset(item for item in labels.items() if item[0] not in OWN_LABELS)
            count, total = sums.get((metric, kept), (0, 0.0))
            sums[metric, kept] = (count + point.count, total + point.sum)
    return sums


def send_counted(
    front: CollectorFront, records: list[Record], temporality: str = "cumulative"
) -> None:
    """Send through a real exporter process that counts, and wait until it has drained."""
    url = front.collector.http
    settings = Settings(on=True, endpoint=url, metrics=True, temporality=temporality)
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


def collect_new(front: CollectorFront, send: Callable[[], None], many: int) -> SeriesSums:
    """What `send` adds, three pushes after so many TTFTs were in it: a second count would show."""
    before, counted = sum_series(front), front.count_ttfts()
    send()
    wait_until(lambda: front.count_ttfts() >= counted + many)
    time.sleep(3 * PUSH_S)
    found = {}
    for key, (count, total) in sum_series(front).items():
        old_count, old_total = before.get(key, (0, 0.0))
        if count > old_count:
            found[key] = (count - old_count, total - old_total)
    return found


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Known requests of all roles, with slow and failed ones."""
    rows = [row for row in known_requests.build_known_requests() if not row.number % 8 or row.error]
    return known_requests.list_known_records(rows)


def count_outermost(records: list[Record]) -> int:
    """Requests that metrics count."""
    return sum(record.outermost and record.ttft is not None for record in records)


def test_same_series_as_derived(front: CollectorFront, records: list[Record]) -> None:
    """The process's own metrics are those that the collector makes of the same spans; none counts twice."""
    many, post = count_outermost(records), otlp_requests.post_records
    derived = collect_new(front, partial(post, front.collector.http, records, 100), many)
    assert {metric for metric, _ in derived} == set(METRICS)
    for temporality in ("cumulative", "delta"):
        spans = len(front.spans.list_spans())
        found = collect_new(front, partial(send_counted, front, records, temporality), many)

        assert len(front.spans.list_spans()) > spans
        assert found.keys() == derived.keys()
        for key, (count, total) in derived.items():
            assert found[key] == (count, pytest.approx(total, abs=1e-5)), (key, temporality)


def test_exact_when_few_are_sampled(front: CollectorFront, records: list[Record]) -> None:
    """With one request of ten sampled all are counted, and a tenth of the traces comes out."""
    names = sorted({record.trace_id for record in records})
    traces = {each: f"{number + (7 << 64):032x}" for number, each in enumerate(names)}
    sampled = set([*traces.values()][::10])
    renamed = [msgspec.structs.replace(each, trace_id=traces[each.trace_id]) for each in records]
    mixed = [msgspec.structs.replace(each, flags=int(each.trace_id in sampled)) for each in renamed]
    many, before = count_outermost(records), front.count_ttfts()
    collect_new(front, partial(send_counted, front, mixed), many)

    assert front.count_ttfts() == before + many
    ours = set(traces.values())
    assert set(front.spans.group_by_trace()) & ours == sampled
    exemplars = {each.trace_id.hex() for each in front.metrics.list_exemplars()} & ours
    assert exemplars and exemplars <= sampled


# Last in this file: what calls itself TTFT here is no histogram.
def test_foreign_metrics_stay_out(front: CollectorFront, records: list[Record]) -> None:
    """The collector passes on our metrics under our labels, and nothing else that calls itself one."""
    body = ExportMetricsServiceRequest()
    scope = body.resource_metrics.add().scope_metrics.add()
    scope.scope.name = span_names.SCOPE
    for name in ("someones.metric", metric_names.TTFT_DURATION):
        point = scope.metrics.add(name=name).sum.data_points.add(as_int=1)
        point.attributes.add(key="user.id").value.string_value = "secret"
        scope.metrics[-1].sum.aggregation_temporality = 2
    posted = otlp_requests.post_export(front.collector.http, body, path="/v1/metrics")
    assert posted == 200
    before = front.count_ttfts()
    send_counted(front, records[:10])
    wait_until(lambda: front.count_ttfts() > before)
    time.sleep(3 * PUSH_S)  # some pushes, in which the foreign ones would be

    assert "someones.metric" not in {name for name, _ in front.metrics.points}
    assert not any("user.id" in dict(labels) for _, labels in front.metrics.points)
