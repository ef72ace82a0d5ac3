# SPDX-License-Identifier: Apache-2.0
"""What has been counted: series of metrics by their labels, their OTLP data points, and all of a process.

request_metrics.py finds its series in a SeriesRegistry, adds values, and sends what it holds. Data points are
the SDK's classes, for its OTLP exporter; its aggregation takes values one by one, at 10 to 17 us each, and a
request has a dozen.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource

from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.exporter.spans.span_builder import SCOPE
from ttft_otel.model.metric_table import (
    MAX_EXEMPLARS,
    MAX_HISTOGRAM_BUCKETS,
    MAX_IDLE_S,
    MAX_SERIES,
    METRICS,
    OVERFLOW_LABEL,
    TtftMetric,
)
from ttft_otel.model.names import span_names

try:
    from opentelemetry.sdk.metrics import Exemplar
except ImportError:  # the SDK before 1.28 has none
    Exemplar = None  # type: ignore[assignment, misc]

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
