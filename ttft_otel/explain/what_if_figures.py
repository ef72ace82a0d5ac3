# SPDX-License-Identifier: Apache-2.0
"""Quantiles of replayed requests with their intervals; what_if.py asks, what_if_text.py tells them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy

from ttft_otel import palette

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

QUANTILES: Final = (0.5, 0.95, 0.99)
LEVEL: Final = 0.9  # of the intervals
TTFT: Final = "ttft"


@dataclass(frozen=True, slots=True)
class PredictedFigure:
    """A quantile of the TTFT or of a stage, microseconds: as recorded, replayed, and predicted.

    low, high: the interval of the prediction, widened by the error of the replay.
    """

    recorded: float
    replayed: float
    predicted: float
    low: float
    high: float


def collect_stages(rows: Sequence[Mapping[str, int]]) -> dict[str, Array]:
    """Lengths by stage, one per request, and their sums as that of TTFT. rows: stages of each request."""
    found = sorted({name for row in rows for name in row}, key=palette.get_sort_key)
    columns = {name: numpy.array([row.get(name, 0) for row in rows], float) for name in found}
    return {TTFT: numpy.array([sum(row.values()) for row in rows], float), **columns}


def build_figures(
    recorded: Mapping[str, Array],
    replays: Sequence[Mapping[str, Array]],
    changed: Sequence[Mapping[str, Array]],
) -> dict[str, tuple[PredictedFigure, ...]]:
    """Quantiles of all stages that were recorded or are predicted."""
    stages = dict.fromkeys([*recorded, *(name for each in changed for name in each)])
    return {
        name: tuple(build_figure(name, share, recorded, replays, changed) for share in QUANTILES)
        for name in stages
    }


def build_figure(
    name: str,
    share: float,
    recorded: Mapping[str, Array],
    replays: Sequence[Mapping[str, Array]],
    changed: Sequence[Mapping[str, Array]],
) -> PredictedFigure:
    """One quantile of one stage, with the spread of the replays and the error of the unchanged one."""
    nothing = numpy.zeros(1)
    truth = float(numpy.quantile(recorded.get(name, nothing), share))
    plain = [float(numpy.quantile(each.get(name, nothing), share)) for each in replays]
    other = [float(numpy.quantile(each.get(name, nothing), share)) for each in changed]
    replayed, predicted = float(numpy.median(plain)), float(numpy.median(other))
    low, high = numpy.quantile(other, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    # What the model misses unchanged it may miss changed, in proportion where the figure grows.
    miss = abs(replayed - truth) * max(1.0, predicted / replayed if replayed else 1.0)
    return PredictedFigure(
        truth, replayed, predicted, max(float(low) - miss, 0.0), float(high) + miss
    )
