# SPDX-License-Identifier: Apache-2.0
"""Counts every request into series: sampled ones by their Records, others by their measurements.

export_worker.py adds them. A request is a row of numbers, kept below the columns of its labels until many
rows are counted at once: by far the cheaper way. A thread of its own pushes them by the SDK's OTLP
exporter, so that an endpoint that does not answer keeps no span waiting. Endpoint, headers, TLS,
compression, timeout and interval are the standard OTEL_* variables. Data points are the SDK's classes; its
aggregation takes values one by one, at 10 to 17 us each, and a request has a dozen.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource

from ttft_otel.exporter.otlp_exporter import (
    build_metric_exporter,
    describe_tls_files,
    renew_exporter,
)
from ttft_otel.exporter.record_queue import ExporterCounters
from ttft_otel.exporter.span_batch import SCOPE, ResourceCache
from ttft_otel.exporter.span_writer import list_kind_attributes
from ttft_otel.model import stages
from ttft_otel.model.metric_table import (
    MAX_EXEMPLARS,
    MAX_HISTOGRAM_BUCKETS,
    MAX_IDLE_S,
    MAX_SERIES,
    METRICS,
    OVERFLOW_LABEL,
    PUSH_INTERVAL_S,
    STATUS_LABEL,
    STATUS_VALUES,
    TtftMetric,
)
from ttft_otel.model.names import env_names, keys, metric_names, span_names
from ttft_otel.model.record import Attributes, Record, RecordDecodeError
from ttft_otel.tracing import measurement
from ttft_otel.tracing.context import SAMPLED_FLAG
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.measurement import NOT_MEASURED, Measurement, MeasurementHead
from ttft_otel.tracing.settings import Settings

try:
    from opentelemetry.sdk.metrics import Exemplar
except ImportError:  # the SDK before 1.28 has none
    Exemplar = None  # type: ignore[assignment, misc]

log = logging.getLogger("ttft_otel")

MAX_PENDING_ROWS: Final = 4096  # requests that are not counted yet, at some 0.6 KB
MAX_PLANS: Final = 4096  # heads whose series are known
# What a few requests have besides their times: a metric, its own label with that label's value ("" for none).
_RECOMPUTED: Final = (metric_names.EC_RECOMPUTED, "", "")
_REASONS: Final = tuple(
    (metric_names.QUEUE_REASON_DURATION, keys.QUEUE_REASON, name)
    for name in stages.WAIT_REASON_NAMES
)
_HELD: Final = tuple(
    (metric_names.QUEUE_HELD_DURATION, keys.HELD_BY_KIND, name)
    for name in stages.HOLDING_KIND_NAMES
)
MAX_UNSENT: Final = 20  # pushes of delta metrics that are kept during an outage
PUSH_TIMEOUT_MS: Final = 4000.0  # of one push with its retries, for SDKs that ask for it here
US_PER_S: Final = 1_000_000
MAX_IDLE_NS: Final = MAX_IDLE_S * 10**9
# Prometheus takes no finer ones. 2**8 buckets for each doubling: a value is off by 0.14 % at most.
MAX_SCALE: Final = 8
_LOG2_US_PER_S: Final = math.log2(US_PER_S)
# A bucket's upper bound belongs to it, but the logarithm of 2 s is not exactly 1 s's plus 1. Between two
# whole microseconds there is more, up to 27 hours.
_ROUNDING: Final = 1e-9

Labels = Mapping[str, str | bool]
_SeriesKey = tuple[int, frozenset[tuple[str, str | bool]]]
# A sampled request behind a value: trace, its `ttft` span, and when it was counted (Unix ns).
TraceExample = tuple[int, int, int]


class Series:
    """Values under one set of labels, since `start_ns` (Unix time); by itself a counter.

    has_changed: whether a value has come since the last data point. used_at_ns: of the last one that had.
    is_overflow: it has the values of all series beyond a limit.
    """

    def __init__(self, labels: Labels, start_ns: int) -> None:
        self.labels = labels
        self.used_at_ns = start_ns
        self.is_overflow = OVERFLOW_LABEL in labels
        self.examples: dict[int, tuple[int, TraceExample]] = {}
        self.reset(start_ns)

    def reset(self, start_ns: int) -> None:
        """Forget all values, and count from `start_ns` on."""
        self.start_ns = start_ns
        self.has_changed = False
        # The sum stays an integer: rounding errors of floats would add up for weeks.
        self.count = self.sum_us = 0
        self.min_us = -1
        self.max_us = 0

    def add_values(self, values_us: Sequence[int]) -> None:
        """Add values, at least one, in microseconds."""
        self.has_changed = True
        self.count += len(values_us)
        self.sum_us += sum(values_us)
        # -1 stands for "none yet", because 0 is a length that a stage can have.
        least = min(values_us)
        self.min_us = least if self.min_us < 0 else min(self.min_us, least)
        self.max_us = max(self.max_us, max(values_us))
        # Many are equal, and counting equal ones is the cheapest of all.
        self.count_values(Counter(values_us))

    def add_example(self, value_us: int, example: TraceExample) -> None:
        """Keep the trace of a value: the newest one for each power of two, so that slow ones have theirs."""
        self.examples[value_us.bit_length()] = (value_us, example)

    def take_exemplars(self) -> list[Exemplar]:
        """The traces of the largest values since the last call."""
        # Cleared with each data point: an exemplar belongs to its interval.
        kept = sorted(self.examples.values(), reverse=True)[:MAX_EXEMPLARS]
        self.examples.clear()
        # Without filtered attributes: the labels are the series' own.
        return [
            Exemplar({}, value_us / US_PER_S, time_ns, span_id, trace_id)
            for value_us, (trace_id, span_id, time_ns) in kept
        ]

    def count_values(self, values: Mapping[int, int]) -> None:
        """Count values, each as often as it says, into buckets, which a counter does not have."""

    def make_point(self, time_ns: int) -> Any:
        """The data point at `time_ns` (Unix time)."""
        # A counter's values have no unit of time.
        return NumberDataPoint(**self._list_common_fields(time_ns), value=self.sum_us)

    def _list_common_fields(self, time_ns: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "attributes": self.labels,
            "start_time_unix_nano": self.start_ns,
            "time_unix_nano": time_ns,
        }
        if Exemplar is not None:
            fields["exemplars"] = self.take_exemplars()
        return fields

    def _list_histogram_fields(self, time_ns: int) -> dict[str, Any]:
        return self._list_common_fields(time_ns) | {
            "count": self.count,
            "sum": self.sum_us / US_PER_S,
            "min": max(0, self.min_us) / US_PER_S,
            "max": self.max_us / US_PER_S,
        }


class ExponentialSeries(Series):
    """Exponential buckets; number i: above 2**(i / 2**scale) s, up to 2**((i + 1) / 2**scale) s.

    The scale falls, and pairs of buckets become one, when values span more than MAX_HISTOGRAM_BUCKETS.
    zero_count: values of 0, which no bucket has.
    """

    def reset(self, start_ns: int) -> None:
        super().reset(start_ns)
        self.scale = MAX_SCALE
        self.zero_count = 0
        self.counts: dict[int, int] = {}

    def count_values(self, values: Mapping[int, int]) -> None:
        """As above; values are whole microseconds."""
        counts, factor, log2 = self.counts, 2.0**self.scale, math.log2
        for value_us, number in values.items():
            if value_us > 0:
                index = math.ceil((log2(value_us) - _LOG2_US_PER_S) * factor - _ROUNDING) - 1
                counts[index] = counts.get(index, 0) + number
            else:
                self.zero_count += number
        self._fit_range()

    def _fit_range(self) -> None:
        """Halve the scale's resolution until the buckets from the first to the last are few enough."""
        if not self.counts:
            return
        low, high, steps = min(self.counts), max(self.counts), 0
        while (high >> steps) - (low >> steps) >= MAX_HISTOGRAM_BUCKETS:
            steps += 1
        if steps:
            merged: dict[int, int] = {}
            for index, number in self.counts.items():
                # Scale n - 1 has bucket i >> 1 where scale n has i, below 0 as well.
                merged[index >> steps] = merged.get(index >> steps, 0) + number
            self.counts = merged
            self.scale -= steps

    def list_counts(self) -> tuple[int, list[int]]:
        """The first bucket's index, and the counts from there to the last one; (0, []) without any."""
        if not self.counts:
            return 0, []
        first, last = min(self.counts), max(self.counts)
        return first, [self.counts.get(index, 0) for index in range(first, last + 1)]

    def make_point(self, time_ns: int) -> ExponentialHistogramDataPoint:
        offset, counts = self.list_counts()
        return ExponentialHistogramDataPoint(
            **self._list_histogram_fields(time_ns),
            scale=self.scale,
            zero_count=self.zero_count,
            positive=Buckets(offset, counts),
            negative=Buckets(0, []),
            flags=0,
        )


