# SPDX-License-Identifier: Apache-2.0
"""How long a prefill takes: a + b * fresh + d * pairs, learnt from measured ones; ttft.py predicts with it.

With a = b = 0 it is the trapezoid formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final, NamedTuple

from ttft_otel.router.policies.work import Work

ENOUGH: Final = 8  # samples before a fit is believed
FORGET: Final = 0.998  # a sample counts half after 350 others
FLOOR: Final = (
    0.01  # seconds: an error of 1 ms in 2 ms shall not outweigh one of 100 ms in a second
)
UNITS: Final = (1.0, 1e3, 1e6)  # fresh and pairs in these, so that the sums are of like size
MOST: Final = 4096  # fits, and outcomes, kept; the oldest goes
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
        self._forget = forget
        self._count = self._relative = self._error = self._sum = self._square = 0.0

    def add(self, predicted: float, actual: float) -> None:
        """One outcome, in seconds, and what had been said before it."""
        error = predicted - actual
        keep = self._forget
        self._count = self._count * keep + 1
        self._relative = self._relative * keep + abs(error) / max(actual, 1e-6)
        self._error = self._error * keep + error * error
        self._sum = self._sum * keep + actual
        self._square = self._square * keep + actual * actual

    def tell(self) -> dict[str, float | None]:
        """Both measures, for operators."""
        return {"mape": self.mape, "r2": self.r2}

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
        if self.line is not None:
            self.quality.add(self.line.seconds(work), seconds)
        weight = 1 / (seconds + FLOOR) ** 2
        row = (1.0, work.fresh / UNITS[1], work.pairs / UNITS[2])
        for i in range(3):
            self._right[i] = self._right[i] * self._forget + weight * row[i] * seconds
            for j in range(3):
                self._left[i][j] = self._left[i][j] * self._forget + weight * row[i] * row[j]
        self.samples += 1
        if self.samples >= ENOUGH:
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


class Models:
    """A fit for each model on each instance, and one over all instances for those without enough samples.

    `start` is used until even that one has enough.
    """

    def __init__(self, start: Line | None = None, forget: float = FORGET) -> None:
        self.start, self.forget = start, forget
        self._fits: dict[tuple[str, str], Fit] = {}
        self._lines: dict[str, dict[str, Line]] = {}  # theirs, by model and instance: for choosing

    def add(self, model: str, url: str, work: Work, seconds: float) -> None:
        """One measured prefill."""
        for where in (url, ""):
            fit = self._fit(model, where)
            fit.add(work, seconds)
            if fit.line is not None:
                self._lines.setdefault(model, {})[where] = fit.line

    def lines(self, model: str, urls: Sequence[str]) -> list[Line] | None:
        """What is known of this model on each of these instances; None: of one of them nothing."""
        known = self._lines.get(model, {})
        pooled = known.get("", self.start)
        if pooled is None:  # then no instance has a fit of its own: each sample is in both
            return None
        return [known.get(url, pooled) for url in urls]

    def fits(self) -> dict[tuple[str, str], Fit]:
        """Every fit by model and instance; "" for all instances."""
        return dict(self._fits)

    def _fit(self, model: str, url: str) -> Fit:
        found = self._fits.get((model, url))
        if found is None:
            if len(self._fits) >= MOST:
                self._drop(next(iter(self._fits)))
            found = self._fits[model, url] = Fit(self.forget)
        return found

    def _drop(self, key: tuple[str, str]) -> None:
        del self._fits[key]
        model, url = key
        known = self._lines.get(model, {})
        known.pop(url, None)
        if not known:
            self._lines.pop(model, None)


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
