# SPDX-License-Identifier: Apache-2.0
"""Quantiles and intervals agree with numpy's, scipy's and the tables', and the module needs neither."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys

import numpy
import pytest

from benchmarks.routing.simulation_tables import compute_half_interval
from lab.evidence import estimate_median
from ttft_otel.model.statistics import (
    average_draws,
    compute_quantile,
    compute_quantiles,
    compute_t_quantile,
    draw_quantiles,
    draw_weights,
    find_interval,
    find_joint_intervals,
)

SHARES = (0.0, 0.5, 0.95, 0.99, 1.0)


@pytest.mark.parametrize("count", [1, 2, 3, 20, 137])
def test_quantiles_are_numpys(count: int) -> None:
    """The definition is numpy's default one and the standard library's inclusive one, at the edges too."""
    values = [random.Random(count).lognormvariate(3, 1) for _ in range(count)]

    assert compute_quantiles(values, SHARES) == pytest.approx(numpy.quantile(values, SHARES))
    if count > 1:
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        assert compute_quantile(iter(values), 0.95) == pytest.approx(cuts[94])


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    # scipy.stats.t.ppf(0.975, degrees)
    [
        (1, 12.706205),
        (2, 4.302653),
        (3, 3.182446),
        (4.5, 2.658912),
        (9, 2.262157),
        (30, 2.042272),
        (120, 1.979930),
    ],
)
def test_t_quantile(degrees: float, quantile: float) -> None:
    """As in the tables; between two of them for degrees that are not whole."""
    assert compute_t_quantile(degrees) == pytest.approx(quantile, abs=0.0001)
    assert compute_t_quantile(degrees + 1) < compute_t_quantile(degrees + 0.5) < quantile


def test_interval_of_a_mean() -> None:
    """scipy.stats.t.interval(0.95, 5, mean, sem) of these is 0.067905 to 7.132095."""
    values = [0.3, 1.9, 2.2, 2.4, 5.1, 9.7]

    assert compute_half_interval(values) == pytest.approx((7.132095 - 0.067905) / 2, abs=0.0002)


@pytest.mark.parametrize(("count", "rank"), ((1, 0), (7, 0), (8, 0), (11, 0), (12, 1), (21, 4)))
def test_the_interval_of_a_median_is_the_sign_tests(count: int, rank: int) -> None:
    """Ranks from a table of the binomial distribution with p = 1/2 at 99 %."""
    found = estimate_median([float(n) for n in range(count)], 0.99)

    assert (found.low, found.high) == (rank, count - 1 - rank)
    assert found.median == (count - 1) / 2


def test_the_interval_holds_the_true_median() -> None:
    """Of 500 intervals of 15 skewed values, at most 1 in 50 miss it."""
    rng = random.Random(7)
    missed = 0
    for _ in range(500):
        found = estimate_median([rng.expovariate(1) for _ in range(15)], 0.99)
        missed += not found.low <= 0.6931 <= found.high
    assert missed <= 10


def test_a_bootstraps_first_draw_is_the_data() -> None:
    """Its means and quantiles are those of the values; the others are of as many values."""
    chance = numpy.random.default_rng(0)
    values = chance.exponential(size=(31, 2))
    weights = draw_weights(chance, len(values), 500)

    assert (weights.sum(1) == len(values)).all() and weights.shape == (501, 31)
    means = average_draws(values, weights)
    assert means[0] == pytest.approx(values.mean(0))
    assert draw_quantiles(values[:, 0], weights, 0.5)[0] == statistics.median(values[:, 0])
    # A bootstrap's standard error is that of the mean, without Bessel's correction.
    assert means[1:].std(0) == pytest.approx(values.std(0) / len(values) ** 0.5, rel=0.15)


def test_intervals_of_draws() -> None:
    """Of each column alone numpy's quantiles; joint ones hold for all columns in as many draws."""
    chance = numpy.random.default_rng(1)
    drawn = numpy.vstack([numpy.zeros(8), chance.normal(size=(1000, 8))])
    low, high = find_interval(drawn[1:], 0.9)
    assert low == pytest.approx(numpy.percentile(drawn[1:], 5, axis=0))
    assert high == pytest.approx(numpy.percentile(drawn[1:], 95, axis=0))

    low, high = find_joint_intervals(drawn, 0.9)
    inside = ((drawn[1:] >= low) & (drawn[1:] <= high)).all(1)
    assert inside.mean() == pytest.approx(0.9, abs=0.002)


def test_a_column_that_never_differs_has_no_width() -> None:
    """Its deviations are rounding, and do not widen the others' intervals."""
    drawn = numpy.column_stack([numpy.full(101, 5.0), numpy.arange(101.0)])
    low, high = find_joint_intervals(drawn, 0.97)

    assert low[0] == high[0] == 5.0 and low[1] < high[1]


def test_imports_without_numpy() -> None:
    """Where there is none, everything but the bootstrap works."""
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from ttft_otel.model.statistics import compute_quantile, compute_t_quantile\n"
        "assert compute_quantile([1, 3], 0.5) == 2 and compute_t_quantile(9.0) < 2.3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_quantiles_of_nothing() -> None:
    """Without values they are 0, and whole numbers give floats."""
    assert compute_quantiles([], SHARES) == (0.0,) * len(SHARES)
    assert isinstance(compute_quantile([7], 0.99), float)
