# SPDX-License-Identifier: Apache-2.0
"""What the exporter process counts itself: the collector's series, in the SDK's buckets, pushed by OTLP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    InMemoryMetricReader,
    MetricsData,
)
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View

from lab.otlp_sinks import to_attributes
from ttft_otel.exporter import request_metrics
from ttft_otel.exporter.otlp_exporter import build_metric_exporter
from ttft_otel.exporter.record_queue import ExporterCounters
from ttft_otel.exporter.request_metrics import (
    MAX_IDLE_NS,
    MAX_SCALE,
    US_PER_S,
    ExponentialSeries,
    MetricPusher,
    RequestMetrics,
    SeriesRegistry,
)
from ttft_otel.exporter.span_batch import ResourceCache
from ttft_otel.model.metric_table import (
    MAX_HISTOGRAM_BUCKETS,
    MAX_SERIES,
    METRICS,
    OVERFLOW_LABEL,
    STATUS_LABEL,
)
from ttft_otel.model.names import env_names, keys, metric_names, span_names
from ttft_otel.model.record import Piece, Record, Server
from ttft_otel.tracing import handoff, measurement
from ttft_otel.tracing.settings import Settings

RecordMaker = Callable[..., Record]


def build_metrics(is_delta: bool = False, max_series: int = 2000) -> RequestMetrics:
    """Metrics of one process."""
    registry = SeriesRegistry(ResourceCache(4711, True), is_delta, max_series)
    return RequestMetrics(registry, ExporterCounters())


def add(metrics: RequestMetrics, *records: Record) -> None:
    """Count records as the exporter gets them: whole, or their measurements."""
    for record in records:
        if record.flags:
            metrics.add_record(record)
        else:
            metrics.add_measurements([measurement.encode_for_exporter(record)])


def list_points(data: MetricsData | None) -> list[tuple[str, dict[str, Any], Any]]:
    """Metric, labels and data point of every series."""
    assert data is not None
    return [
        (metric.name, dict(point.attributes), point)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    ]


def count_points(*records: Record) -> list[tuple[str, dict[str, Any], Any]]:
    """list_points() of what these records leave."""
    metrics = build_metrics()
    add(metrics, *records)
    return list_points(metrics.take_data())


def take_points(metrics: RequestMetrics, name: str) -> list[Any]:
    """The data points of one metric's series."""
    return [point for each, _, point in list_points(metrics.take_data()) if each == name]


def change_ttft(record: Record, **fields: Any) -> Record:
    """The record with other fields of its TTFT."""
    assert record.ttft is not None
    return msgspec.structs.replace(record, ttft=msgspec.structs.replace(record.ttft, **fields))


def test_all_requests_count(make_record: RecordMaker) -> None:
    """A request is one TTFT and one value for each of its stages' spans, the same if it is not sampled."""
    either = []
    for flags in (0, 1):
        made = (msgspec.structs.replace(make_record(number), flags=flags) for number in range(10))
        either.append(
            [
                (name, labels, point.count, point.sum, point.min, point.max)
                for name, labels, point in count_points(*made)
            ]
        )

    assert either[0] == either[1]
    assert {(name, labels.get(keys.STAGE, "")): count for name, labels, count, *_ in either[0]} == {
        (metric_names.TTFT_DURATION, ""): 10,
        (metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN, ""): 10,
        (metric_names.STAGE_DURATION, "receive"): 10,
        (metric_names.STAGE_DURATION, "preprocess"): 10,
    }


def test_labels(make_record: RecordMaker) -> None:
    """Labels are the collector's, those that have a value; the sum of stages is the sum of TTFTs."""
    pieces = (
        Piece("stage", "router.receive", 0, 100),
        Piece("stage", "mono.prefill.compute", 100, 900, {keys.INSTANCE: "a:8000"}),
    )
    record = change_ttft(make_record(), pieces=pieces)
    record = msgspec.structs.replace(record, role="router", attributes={keys.MODEL: "m"})
    points = count_points(record)

    for name, labels, _ in points:
        assert set(labels) <= set(METRICS[name].all_labels) and "" not in labels.values()
    found = {labels[keys.STAGE]: labels for name, labels, _ in points if keys.STAGE in labels}
    assert found["mono.prefill.compute"] == {
        keys.ROLE: "router",
        keys.MODEL: "m",
        keys.STAGE: "mono.prefill.compute",
        keys.LEG: "mono",
        keys.INSTANCE: "a:8000",
    }
    assert keys.LEG not in found["router.receive"]
    sums = {name: 0.0 for name in METRICS}
    for name, _, point in points:
        sums[name] += point.sum
    assert sums[metric_names.TTFT_DURATION] == pytest.approx(sums[metric_names.STAGE_DURATION])