class BoundedSeries(Series):
    """A histogram with given buckets. bounds_s: their upper bounds, in seconds."""

    def __init__(self, labels: Labels, start_ns: int, bounds_s: Sequence[float] = ()) -> None:
        self.bounds_s = bounds_s
        # As whole microseconds, so that a value on a bound is not moved by a float's last bit.
        self.bounds_us = [round(bound * US_PER_S) for bound in bounds_s]
        super().__init__(labels, start_ns)

    def reset(self, start_ns: int) -> None:
        super().reset(start_ns)
        # One more than there are bounds: OTLP's last bucket reaches to infinity.
        self.counts = [0] * (len(self.bounds_us) + 1)

    def count_values(self, values: Mapping[int, int]) -> None:
        for value_us, number in values.items():
            # bisect_left: OTLP's upper bounds belong to their buckets.
            self.counts[bisect_left(self.bounds_us, value_us)] += number

    def make_point(self, time_ns: int) -> HistogramDataPoint:
        return HistogramDataPoint(
            **self._list_histogram_fields(time_ns),
            bucket_counts=list(self.counts),
            explicit_bounds=self.bounds_s,
        )


def make_series(metric: TtftMetric, labels: Labels, start_ns: int) -> Series:
    """An empty series of `metric`, of the kind that it asks for."""
    if metric.is_sum:
        return Series(labels, start_ns)
    if metric.bounds_s:
        return BoundedSeries(labels, start_ns, metric.bounds_s)
    return ExponentialSeries(labels, start_ns)


