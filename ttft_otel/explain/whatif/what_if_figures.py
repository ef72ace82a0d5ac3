# SPDX-License-Identifier: Apache-2.0
"""Quantiles of replayed requests with their intervals, for what_if.py and what_if_text.py. Pure.

The time per output token, the price of many changes, is the mean of a request whose server measured it:
single tokens that came late are not told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy

from ttft_otel.model import stages
from ttft_otel.model.statistics import find_interval

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

QUANTILES: Final = (0.5, 0.95, 0.99)
LEVEL: Final = 0.9  # of the intervals
TTFT: Final = "ttft"
TOKEN_TIME: Final = "time_per_output_token"
MIN_TIMED: Final = 30  # requests, below which nothing is said
MAX_TOKEN_ERROR: Final = 0.3  # of p50 and p99 of the window itself


@dataclass(frozen=True, slots=True)
class PredictedFigure:
    """A quantile of the TTFT, a stage or TOKEN_TIME, microseconds: as recorded, replayed, and predicted."""

    recorded: float
    replayed: float
    predicted: float
    low: float  #: the interval of the prediction, widened by the error of the replay
    high: float

    @property
    def change(self) -> float:
        """By how much the change changes it, relative: in the model, whose own error is in both."""
        return self.predicted / self.replayed - 1 if self.replayed else 0.0


def collect_columns(
    rows: Sequence[Mapping[str, int]], token_us: Sequence[float]
) -> dict[str, Array]:
    """Lengths by stage, one per request, their sums as that of TTFT, and times per output token.

    rows: stages of each request.
    """
    found = sorted({name for row in rows for name in row}, key=stages.rank_stage)
    columns = {name: numpy.array([row.get(name, 0) for row in rows], float) for name in found}
    if token_us:
        columns[TOKEN_TIME] = numpy.array(token_us, float)
    return {TTFT: numpy.array([sum(row.values()) for row in rows], float), **columns}


def build_figures(
    recorded: Mapping[str, Array],
    replays: Sequence[Mapping[str, Array]],
    changed: Sequence[Mapping[str, Array]],
) -> dict[str, tuple[PredictedFigure, ...]]:
    """Quantiles of all stages that were recorded or are predicted.

    Each has the spread of the replays with the change, and the error of those without it.
    """
    nothing = numpy.zeros(1)

    def build_figure(name: str, share: float) -> PredictedFigure:
        truth, *drawn = (
            float(numpy.quantile(each.get(name, nothing), share))
            for each in (recorded, *replays, *changed)
        )
        plain, other = drawn[: len(replays)], drawn[len(replays) :]
        replayed, predicted = float(numpy.median(plain)), float(numpy.median(other))
        low, high = find_interval(other, LEVEL)
        # What the model misses unchanged it misses changed in proportion: a part of the engine's stages.
        miss = abs(replayed - truth) * (predicted / replayed if replayed else 1.0)
        return PredictedFigure(
            truth, replayed, predicted, max(float(low) - miss, 0.0), float(high) + miss
        )

    names = dict.fromkeys([*recorded, *(name for each in changed for name in each)])
    return {name: tuple(build_figure(name, share) for share in QUANTILES) for name in names}


def describe_miss(errors: Sequence[float]) -> str:
    """A sentence where the replay has the time per output token wrong, else "". errors: of p50, p95, p99."""
    worst = max(errors[0], errors[-1], key=abs)
    if abs(worst) <= MAX_TOKEN_ERROR:
        return ""
    return (
        f"The model misses the recorded time per output token by {worst:+.0%}: it is not predicted."
    )
