# SPDX-License-Identifier: Apache-2.0
"""Series of metrics: what has been counted under one set of labels, and its OTLP data point.

request_metrics.py adds values; the data points are the SDK's classes, for its OTLP exporter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from opentelemetry.sdk.metrics.export import (
    Buckets,
    ExponentialHistogramDataPoint,
    HistogramDataPoint,
    NumberDataPoint,
)

from ttft_otel.exporter.metrics.exponential_buckets import US_PER_S, ExponentialBuckets
from ttft_otel.model.metric_labels import OVERFLOW_LABEL

try:
    from opentelemetry.sdk.metrics import Exemplar
except ImportError:  # the SDK before 1.28 has none
    Exemplar = None  # type: ignore[assignment, misc]

# They make every push larger, and only those of the slowest requests are opened.
MAX_EXEMPLARS: Final = 10  # of a data point

Labels = Mapping[str, str | bool]


class TraceExample(NamedTuple):
    """A sampled request behind a value: its `ttft` span, and when it was counted (Unix ns)."""

    trace_id: int
    span_id: int
    time_ns: int


class Series(ABC):
    """Values under one set of labels, since `start_ns` (Unix time).

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
        self.min_us, self.max_us = -1, 0

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
            Exemplar({}, value_us / US_PER_S, each.time_ns, each.span_id, each.trace_id)
            for value_us, each in kept
        ]

    @abstractmethod
    def count_values(self, values: Mapping[int, int]) -> None:
        """Count values, each as often as it says, into buckets."""

    @abstractmethod
    def make_point(self, time_ns: int) -> Any:
        """The data point at `time_ns` (Unix time)."""

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
    """A histogram with exponential buckets."""

    def reset(self, start_ns: int) -> None:
        """As above."""
        super().reset(start_ns)
        self.buckets = ExponentialBuckets()

    def count_values(self, values: Mapping[int, int]) -> None:
        """As above."""
        self.buckets.add_values(values)

    def make_point(self, time_ns: int) -> ExponentialHistogramDataPoint:
        """As above."""
        offset, counts = self.buckets.list_counts()
        return ExponentialHistogramDataPoint(
            **self._list_histogram_fields(time_ns),
            scale=self.buckets.scale,
            zero_count=self.buckets.zero_count,
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
        """As above."""
        super().reset(start_ns)
        # One more than there are bounds: OTLP's last bucket reaches to infinity.
        self.counts = [0] * (len(self.bounds_us) + 1)

    def count_values(self, values: Mapping[int, int]) -> None:
        """As above."""
        for value_us, number in values.items():
            # bisect_left: OTLP's upper bounds belong to their buckets.
            self.counts[bisect_left(self.bounds_us, value_us)] += number

    def make_point(self, time_ns: int) -> HistogramDataPoint:
        """As above."""
        return HistogramDataPoint(
            **self._list_histogram_fields(time_ns),
            bucket_counts=list(self.counts),
            explicit_bounds=self.bounds_s,
        )


class SumSeries(Series):
    """A counter; its values have no unit of time."""

    def count_values(self, values: Mapping[int, int]) -> None:
        """A sum has no buckets."""

    def make_point(self, time_ns: int) -> NumberDataPoint:
        """As above."""
        return NumberDataPoint(**self._list_common_fields(time_ns), value=self.sum_us)