def test_failed_requests_stay_apart(make_record: RecordMaker) -> None:
    """A failed request has series of its own, by its error, and no place in those of the convention."""
    failed = change_ttft(make_record(2), error="cancelled", died="preprocess")
    unsampled = msgspec.structs.replace(failed, flags=0)
    assert {
        (name, labels.get(keys.ERROR_TYPE, ""), labels.get(STATUS_LABEL)): point.count
        for name, labels, point in count_points(make_record(1), failed, unsampled)
        if name != metric_names.STAGE_DURATION
    } == {
        (metric_names.TTFT_DURATION, "", "STATUS_CODE_UNSET"): 1,
        (metric_names.TTFT_DURATION, "cancelled", "STATUS_CODE_ERROR"): 2,
        (metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN, "", None): 1,
    }


def test_encoder_and_inner_servers(make_record: RecordMaker) -> None:
    """An encoder's answer is no first token; of a server behind a router only encodings count."""
    encoder = change_ttft(make_record(1), name=span_names.ENCODE)
    inner = change_ttft(make_record(2), attributes={keys.EC_RECOMPUTED_ITEMS: 3})
    inner, plain = (
        msgspec.structs.replace(each, outermost=False) for each in (inner, make_record(3))
    )
    found = {name: point for name, _, point in count_points(encoder, inner, plain)}

    names = metric_names.TTFT_DURATION, metric_names.STAGE_DURATION, metric_names.EC_RECOMPUTED
    assert {*found} == {*names}
    assert found[metric_names.EC_RECOMPUTED].value == 3
    assert found[metric_names.TTFT_DURATION].count == 1


def test_exemplars_are_sampled_traces(make_record: RecordMaker) -> None:
    """An exemplar is a sampled request's value and its `ttft` span; each is sent once."""
    metrics = build_metrics()
    sampled = make_record(7)
    add(metrics, sampled, msgspec.structs.replace(make_record(8), flags=0))

    (whole,) = take_points(metrics, metric_names.TTFT_DURATION)
    (exemplar,) = whole.exemplars
    assert sampled.ttft is not None
    assert exemplar.trace_id == int(sampled.trace_id, 16)
    assert exemplar.span_id == int(sampled.ttft.span_id, 16)
    assert exemplar.value == 0.0009
    assert not any(point.exemplars for _, _, point in list_points(metrics.take_data()))
    # A duration that is told apart leads to the request's own span, which ends with it.
    ((duration,),) = count_ends(end(sampled, Server("POST", 700, 200))).values()
    assert [each.span_id for each in duration.exemplars] == [int(sampled.span_id, 16)]


def test_slow_requests_keep_their_exemplars(make_record: RecordMaker) -> None:
    """Many fast requests do not drive the trace of a slow one away."""
    metrics = build_metrics()
    add(metrics, change_ttft(make_record(0), end=9_000_000))
    add(metrics, *(change_ttft(make_record(number), end=900 + number) for number in range(500)))

    (whole,) = take_points(metrics, metric_names.TTFT_DURATION)
    assert len(whole.exemplars) <= 10
    assert 9.0 in [exemplar.value for exemplar in whole.exemplars]


@pytest.mark.parametrize("is_delta", [False, True])
def test_temporality(is_delta: bool, make_record: RecordMaker) -> None:
    """Cumulative points have all since the start, delta points what came since the last one."""
    metrics = build_metrics(is_delta)
    add(metrics, make_record(1))
    first = metrics.take_data()
    add(metrics, make_record(2))
    second = metrics.take_data()
    third = metrics.take_data()

    counts = [
        point.count for name, _, point in list_points(second) if name == metric_names.TTFT_DURATION
    ]
    assert counts == [1 if is_delta else 2]
    before, after = list_points(first)[0][2], list_points(second)[0][2]
    assert after.start_time_unix_nano == (
        before.time_unix_nano if is_delta else before.start_time_unix_nano
    )
    assert (third is None) == is_delta
    assert second is not None
    metric = second.resource_metrics[0].scope_metrics[0].metrics[0]
    wanted = AggregationTemporality.DELTA if is_delta else AggregationTemporality.CUMULATIVE
    assert metric.data.aggregation_temporality == wanted