@dataclass(eq=False)
class SeriesRegistry:
    """All series of one exporter process, by metric, resource and labels.

    Series that nobody uses are forgotten.
    """

    resources: ResourceCache
    is_delta: bool  #: data points have what came since the last ones, else since the series began
    max_series: int = MAX_SERIES  #: of a metric; beyond it values go into one series without labels
    # By metric, because the limit is for each: many stages must not push the TTFT out.
    _series: dict[str, dict[_SeriesKey, Series]] = field(
        default_factory=lambda: {name: {} for name in METRICS}, init=False
    )
    # Of metrics, by id() of that of spans; ResourceCache keeps these for good, so that no id() is used again.
    _resources: dict[int, Resource] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return sum(map(len, self._series.values()))

    def get(self, metric: str, service: str, labels: Labels, time_ns: int) -> Series:
        """The series with these labels, or the one for all beyond the limit; `time_ns` begins a new one."""
        resource = self.resources.get(service)
        place = id(resource)  # one object for equal resources, and quicker than a comparison
        if place not in self._resources:
            self._resources[place] = self.resources.build_metrics_resource(resource)
        known = self._series[metric]
        key = (place, frozenset(labels.items()))
        # The overflow's own series comes on top of the limit, one for each resource.
        if key not in known and len(known) >= self.max_series:
            labels = {OVERFLOW_LABEL: True}
            key = (place, frozenset(labels.items()))
        if key not in known:
            known[key] = make_series(METRICS[metric], labels, time_ns)
        return known[key]

    def forget_idle(self, time_ns: int) -> bool:
        """Forget the series without a value for MAX_IDLE_NS; whether there were any."""
        before = len(self)
        for metric, known in self._series.items():
            # Plans of request_metrics.py may still refer to what is forgotten: it drops them all.
            self._series[metric] = {
                key: series
                for key, series in known.items()
                if series.has_changed or time_ns - series.used_at_ns < MAX_IDLE_NS
            }
        return len(self) < before

    def take_data(self, time_ns: int) -> MetricsData | None:
        """What is to be sent at `time_ns`; None without a value. Delta series begin anew."""
        metrics: dict[int, list[Metric]] = {}
        for name, known in self._series.items():
            points: dict[int, list[Any]] = {}
            for (place, _), series in known.items():
                # Cumulative ones are sent unchanged, too: a gap looks like a target's end.
                if series.has_changed:
                    series.used_at_ns = time_ns
                elif self.is_delta:
                    continue
                points.setdefault(place, []).append(series.make_point(time_ns))
                series.has_changed = False
                if self.is_delta:
                    series.reset(time_ns)
            for place, made in points.items():
                metrics.setdefault(place, []).append(self._make_metric(name, made))
        # An empty push would still be an HTTP request for each process and interval.
        if not metrics:
            return None
        return MetricsData(
            [
                ResourceMetrics(
                    self._resources[place],
                    [ScopeMetrics(SCOPE, made, span_names.SCHEMA_URL)],
                    self._resources[place].schema_url,
                )
                for place, made in metrics.items()
            ]
        )

    def _make_metric(self, name: str, points: list[Any]) -> Metric:
        temporality = (
            AggregationTemporality.DELTA if self.is_delta else AggregationTemporality.CUMULATIVE
        )
        metric = METRICS[name]
        data: ExponentialHistogram | Histogram | Sum
        # Monotonic: without it a backend takes the sum for a gauge and computes no rate.
        if metric.is_sum:
            data = Sum(points, temporality, is_monotonic=True)
        elif metric.bounds_s:
            data = Histogram(points, temporality)
        else:
            data = ExponentialHistogram(points, temporality)
        return Metric(name, metric.description, metric.unit, data)


