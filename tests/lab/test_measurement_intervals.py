# SPDX-License-Identifier: Apache-2.0
"""Verdicts on repeated measurements: noise alone passes, a wrong number fails."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from lab import evidence
from lab.evidence import Errors, ErrorTolerance, MedianInterval, measure_until_decided

DELAY = 80.0
LIMIT = 2.0  # ms
CASES = 100


def get_tolerance(_: str) -> ErrorTolerance:
    """What live tests allow: 2 ms, and intervals of three quarters of the delay."""
    return ErrorTolerance(-LIMIT, LIMIT, 0.75 * DELAY)


def draw_noise(rng: random.Random, scale: float) -> float:
    """What a busy machine adds to a difference of two requests: heavy tails to both sides."""
    return rng.gauss(0, scale) * (10 if rng.random() < 0.1 else 1)


def make_rounds(seed: int, scale: float, **bias: float) -> Callable[[], Errors]:
    """Rounds of four stages; bias: by how much a stage is wrong, ms."""
    rng = random.Random(seed)
    stages = ("receive", "encoder_compute", "dispatch", "sample")
    return lambda: {name: bias.get(name, 0.0) + draw_noise(rng, scale) for name in stages}


def count_failures(scale: float, **bias: float) -> int:
    """Of so many measurements of the same truth, how many failed."""
    failed = 0
    for seed in range(CASES):
        try:
            measure_until_decided(make_rounds(seed, scale, **bias), get_tolerance)
        except AssertionError:
            failed += 1
    return failed


@pytest.mark.parametrize("scale", (0.1, 1.0, 5.0, 10.0, 20.0))
def test_noise_alone_is_accepted(scale: float) -> None:
    """Stages that wander by 20 ms, and ten times that now and then: fewer than 1 in 100 fail."""
    assert count_failures(scale) <= CASES // 100


@pytest.mark.parametrize("scale", (0.1, 1.0, 5.0, 10.0))
@pytest.mark.parametrize("share", (1.0, 0.5))
def test_a_delay_booked_to_its_neighbour_fails(scale: float, share: float) -> None:
    """All or half of 80 ms in the stage after it: refused, whatever the noise."""
    wrong = share * DELAY
    assert count_failures(scale, encoder_compute=-wrong, dispatch=wrong) >= CASES * 0.99


@pytest.mark.parametrize("wrong", (2 * LIMIT, -2 * LIMIT))
def test_a_stage_that_is_wrong_by_twice_the_tolerance_fails(wrong: float) -> None:
    """Where stages wander by less than the tolerance, twice the tolerance is refused."""
    assert count_failures(0.5, sample=wrong) >= CASES * 0.99


def test_what_is_too_noisy_to_tell_fails_and_says_so() -> None:
    """An interval as wide as the delay fails, with the noise as reason."""
    with pytest.raises(AssertionError, match="too wide to tell"):
        measure_until_decided(make_rounds(1, 150.0), get_tolerance)


def test_what_is_inside_open_limits_may_be_as_wide_as_it_is() -> None:
    """With a lower limit only, an interval far above it passes however wide it is."""
    tolerance = ErrorTolerance(-6.0, math.inf, 10.0)

    assert tolerance.explain_failure(MedianInterval(90.0, 70.0, 110.0)) == ""
    assert tolerance.explain_failure(MedianInterval(90.0, -7.0, 110.0))


def test_a_failure_names_the_stage_its_interval_and_the_limits() -> None:
    """The failure's text has the stage, its interval and the limits."""
    with pytest.raises(AssertionError, match=r"dispatch: \+5\.\d+ \[.* ms is outside -2\.00 to"):
        measure_until_decided(make_rounds(1, 0.1, dispatch=5.0), get_tolerance)


def test_quiet_measurements_take_the_fewest_rounds() -> None:
    """Without noise the smallest number of rounds decides."""
    assert len(measure_until_decided(make_rounds(1, 0.1), get_tolerance)) == evidence.MIN_ROUNDS


def test_a_stage_that_a_round_lacks_had_no_error_there() -> None:
    """A stage that appears in one round of many is an exception, not a shift."""
    rounds: Iterator[Errors] = iter([{"a": 0.0}, {"a": 0.1, "b": 50.0}, *[{"a": 0.1}] * 20])

    found = measure_until_decided(lambda: next(rounds), get_tolerance)

    assert evidence.find_failures(found, get_tolerance) == {}
