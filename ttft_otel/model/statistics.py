# SPDX-License-Identifier: Apache-2.0
"""Quantiles of measured values, and the intervals of their means and differences.

Reports, explanations, the load generator, the lab and the benchmarks pass plain numbers, or numpy arrays to
the bootstrap. The module itself imports without numpy, which only the bootstrap needs.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    import numpy

    Array: TypeAlias = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

T_STEPS: Final = 4000  # of the integral of Student's density
NO_SPREAD: Final = 1e-9  # a standard deviation up to this is rounding
MIN_SIDE: Final = 10  # values before and after a split
# Difference of the sides in standard errors; the best of many splits reaches 3 by chance.
MIN_T: Final = 5.0
MAX_BEFORE: Final = 0.25  # excess before the split, as a share of that after it


def compute_quantiles(values: Iterable[float], shares: Iterable[float]) -> tuple[float, ...]:
    """The quantiles `shares` (0 to 1) of `values`, interpolated linearly; zeros without values."""
    ordered = sorted(values)
    if not ordered:
        return tuple(0.0 for _ in shares)
    last = len(ordered) - 1

    def interpolate(place: float) -> float:
        low = int(place)
        # At the last rank there is no next one.
        return ordered[low] + (ordered[min(low + 1, last)] - ordered[low]) * (place - low)

    return tuple(float(interpolate(last * share)) for share in shares)


def compute_quantile(values: Iterable[float], share: float) -> float:
    """The quantile `share` (0 to 1) of `values`, interpolated linearly; 0.0 without values."""
    return compute_quantiles(values, (share,))[0]


def compute_weighted_quantiles(
    values: Sequence[float], weights: Sequence[float], shares: Iterable[float]
) -> tuple[float, ...]:
    """As compute_quantiles(), of values of which each stands for as many as its weight says."""
    order = sorted(range(len(values)), key=values.__getitem__)
    if not order:
        return tuple(0.0 for _ in shares)
    # Each value lies in the middle of its weight; equal weights give the ranks of compute_quantiles().
    middles = list(itertools.accumulate(
        ((weights[low] + weights[high]) / 2 for low, high in itertools.pairwise(order)), initial=0.0
    ))  # fmt: skip

    def interpolate(place: float) -> float:
        high = min(max(bisect_left(middles, place), 1), len(middles) - 1) if len(order) > 1 else 0
        low = max(high - 1, 0)
        part = (place - middles[low]) / max(middles[high] - middles[low], NO_SPREAD)
        return values[order[low]] + (values[order[high]] - values[order[low]]) * min(part, 1.0)

    return tuple(float(interpolate(middles[-1] * share)) for share in shares)


# Figures of the same rounds, and rounds of a search, have the same degrees.
@functools.lru_cache(maxsize=512)
def compute_t_quantile(degrees: float) -> float:
    """The 97.5 % quantile of Student's t distribution with so many `degrees` of freedom, from 1 on.

    Substituting x = sqrt(degrees) tan(angle) makes its density cos(angle) ** (degrees - 1), which is
    bounded and has a finite range: the trapezoidal rule is off by less than 0.0001.
    """
    width = math.pi / 2 / T_STEPS
    density = [math.cos(step * width) ** (degrees - 1) for step in range(T_STEPS + 1)]
    pairs = (left + right for left, right in itertools.pairwise(density))
    areas = list(itertools.accumulate(pairs, initial=0.0))
    wanted = 0.95 * areas[-1]
    step = bisect_left(areas, wanted)
    beyond = (areas[step] - wanted) / (areas[step] - areas[step - 1])
    return math.sqrt(degrees) * math.tan((step - beyond) * width)


def draw_weights(chance: numpy.random.Generator, count: int, draws: int) -> Array:
    """A bootstrap of `count` values: how often each of them (columns) is in each draw (rows).

    The first row is the data, each value once; so many `draws` follow.
    """
    import numpy

    drawn = chance.multinomial(count, numpy.full(count, 1 / count), size=draws)
    return numpy.vstack([numpy.ones(count), drawn]).astype(numpy.float64)


def average_draws(values: Array, weights: Array) -> Array:
    """Means (draw, column) of `values` (value, column) with the weights of draw_weights()."""
    means: Array = weights @ values / weights.sum(1)[:, None]
    return means


def draw_quantiles(values: Array, weights: Array, share: float) -> Array:
    """The quantile `share` of `values` in each draw: the smallest value that so many do not exceed."""
    import numpy

    # Sorted once; each draw then only adds up its weights in that order.
    order = numpy.argsort(values)
    reached = numpy.cumsum(weights[:, order], axis=1) >= share * weights.sum(1)[:, None]
    drawn: Array = values[order][numpy.argmax(reached, axis=1)]
    return drawn


def find_interval(drawn: Array | Sequence[float], level: float) -> tuple[Any, Any]:
    """The ends between which the share `level` of the draws lies in the middle, for each column."""
    import numpy

    low, high = numpy.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def find_joint_intervals(drawn: Array, level: float) -> tuple[Array, Array]:
    """Both ends of intervals that hold for all columns of `drawn` (draw, column) at once.

    The first draw is the data. The width is that of the largest studentized deviation (Romano and Wolf).
    """
    import numpy

    deviations = drawn[1:] - drawn[0]
    spread = deviations.std(0)
    # A column that is the same in every draw has no spread, and an interval of no width.
    studentized = numpy.divide(
        numpy.abs(deviations), spread, out=numpy.zeros_like(deviations), where=spread > NO_SPREAD
    )
    width = numpy.quantile(studentized.max(1), level) * spread
    return drawn[0] - width, drawn[0] + width


def find_start(excess: Sequence[tuple[int, float, float]]) -> int:
    """Unix nanoseconds of the first request after the split; 0 where the change was there from the start.

    excess: (start of the request in Unix ns, microseconds above what was expected, weight), in any order.
    The split is where the sum of squares between both sides is greatest (binary segmentation).
    """
    import numpy

    ordered = sorted(excess)
    count = len(ordered)
    if count < 2 * MIN_SIDE:
        return 0
    _, values, weights = numpy.array(ordered, dtype=numpy.float64).T
    splits = numpy.arange(MIN_SIDE, count - MIN_SIDE + 1)
    sums, totals = numpy.cumsum(weights * values), numpy.cumsum(weights)
    before, after = totals[splits - 1], totals[-1] - totals[splits - 1]
    mean_before = sums[splits - 1] / before
    mean_after = (sums[-1] - sums[splits - 1]) / after
    between = before * after / totals[-1] * (mean_after - mean_before) ** 2
    split = int(splits[numpy.argmax(between)])
    means, errors = [], []
    for side in (slice(0, split), slice(split, count)):
        mean = float(numpy.average(values[side], weights=weights[side]))
        parts = (weights[side] / weights[side].sum()) ** 2 * (values[side] - mean) ** 2
        means.append(mean)
        errors.append(float(parts.sum()))
    step, error = means[1] - means[0], sum(errors) ** 0.5
    if abs(means[0]) > MAX_BEFORE * abs(means[1]) or abs(step) <= MIN_T * error:
        return 0
    return ordered[split][0]