@dataclass(slots=True)
class _Plan:
    """Where the numbers of one head go; those of its requests that are not counted yet."""

    head: MeasurementHead
    columns: list[list[Series]]  #: the series of each time
    rows: list[tuple[int, ...]] = field(default_factory=list)  #: times, microseconds
    #: Other values (items, microseconds of queues) by metric, label and its value.
    others: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)


class RequestMetrics:
    """The metrics of one exporter process; safe to use from the worker's and the pusher's thread."""

    def __init__(self, registry: SeriesRegistry, counters: ExporterCounters) -> None:
        self.registry = registry
        self.counters = counters
        # By the head's bytes: a known head need not be decoded, which is nearly every one.
        self._plans: dict[bytes, _Plan] = {}
        self._pending_rows = 0
        # The worker counts while the pusher's thread takes data.
        self._lock = threading.Lock()

    def add_measurements(self, batch: list[bytes]) -> None:
        """Count unsampled requests by their measurements; what is none is counted as `foreign`."""
        foreign = 0
        with self._lock:
            for data in batch:
                try:
                    self._add_row(measurement.decode_measurement(data))
                except RecordDecodeError:
                    foreign += 1
            self.counters.add("counted", len(batch) - foreign)
            self.counters.add("foreign", foreign)

    def add_record(self, record: Record) -> None:
        """Count what a sampled request's record has of it. Raises ValueError for broken IDs."""
        found = measurement.measure_record(record)
        if found is None or not record.flags & SAMPLED_FLAG:
            return
        head, measured = found
        # Before the lock: broken IDs raise here, and nothing has been counted yet.
        span_id = record.ttft.span_id if head.has_ttft and record.ttft else record.span_id
        example = int(record.trace_id, 16), int(span_id, 16), time.time_ns()
        with self._lock:
            plan = self._add_row(measured)
            self.counters.add("counted")
            for column, value_us in zip(plan.columns, measured.times_us, strict=True):
                for series in column:
                    series.add_example(value_us, example)

    def take_data(self) -> MetricsData | None:
        """What is to be sent now; None without a value."""
        with self._lock:
            self._count_rows()
            time_ns = time.time_ns()
            if self.registry.forget_idle(time_ns):
                self._plans.clear()
            return self.registry.take_data(time_ns)

    def _add_row(self, measured: Measurement) -> _Plan:
        head = bytes(measured.head)
        plan = self._plans.get(head)
        if plan is None:
            plan = self._make_plan(head)
        # The columns are paired with the times by position: one too few would shift all of them.
        if len(measured.times_us) != len(plan.columns):
            raise RecordDecodeError("a measurement with more or fewer times than its head has")
        if self._pending_rows >= MAX_PENDING_ROWS:
            self._count_rows()
        self._pending_rows += 1
        plan.rows.append(measured.times_us)
        if measured.recomputed_items != NOT_MEASURED:
            plan.others.setdefault(_RECOMPUTED, []).append(measured.recomputed_items)
        for code, length_us in measured.reasons:
            plan.others.setdefault(_REASONS[code], []).append(length_us)
        for code, length_us in measured.held:
            plan.others.setdefault(_HELD[code], []).append(length_us)
        return plan

    def _count_rows(self) -> None:
        self._pending_rows = 0
        for plan in self._plans.values():
            if not plan.rows:
                continue
            rows, plan.rows = plan.rows, []
            for column, values_us in zip(plan.columns, zip(*rows, strict=True), strict=True):
                for series in column:
                    self._add_values(series, values_us)
            # Their series are few, and found anew each time.
            for (metric, label, value), values in plan.others.items():
                series = self._find_series(metric, plan.head, {label: value})
                self._add_values(series, tuple(values))
            plan.others.clear()

    def _add_values(self, series: Series, values: tuple[int, ...]) -> None:
        series.add_values(values)
        if series.is_overflow:
            self.counters.add("merged", len(values))

    def _make_plan(self, data: bytes) -> _Plan:
        """The series of a new head. Raises RecordDecodeError for bytes that are none."""
        head = measurement.decode_head(data)
        if len(self._plans) >= MAX_PLANS:
            self._count_rows()
            self._plans.clear()
        self._plans[data] = plan = _Plan(head, self._find_columns(head))
        return plan

    def _find_columns(self, head: MeasurementHead) -> list[list[Series]]:
        """The series of each of a measurement's times; none for a TTFT that another server counts."""

        def find(metric: str, own: Attributes | None = None) -> Series:
            return self._find_series(metric, head, own or {})

        columns: list[list[Series]] = []
        if head.has_ttft:
            ttft = [find(metric_names.TTFT_DURATION)] if head.is_outermost else []
            # The convention counts answers that began; an encoder's has no token.
            if ttft and not head.error and not head.is_encoder:
                ttft.append(find(metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN))
            columns.append(ttft)
        for stage, instance in head.stages:
            # The spans' own attributes, so that metrics of either origin have the same labels.
            own = list_kind_attributes("stage", stage) | {keys.INSTANCE: instance}
            columns.append([find(metric_names.STAGE_DURATION, own)])
        if head.end_error is not None:
            error: Attributes = {keys.ERROR_TYPE: head.end_error}
            columns.append([find(metric_names.GEN_AI_SERVER_REQUEST_DURATION, error)])
        if head.has_token_time:
            columns.append([find(metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN)])
        return columns

    def _find_series(self, metric: str, head: MeasurementHead, own: Attributes) -> Series:
        """The series of a head and of labels of its `own`, which win."""
        common: Attributes = {
            keys.ROLE: head.role,
            keys.MODEL: head.model,
            keys.ERROR_TYPE: head.error,
            keys.OPERATION: head.operation,
            keys.PROVIDER: keys.PROVIDER_VLLM,
            STATUS_LABEL: STATUS_VALUES[bool(head.error)],
        }
        values = common | own
        # Empty ones are left out: to Prometheus an empty label and a missing one are the same.
        labels = {
            name: str(values[name]) for name in METRICS[metric].all_labels if values.get(name)
        }
        return self.registry.get(metric, head.service, labels, time.time_ns())


