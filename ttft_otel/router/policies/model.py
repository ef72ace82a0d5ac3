# SPDX-License-Identifier: Apache-2.0
"""How long a prefill takes: a + b * fresh + d * pairs, learnt from measured ones; ttft.py predicts with it.

With a = b = 0 it is the trapezoid formula. All instances of a model share one line, learnt from all
their prefills; an instance's own is that line times how much slower than the others it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Final, NamedTuple

from ttft_otel.router.policies.work import Work

ENOUGH: Final = 8  # samples before a fit is believed
FORGET: Final = 0.998  # a sample counts half after 350 others
FLOOR: Final = (
    0.01  # seconds: an error of 1 ms in 2 ms shall not outweigh one of 100 ms in a second
)
UNITS: Final = (1.0, 1e3, 1e6)  # fresh and pairs in these, so that the sums are of like size
SOON: Final = 64  # samples until which the line is solved for after each; then after each 16th
EVERY: Final = 16
MOST: Final = 4096  # paces, and outcomes, kept; the oldest goes
PACE: Final = 0.95  # of an instance's pace a sample counts half after 14 others
DOUBT: Final = 4.0  # a pace is its own from two standard errors on
WILD: Final = 3.0  # a sample is at most e^3 times as slow as expected, as far as paces go
_SUBSETS: Final = [some for size in (3, 2, 1) for some in combinations(range(3), size)]


class Line(NamedTuple):
    """Seconds: once, per token computed, per pair."""

    a: float
    b: float
    d: float

    def seconds(self, work: Work, prompts: int = 1) -> float:
        """Of the work of so many prompts together."""
        return self.a * prompts + self.b * work.fresh + self.d * work.pairs


class Quality:
    """Predictions against outcomes, the later ones counting more."""

    def __init__(self, forget: float = 0.99) -> None:
        self.outcomes = 0
        self._forget = forget
        self._count = self._relative = self._error = self._sum = self._square = 0.0

    def add(self, predicted: float, actual: float) -> None:
        """One outcome, in seconds, and what had been said before it."""
        error = predicted - actual
        keep = self._forget
        self.outcomes += 1
        self._count = self._count * keep + 1
        self._relative = self._relative * keep + abs(error) / max(actual, 1e-6)
        self._error = self._error * keep + error * error
        self._sum = self._sum * keep + actual
        self._square = self._square * keep + actual * actual

    def tell(self) -> dict[str, float | None]:
        """Both measures, and of how many outcomes, for operators."""
        return {"outcomes": self.outcomes, "mape": self.mape, "r2": self.r2}

    @property
    def mape(self) -> float | None:
        """Mean absolute error relative to the outcome."""
        return self._relative / self._count if self._count else None

    @property
    def r2(self) -> float | None:
        """The share of the outcomes' variance that was predicted; None without variance."""
        if not self._count:
            return None
        spread = self._square - self._sum * self._sum / self._count
        return 1 - self._error / spread if spread > 1e-9 * self._square else None


class Fit:
    """Recursive least squares with forgetting, of relative errors, no coefficient below zero.

    The sums are those of the normal equations; with three unknowns the best non-negative solution
    is the best among the seven subsets' own solutions that are non-negative.
    """

    def __init__(self, forget: float = FORGET) -> None:
        self.samples = 0
        self.line: Line | None = None
        self.quality = Quality()
        self._forget = forget
        self._left = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3

    def add(self, work: Work, seconds: float) -> None:
        """One measured prefill."""
        expected = seconds
        if self.line is not None:
            expected = self.line.seconds(work)
            self.quality.add(expected, seconds)
        # Weighed by `seconds` those that chance made short would count more.
        weight = 1 / (expected + FLOOR) ** 2
        row = (1.0, work.fresh / UNITS[1], work.pairs / UNITS[2])
        for i in range(3):
            self._right[i] = self._right[i] * self._forget + weight * row[i] * seconds
            for j in range(3):
                self._left[i][j] = self._left[i][j] * self._forget + weight * row[i] * row[j]
        self.samples += 1
        if self.samples >= ENOUGH and (self.samples < SOON or not self.samples % EVERY):
            self.line = self._solve()

    def tell(self) -> dict[str, float | None]:
        """The line, in seconds, and how good it is, for operators."""
        a, b, d = self.line or (None, None, None)
        return {"samples": self.samples, "a": a, "b": b, "d": d, **self.quality.tell()}

    def _solve(self) -> Line | None:
        best, least = self.line, 0.0
        for some in _SUBSETS:
            found = _solution([[self._left[i][j] for j in some] for i in some], self._of(some))
            if found is None or min(found) < 0:
                continue
            value = -sum(x * y for x, y in zip(found, self._of(some), strict=True))
            if value < least:
                whole = [0.0, 0.0, 0.0]
                for at, x in zip(some, found, strict=True):
                    whole[at] = x / UNITS[at]
                best, least = Line(*whole), value
        return best

    def _of(self, some: tuple[int, ...]) -> list[float]:
        return [self._right[i] for i in some]


