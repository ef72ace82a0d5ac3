# SPDX-License-Identifier: Apache-2.0
"""Decide by confidence intervals whether repeated paired measurements agree with expected values.

A round gives one error per stage (measured minus expected, in milliseconds). Rounds are repeated until
the intervals of the median errors lie within their tolerances, or until MAX_ROUNDS; where the intervals
are too wide to tell by then, until MAX_NOISY_ROUNDS. Noise widens the intervals and takes more rounds; it
does not make a wrong value pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple, TypeAlias

# Fewer would let a lucky start decide.
MIN_ROUNDS: Final = 5
# Enough for 0.99 with some values to spare at both ends; a round may take seconds.
MAX_ROUNDS: Final = 21
# On a machine that others use, too: an interval is then little more than half as wide as after MAX_ROUNDS.
MAX_NOISY_ROUNDS: Final = 3 * MAX_ROUNDS
# Many stages are judged in one run: at 0.95 one of twenty would be wrong by chance.
CONFIDENCE: Final = 0.99
Errors: TypeAlias = "Mapping[str, float]"  # stage -> measured minus expected, ms


class MedianInterval(NamedTuple):
    """A sample's median, and a confidence interval of the true median."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def estimate_median(values: Sequence[float], confidence: float) -> MedianInterval:
    """The median of `values` with its distribution-free interval.

    The k-th smallest and the k-th largest value enclose the true median with probability
    1 - 2 P(B < k), B binomial with n trials of 1/2 (sign test; Conover, Practical Nonparametric
    Statistics, 3.2). With fewer than eight values even the extremes have less than 0.99.
    """
    # Ranks instead of a normal distribution: times have long tails on one side.
    ordered = sorted(values)
    count = len(ordered)
    rank, tail = 0, 0.5**count  # tail: P(B <= rank)
    while 1 - 2 * (wider := tail + math.comb(count, rank + 1) / 2**count) >= confidence:
        rank, tail = rank + 1, wider
    return MedianInterval(median(ordered), ordered[rank], ordered[count - 1 - rank])


@dataclass(frozen=True, slots=True)
class ErrorTolerance:
    """Accepted errors in ms, from `low` to `high`, either of which may be infinite.

    resolution: an interval that is wider than this, and not within the limits, counts as a failure.
    """

    low: float
    high: float
    resolution: float

    @property
    def margin(self) -> float:
        """How far an interval may reach beyond the limits when its median lies within them."""
        # Half the resolution: the interval may be as wide as that around a median at the limit.
        return min(self.high - self.low, self.resolution / 2)

    def is_settled(self, found: MedianInterval) -> bool:
        """Whether the error is accepted so clearly that no further round is needed."""
        inside = self.low <= found.median <= self.high
        return (
            inside and found.low >= self.low - self.margin and found.high <= self.high + self.margin
        )

    def is_outside(self, found: MedianInterval) -> bool:
        """Whether the whole interval lies outside: more rounds would not bring it in."""
        return found.low > self.high or found.high < self.low

    def explain_failure(self, found: MedianInterval) -> str:
        """Why the interval `found` is not accepted; "" when it is."""
        limits = f"{self.low:+.2f} to {self.high:+.2f} ms"
        if self.is_outside(found):
            return f"{found} ms is outside {limits}"
        inside = self.low <= found.low and found.high <= self.high
        if found.high - found.low > self.resolution and not inside:
            return f"{found} ms is too wide to tell {limits} (at most {self.resolution:.1f} ms)"
        return ""


def find_failures(
    rounds: Sequence[Errors], get_tolerance: Callable[[str], ErrorTolerance]
) -> dict[str, str]:
    """Stage -> why its errors are not accepted. A stage that a round lacks has no error in it."""
    failures = {
        name: get_tolerance(name).explain_failure(found)
        for name, found in _estimate_all(rounds).items()
    }
    return {name: why for name, why in failures.items() if why}


def is_only_too_wide(
    rounds: Sequence[Errors], get_tolerance: Callable[[str], ErrorTolerance]
) -> bool:
    """Whether the errors of some stages are not accepted, and more rounds might decide each of them."""
    return bool(find_failures(rounds, get_tolerance)) and not any(
        get_tolerance(name).is_outside(found) for name, found in _estimate_all(rounds).items()
    )


def are_all_settled(
    rounds: Sequence[Errors], get_tolerance: Callable[[str], ErrorTolerance]
) -> bool:
    """Whether every stage's errors are accepted, and further rounds would not change that."""
    return all(
        get_tolerance(name).is_settled(found) for name, found in _estimate_all(rounds).items()
    )


def measure_until_decided(
    measure_round: Callable[[], Errors],
    get_tolerance: Callable[[str], ErrorTolerance],
    *,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    max_noisy_rounds: int = MAX_NOISY_ROUNDS,
) -> list[Errors]:
    """Measure rounds until all stages are accepted; returns the rounds.

    measure_round: measures once, with a control measurement right beside it; errors by stage.
    get_tolerance: gives a stage's tolerance.
    Raises AssertionError when some stage is not accepted after `max_rounds`, or after `max_noisy_rounds`
    where all that is known of it is an interval that is too wide.
    """
    rounds: list[Errors] = []
    while len(rounds) < max_rounds:
        # Never fewer than the least: an early stop on a good start would be a choice of results.
        rounds.append(measure_round())
        if len(rounds) >= min_rounds and are_all_settled(rounds, get_tolerance):
            return rounds
    while len(rounds) < max_noisy_rounds and is_only_too_wide(rounds, get_tolerance):
        rounds.append(measure_round())
    if failures := find_failures(rounds, get_tolerance):
        lines = [f"{name}: {why}" for name, why in failures.items()]
        raise AssertionError(f"after {len(rounds)} rounds: {'; '.join(lines)}")
    return rounds


def _estimate_all(rounds: Sequence[Errors]) -> dict[str, MedianInterval]:
    names = sorted({name for errors in rounds for name in errors})
    # A stage that a round lacks counts as exact, 0: it was in neither of the two measurements.
    return {
        name: estimate_median([each.get(name, 0.0) for each in rounds], CONFIDENCE)
        for name in names
    }
