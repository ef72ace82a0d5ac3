# SPDX-License-Identifier: Apache-2.0
"""Buckets of an OTLP exponential histogram, filled with many values at once, for measured_series.py.

The SDK's own aggregation takes values one by one, at 10 to 17 us each; a request has a dozen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from ttft_otel.model.metric_labels import MAX_HISTOGRAM_BUCKETS

# Prometheus takes no finer ones. 2**8 buckets for each doubling: a value is off by 0.14 % at most.
MAX_SCALE: Final = 8
US_PER_S: Final = 1_000_000
_LOG2_US_PER_S: Final = math.log2(US_PER_S)
# A bucket's upper bound belongs to it, but the logarithm of 2 s is not exactly 1 s's plus 1. Between two
# whole microseconds there is more, up to 27 hours.
_ROUNDING: Final = 1e-9


class ExponentialBuckets:
    """Counts of values in seconds; bucket i: above 2**(i / 2**scale), up to 2**((i + 1) / 2**scale).

    The scale falls, and pairs of buckets become one, when values span more than MAX_HISTOGRAM_BUCKETS.
    zero_count: values of 0, which no bucket has.
    """

    __slots__ = ("counts", "scale", "zero_count")

    def __init__(self) -> None:
        self.scale = MAX_SCALE
        self.zero_count = 0
        self.counts: dict[int, int] = {}

    def add_values(self, values: Mapping[int, int]) -> None:
        """Add values, whole microseconds, each as often as it says."""
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
            self.counts, self.scale = merged, self.scale - steps

    def list_counts(self) -> tuple[int, list[int]]:
        """The first bucket's index, and the counts from there to the last one; (0, []) without any."""
        if not self.counts:
            return 0, []
        first, last = min(self.counts), max(self.counts)
        return first, [self.counts.get(index, 0) for index in range(first, last + 1)]