class MetricPusher:
    """Pushes `metrics` every `interval_s` seconds, and once more at the end.

    destination: for log lines.
    """

    def __init__(
        self,
        metrics: RequestMetrics,
        exporter: MetricExporter,
        destination: str,
        interval_s: float = PUSH_INTERVAL_S,
    ) -> None:
        self.metrics = metrics
        self.exporter = exporter
        self.tls_files = describe_tls_files()
        self.destination = destination
        self.interval_s = interval_s
        self.is_failing = False
        # Cumulative metrics need no second try: the next push has all of this one.
        is_delta = metrics.registry.is_delta
        self._unsent: deque[MetricsData] = deque(maxlen=MAX_UNSENT if is_delta else 1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Push what is there, and end the thread."""
        # Ends the wait at once; the thread pushes once more, so that the last interval is not lost.
        self._ended.set()
        self._thread.join()

    def push(self) -> None:
        """Send what has been counted; what is not taken is sent with the next push."""
        with Guard("exporter.metrics"):
            data = self.metrics.take_data()
            if data is not None:
                if len(self._unsent) == self._unsent.maxlen and self.metrics.registry.is_delta:
                    log.warning("ttft-otel exporter: the metrics of one interval are lost")
                self._unsent.append(data)
            # The oldest first, and kept until it is taken: each delta arrives once, in order.
            while self._unsent and self._try_export(self._unsent[0]):
                self._unsent.popleft()

    def _run(self) -> None:
        # If an HTTP client is instrumented in this environment, our pushes must not become spans.
        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        while not self._ended.wait(self.interval_s):
            self.push()
        self.push()

    def _try_export(self, data: MetricsData) -> bool:
        try:
            result = self.exporter.export(data, timeout_millis=PUSH_TIMEOUT_MS)
        except OSError:  # the SDK before 1.34 lets errors of requests pass
            result = MetricExportResult.FAILURE
        if result is not MetricExportResult.SUCCESS:
            self.tls_files = renew_exporter(self.exporter, self.tls_files)
        # One line when it begins to fail and one when it works again, none for what is between.
        if (result is MetricExportResult.SUCCESS) is self.is_failing:
            self.is_failing = not self.is_failing
            state = "fails; the next push has what this one had" if self.is_failing else "works"
            log.warning("ttft-otel exporter: sending metrics to %s %s", self.destination, state)
        return not self.is_failing


def start_pusher(
    settings: Settings, resources: ResourceCache, counters: ExporterCounters
) -> MetricPusher:
    """Start to push the metrics of one exporter process; the SDK reads the standard variables."""
    registry = SeriesRegistry(resources, settings.temporality != "cumulative")
    exporter = build_metric_exporter(
        os.environ.get(env_names.OTEL_EXPORTER_OTLP_METRICS_PROTOCOL) or settings.protocol
    )
    destination = os.environ.get(env_names.OTEL_EXPORTER_OTLP_METRICS_ENDPOINT) or settings.endpoint
    interval_ms = settings.numbers.get(
        env_names.OTEL_METRIC_EXPORT_INTERVAL, PUSH_INTERVAL_S * 1000
    )
    pusher = MetricPusher(
        RequestMetrics(registry, counters), exporter, destination, interval_ms / 1000
    )
    pusher.start()
    return pusher
