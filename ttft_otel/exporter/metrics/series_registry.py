# SPDX-License-Identifier: Apache-2.0
"""All series of one exporter process, bounded; request_metrics.py finds them here, and sends what they hold.

Beyond MAX_SERIES values go into one series without labels, and are counted. Series that nobody uses are
forgotten.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    ExponentialHistogram,
    Histogram,
    Metric,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource

from ttft_otel.exporter.metrics.measured_series import (
    BoundedSeries,
    ExponentialSeries,
    Labels,
    Series,
    SumSeries,
)
from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.exporter.spans.span_builder import SCOPE
from ttft_otel.model.metric_labels import BUCKET_BOUNDS_S, OVERFLOW_LABEL
from ttft_otel.model.names import metric_names

MAX_SERIES: Final = 2000  # of each metric, as in the collector
MAX_IDLE_NS: Final = (
    3600 * 10**9
)  # without a value, then a series is forgotten; as in the collector


class _Metric(NamedTuple):
    unit: str
    description: str
    series_class: type[Series]


METRIC_KINDS: Final = {
    metric_names.TTFT_DURATION: _Metric("s", "Time to first token.", ExponentialSeries),
    metric_names.STAGE_DURATION: _Metric(
        "s", "Lengths of the stages of a TTFT.", ExponentialSeries
    ),
    metric_names.QUEUE_REASON_DURATION: _Metric(
        "s", "Time in queues, by the reason why a request waited.", ExponentialSeries
    ),
    metric_names.QUEUE_HELD_DURATION: _Metric(
        "s", "Time in queues, by the work that held the engine meanwhile.", ExponentialSeries
    ),
    metric_names.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: _Metric(
        "s", "Time to generate first token.", BoundedSeries
    ),
    metric_names.GEN_AI_SERVER_REQUEST_DURATION: _Metric(
        "s", "Duration of requests, to the last byte of the answer.", BoundedSeries
    ),
    metric_names.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: _Metric(
        "s", "Time per output token after the first one.", BoundedSeries
    ),
    metric_names.EC_RECOMPUTED: _Metric(
        "{item}",
        "Media items encoded on an encoder-cache consumer although an encoder had encoded them.",
        SumSeries,
    ),
}
_SeriesKey = tuple[int, frozenset[tuple[str, str | bool]]]


def _make_series(metric: str, labels: Labels, start_ns: int) -> Series:
    series_class = METRIC_KINDS[metric].series_class
    if issubclass(series_class, BoundedSeries):
        return series_class(labels, start_ns, BUCKET_BOUNDS_S[metric])
    return series_class(labels, start_ns)


class SeriesRegistry:
    """Series by metric, resource and labels.

    is_delta: data points have what came since the last ones, else since the series began.
    """

    def __init__(
        self, resources: ResourceCache, is_delta: bool, max_series: int = MAX_SERIES
    ) -> None:
        self.resources = resources
        self.is_delta = is_delta
        self.max_series = max_series
        # By metric, because the limit is for each: many stages must not push the TTFT out.
        self._series: dict[str, dict[_SeriesKey, Series]] = {name: {} for name in METRIC_KINDS}
        # ResourceCache keeps its resources for good, so that an id() is never used again.
        self._resources: dict[int, Resource] = {}  # of metrics, by id() of that of spans

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
            known[key] = _make_series(metric, labels, time_ns)
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
                ResourceMetrics(self._resources[place], [ScopeMetrics(SCOPE, made, "")], "")
                for place, made in metrics.items()
            ]
        )

    def _make_metric(self, name: str, points: list[Any]) -> Metric:
        temporality = (
            AggregationTemporality.DELTA if self.is_delta else AggregationTemporality.CUMULATIVE
        )
        kind = METRIC_KINDS[name]
        data: ExponentialHistogram | Histogram | Sum
        # Monotonic: without it a backend takes the sum for a gauge and computes no rate.
        if kind.series_class is SumSeries:
            data = Sum(points, temporality, is_monotonic=True)
        elif kind.series_class is BoundedSeries:
            data = Histogram(points, temporality)
        else:
            data = ExponentialHistogram(points, temporality)
        return Metric(name, kind.description, kind.unit, data)
