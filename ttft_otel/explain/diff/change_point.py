# SPDX-License-Identifier: Apache-2.0
"""Find when a change began inside a window: one split of the requests in time. Pure; needs numpy.

Input: what each request took more than expected, with its time. stage_difference.py asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy

MIN_SIDE: Final = 10  # requests before and after the split
MIN_T: Final = (
    5.0  # difference of the sides in standard errors; the best of many splits reaches 3 by chance
)
MAX_BEFORE: Final = 0.25  # excess before the split, as a share of that after it


def find_start(excess: Sequence[tuple[int, float]]) -> int:
    """Unix nanoseconds of the first request after the split; 0 where the change was there from the start.

    excess: (start of the request in Unix ns, microseconds above what was expected), in any order.
    The split is where the sum of squares between both sides is greatest (binary segmentation).
    """
    ordered = sorted(excess)
    count = len(ordered)
    if count < 2 * MIN_SIDE:
        return 0
    values = numpy.array([value for _, value in ordered])
    before = numpy.arange(MIN_SIDE, count - MIN_SIDE + 1)
    sums = numpy.cumsum(values)
    mean_before = sums[before - 1] / before
    mean_after = (sums[-1] - sums[before - 1]) / (count - before)
    between = before * (count - before) / count * (mean_after - mean_before) ** 2
    split = int(before[numpy.argmax(between)])
    left, right = values[:split], values[split:]
    error = float(numpy.sqrt(left.var(ddof=1) / len(left) + right.var(ddof=1) / len(right)))
    step = float(right.mean() - left.mean())
    if abs(left.mean()) > MAX_BEFORE * abs(right.mean()) or abs(step) <= MIN_T * error:
        return 0
    return ordered[split][0]