def test_series_are_bounded(make_record: RecordMaker) -> None:
    """Beyond the limit values lose their labels, none is lost, and it is counted."""
    metrics = build_metrics(max_series=5)
    for number in range(20):
        add(metrics, msgspec.structs.replace(make_record(), attributes={keys.MODEL: f"m{number}"}))
    whole = take_points(metrics, metric_names.TTFT_DURATION)
    assert sum(point.count for point in whole) == 20
    overflowed = [each.count for each in whole if each.attributes == {OVERFLOW_LABEL: True}]
    assert overflowed == [15]
    # Of the TTFT, of the convention, and of two stages, whose series are full after two requests and a half.
    assert metrics.counters.get_counts()["merged"] == 15 + 15 + 35


def test_idle_series_are_forgotten(
    make_record: RecordMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A series without a value for an hour goes; the next value begins a new one."""
    now_ns = [10**18]
    monkeypatch.setattr(request_metrics.time, "time_ns", lambda: now_ns[0])
    metrics = build_metrics()
    add(metrics, make_record(1))
    metrics.take_data()
    now_ns[0] += MAX_IDLE_NS
    assert metrics.take_data() is None
    add(metrics, make_record(2))

    ((count, start_ns),) = {
        (point.count, point.start_time_unix_nano)
        for _, _, point in list_points(metrics.take_data())
    }
    assert (count, start_ns) == (1, now_ns[0])


def test_rows_are_counted_before_they_are_too_many(
    make_record: RecordMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and heads that wait are bounded, and none is lost by it."""
    monkeypatch.setattr(request_metrics, "MAX_PENDING_ROWS", 4)
    monkeypatch.setattr(request_metrics, "MAX_PLANS", 2)
    metrics = build_metrics()
    for number in range(50):
        model = {keys.MODEL: f"m{number % 5}"}
        add(metrics, msgspec.structs.replace(make_record(), attributes=model, flags=number % 2))

    assert sum(point.count for point in take_points(metrics, metric_names.TTFT_DURATION)) == 50


def test_foreign_bytes_are_counted(make_record: RecordMaker) -> None:
    """What is no measurement is counted as such, and those beside it count."""
    metrics = build_metrics()
    good = measurement.encode_for_exporter(msgspec.structs.replace(make_record(), flags=0))
    head = msgspec.msgpack.encode(("no", "head"))
    short = msgspec.msgpack.decode(good[1:])
    short[2] = short[2][:-1]
    version = measurement.MEASUREMENT_VERSION
    bad = [b"m", b"m" + msgspec.msgpack.encode((version, msgspec.Raw(head), (1,), -1))]
    bad.append(b"m" + msgspec.msgpack.encode(short))
    metrics.add_measurements([*bad, good])

    counts = metrics.counters.get_counts()
    assert (counts["foreign"], counts["counted"]) == (3, 1)


def test_one_service_name_for_all_roles(
    make_record: RecordMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one name for all roles no two points of a push have the same labels and resource."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    metrics = build_metrics()
    for service in ("vllm", "vllm-decode"):
        add(metrics, msgspec.structs.replace(make_record(), service=service))
    data = metrics.take_data()

    assert data is not None and len(data.resource_metrics) == 1
    points = [(name, *sorted(labels.items())) for name, labels, _ in list_points(data)]
    assert len(points) == len(set(points))
    assert MAX_SERIES == 2000


@pytest.mark.parametrize("outermost", [True, False])
def test_queues(make_record: RecordMaker, outermost: bool) -> None:
    """Outermost or not, queues count for their reasons and for each kind that held them; stalls do not."""
    held = {keys.name_held_attribute("decode"): 300, keys.name_held_attribute("idle"): 100}
    pieces = (
        Piece("stage", "prefill.queue", 0, 400, {keys.QUEUE_REASON: "kv_blocks"} | held),
        Piece("stage", "encoder.queue", 400, 450, {keys.name_held_attribute("own"): 50}),
        Piece("reason", "lora", 400, 420, {keys.QUEUE_REASON: "lora"}),
        Piece("reason", "lora", 420, 450, {keys.QUEUE_REASON: "lora"}),
        Piece("stage", "prefill.stall", 450, 900, {keys.STALL_REASON: "in_step"} | held),
    )
    record = change_ttft(make_record(), pieces=pieces, attributes=dict(held))
    points = count_points(
        *(msgspec.structs.replace(record, flags=flags, outermost=outermost) for flags in (0, 1))
    )
    found = {
        (name, labels.get(keys.QUEUE_REASON) or labels.get(keys.HELD_BY_KIND)): (
            point.count,
            round(point.sum * 1e6),
        )
        for name, labels, point in points
        if name in (metric_names.QUEUE_REASON_DURATION, metric_names.QUEUE_HELD_DURATION)
    }

    assert found == {
        (metric_names.QUEUE_REASON_DURATION, "kv_blocks"): (2, 800),
        (metric_names.QUEUE_REASON_DURATION, "lora"): (4, 100),
        (metric_names.QUEUE_HELD_DURATION, "decode"): (2, 600),
        (metric_names.QUEUE_HELD_DURATION, "idle"): (2, 200),
        (metric_names.QUEUE_HELD_DURATION, "own"): (2, 100),
    }
    assert any(name == metric_names.TTFT_DURATION for name, _, _ in points) == outermost


END_METRICS = (
    metric_names.GEN_AI_SERVER_REQUEST_DURATION,
    metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
)
IDENTITY = {keys.OPERATION: "chat", keys.MODEL: "m"}


def count_ends(*records: Record) -> dict[tuple[str, str], list[Any]]:
    """Data points of the metrics that are known at a request's end, by metric and error."""
    metrics = build_metrics()
    add(metrics, *records)
    found: dict[tuple[str, str], list[Any]] = {}
    for name, labels, point in list_points(metrics.take_data() or MetricsData([])):
        if name in END_METRICS:
            found.setdefault((name, str(labels.get(keys.ERROR_TYPE, ""))), []).append(point)
    assert metrics.counters.get_counts()["foreign"] == 0
    return found


def end(record: Record, server: Server, **fields: Any) -> Record:
    """The half of `record` that is sent at the request's end."""
    return msgspec.structs.replace(record, ttft=None, server=server, attributes=IDENTITY, **fields)


@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.parametrize("halves", [False, True])
def test_each_request_once(make_record: RecordMaker, flags: int, halves: bool) -> None:
    """Sampled or not, in one record or in two: one duration, one time per token, in their buckets."""
    server = Server("POST", 700_000, 200, {keys.TIME_PER_OUTPUT_TOKEN_US: 20_000})
    first = msgspec.structs.replace(make_record(), flags=flags, attributes=IDENTITY, server=None)
    last = end(make_record(), server, flags=flags)
    whole = msgspec.structs.replace(first, server=server)
    found = count_ends(*((first, last) if halves else (whole,)))

    (duration,) = found.pop((metric_names.GEN_AI_SERVER_REQUEST_DURATION, ""))
    (token_time,) = found.pop((metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN, ""))
    assert not found
    assert (duration.count, duration.sum) == (1, 0.7)
    assert (token_time.count, token_time.sum) == (1, 0.02)
    # (0.64, 1.28], and (0.01, 0.025]
    assert duration.bucket_counts.index(1) == duration.explicit_bounds.index(0.64) + 1
    assert token_time.bucket_counts.index(1) == token_time.explicit_bounds.index(0.01) + 1
    assert dict(duration.attributes) == {
        keys.OPERATION: "chat",
        keys.PROVIDER: "vllm",
        keys.MODEL: "m",
    }


def test_ends(make_record: RecordMaker) -> None:
    """What failed, or was refused, has series of its own; of a server behind a router no duration counts."""
    made = make_record()
    found = count_ends(
        end(made, Server("POST", 10, 200)),
        end(made, Server("POST", 20, 404)),
        end(made, Server("POST", 30, 503, {}, "503")),
        end(made, Server("POST", 40, 200, {}, keys.ERROR_CANCELLED)),
    )

    assert {error: points[0].sum for (_, error), points in found.items()} == {
        "": 10e-6,
        "404": 20e-6,
        "503": 30e-6,
        keys.ERROR_CANCELLED: 40e-6,
    }
    # Durations are the client's, which the router tells; times per token come from who decodes.
    server = Server("POST", 700, 200, {keys.TIME_PER_OUTPUT_TOKEN_US: 20})
    found = count_ends(end(made, server, outermost=False))
    assert set(found) == {(metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN, "")}


times_us = st.integers(0, 10**10) | st.sampled_from(
    [1, 15_625, 500_000, 10**6, 2 * 10**6, 64 * 10**6]
)


def build_reference(values_us: list[int]) -> Any:
    """The SDK's data point of the same values."""
    reader = InMemoryMetricReader()
    aggregation = ExponentialBucketHistogramAggregation(max_size=MAX_HISTOGRAM_BUCKETS)
    provider = MeterProvider(
        [reader], views=[View(instrument_name="*", aggregation=aggregation)], shutdown_on_exit=False
    )
    histogram = provider.get_meter("test").create_histogram("ttft.duration", "s")
    for value_us in values_us:
        histogram.record(value_us / US_PER_S)
    data = reader.get_metrics_data()
    assert data is not None
    point = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points[0]
    provider.shutdown()
    return point


def merge_counts(offset: int, counts: Any, steps: int) -> Counter[int]:
    """Counts by bucket, at a scale lower by `steps`; empty buckets left out."""
    merged: Counter[int] = Counter()
    for place, number in enumerate(counts):
        if number:
            merged[(offset + place) >> steps] += number
    return merged


@given(st.lists(st.lists(times_us, min_size=1, max_size=40), min_size=1, max_size=4))
def test_same_as_sdk(batches: list[list[int]]) -> None:
    """Values added in batches fill the buckets that the SDK fills one by one."""
    ours = ExponentialSeries({}, 0)
    for batch in batches:
        ours.add_values(batch)
    reference = build_reference([value for batch in batches for value in batch])
    offset, counts = ours.list_counts()

    assert len(counts) <= MAX_HISTOGRAM_BUCKETS
    assert ours.zero_count == reference.zero_count
    assert sum(counts) + ours.zero_count == reference.count
    # The SDK begins finer than Prometheus takes, and both fall as far as their range asks for.
    scale = min(ours.scale, reference.scale)
    assert ours.scale == min(reference.scale, MAX_SCALE) or not counts
    assert merge_counts(offset, counts, ours.scale - scale) == merge_counts(
        reference.positive.offset, reference.positive.bucket_counts, reference.scale - scale
    )


def test_error_is_bounded() -> None:
    """Over a factor of 1000 a bucket is no wider than 4.4 %, as in the collector."""
    buckets = ExponentialSeries({}, 0)
    buckets.add_values([1000, 1_000_000])

    assert 2 ** (2**-buckets.scale) <= 1.0444


@pytest.mark.parametrize("is_on", [True, False])
def test_process(is_on: bool, collector: Any, make_record: RecordMaker) -> None:
    """It counts all requests, exports the sampled ones' spans, and marks both resources; off only spans."""
    sender = handoff.RecordSender(Settings(on=True, endpoint=collector.url, metrics=is_on))
    for number in range(200):
        record = msgspec.structs.replace(make_record(number), flags=int(number % 10 == 0))
        assert sender.send(measurement.encode_for_exporter(record))
    sender.close(30)

    assert {span.name for span in collector.spans} >= {span_names.TTFT, "receive"}
    assert len({span.trace_id for span in collector.spans}) == 20
    if not is_on:
        assert not collector.metrics and keys.METRICS_SOURCE not in collector.resource
        return
    assert {
        metric.name: sum(point.count for point in read_points(metric))
        for metric in collector.list_pushes()[-1]
    } == {
        metric_names.TTFT_DURATION: 200,
        metric_names.STAGE_DURATION: 400,
        metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: 200,
    }
    of_metrics = to_attributes(collector.metrics[-1].resource_metrics[0].resource.attributes)
    for name in (keys.METRICS_SOURCE, "service.instance.id"):
        assert of_metrics[name] == collector.resource[name]
    counts = sender.get_counts()
    assert (counts["counted"], counts["foreign"], counts["merged"]) == (200, 0, 0)


def read_points(metric: Any) -> Any:
    """The data points of a metric that was pushed."""
    return getattr(metric, metric.WhichOneof("data")).data_points


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
    metrics = build_metrics(is_delta)
    pusher = MetricPusher(metrics, build_metric_exporter("http/protobuf"), "there")
    collector.status = 400  # the SDK tries again by itself where a later try could help
    for number in range(3):
        metrics.add_record(make_record(number))
        pusher.push()
    collector.status = 200
    metrics.add_record(make_record(3))
    pusher.push()

    counts = [
        sum(point.count for point in read_points(metric))
        for push in collector.list_pushes()
        for metric in push
        if metric.name == metric_names.TTFT_DURATION
    ]
    assert counts == ([1, 1, 1, 1] if is_delta else [4])
    lines = [each.getMessage() for each in caplog.records if each.name == "ttft_otel"]
    assert len(lines) == 2 and "there fails" in lines[0] and "there works" in lines[1]