class Pace:
    """How much slower or faster than the others one instance is with one model; `factor` 1: not."""

    def __init__(self, pool: Fit) -> None:
        self.samples = 0
        self.factor = 1.0
        self.mean = 0.0  # of the logarithms of seconds by the line's seconds
        self.count = 0.0  # samples that this is of, the later ones counting more
        self.quality = Quality()
        self._pool = pool

    @property
    def line(self) -> Line | None:
        """The instance's own, as far as it is known."""
        if self._pool.line is None:
            return None
        return Line(*(self.factor * x for x in self._pool.line))

    def tell(self) -> dict[str, float | None]:
        """The line, in seconds, and how good it is, for operators."""
        a, b, d = self.line or (None, None, None)
        return {"samples": self.samples, "a": a, "b": b, "d": d, **self.quality.tell()}


class Shared:
    """One model on all its instances: the line, and the paces that differ from it by more than chance."""

    def __init__(self, forget: float) -> None:
        self.pool = Fit(forget)
        self.paces: dict[str, Pace] = {}
        self.factors: dict[str, float] = {}  # theirs that are not 1
        self._sum = 0.0  # of the paces' means
        self._noise = 0.0  # variance of samples around their instance's mean
        self._seen = 0

    def add(self, url: str, work: Work, seconds: float) -> None:
        """One measured prefill; the line learns what it would have taken on the average instance."""
        pace, line = self.paces[url], self.pool.line
        pace.samples += 1
        expected = 0.0 if line is None else line.seconds(work)
        if expected > 0 and seconds > 0:
            pace.quality.add(expected * pace.factor, seconds)
            self._learn(pace, math.log(seconds / expected))
            pace.factor = math.exp(self._apart(pace))
            if pace.factor == 1.0:
                self.factors.pop(url, None)
            else:
                self.factors[url] = pace.factor
        self.pool.add(work, seconds / pace.factor)

    def drop(self, url: str) -> None:
        """The instance is gone."""
        self._sum -= self.paces.pop(url).mean
        self.factors.pop(url, None)

    def _learn(self, pace: Pace, sample: float) -> None:
        error = max(-WILD, min(WILD, sample)) - pace.mean
        if pace.count:
            self._seen = min(self._seen + 1, round(1 / (1 - FORGET)))
            square = error * error * pace.count / (pace.count + 1)
            self._noise += (square - self._noise) / self._seen
        pace.count = pace.count * PACE + 1
        pace.mean += error / pace.count
        self._sum += error / pace.count

    def _apart(self, pace: Pace) -> float:
        """Its distance from the average instance, less what chance may have done (James and Stein)."""
        if self._seen < ENOUGH:
            return 0.0  # nobody knows yet what chance does
        apart = pace.mean - self._sum / len(self.paces)
        chance = DOUBT * self._noise / pace.count
        return apart * (1 - chance / (apart * apart)) if apart * apart > chance else 0.0


class Models:
    """What is known of each model; `start` is used until there are enough samples of it."""

    def __init__(self, start: Line | None = None, forget: float = FORGET) -> None:
        self.start, self.forget = start, forget
        self._models: dict[str, Shared] = {}
        self._paces: dict[tuple[str, str], Pace] = {}  # in the order of coming

    def add(self, model: str, url: str, work: Work, seconds: float) -> None:
        """One measured prefill."""
        if (model, url) not in self._paces:
            self._new(model, url)
        self._models[model].add(url, work, seconds)

    def known(self, model: str) -> tuple[Line, Mapping[str, float]] | None:
        """The line of a model, and the factors of the instances that are not as fast as it says."""
        shared = self._models.get(model)
        line = self.start if shared is None else shared.pool.line or self.start
        if line is None:
            return None
        return line, {} if shared is None else shared.factors

    def drop(self, url: str) -> None:
        """The instance is gone."""
        for model in [model for model, at in self._paces if at == url]:
            self._drop(model, url)

    def fits(self) -> dict[tuple[str, str], Fit | Pace]:
        """What was learnt by model and instance; "" for all instances."""
        pools = {(model, ""): shared.pool for model, shared in self._models.items()}
        return {**pools, **self._paces}

    def _new(self, model: str, url: str) -> None:
        if len(self._paces) >= MOST:
            self._drop(*next(iter(self._paces)))
        shared = self._models.get(model)
        if shared is None:
            shared = self._models[model] = Shared(self.forget)
        self._paces[model, url] = shared.paces[url] = Pace(shared.pool)

    def _drop(self, model: str, url: str) -> None:
        del self._paces[model, url]
        self._models[model].drop(url)
        if not self._models[model].paces:
            del self._models[model]


def _solution(left: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss on a symmetric system of at most three; None where it has no single solution."""
    size = len(right)
    rows = [[*left[i], right[i]] for i in range(size)]
    for i in range(size):
        if rows[i][i] <= 1e-10 * left[i][i]:  # nothing left of it: it is made of the others
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return found
