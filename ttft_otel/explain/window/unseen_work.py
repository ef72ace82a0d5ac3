# SPDX-License-Identifier: Apache-2.0
"""Tell whether the requests of a window are all that its engines served. Pure; needs numpy.

Input: EngineVisits with weights. The steps of a traced prompt record the tokens of everybody in them; the
requests that are stored account for some. What is missing was not sampled, or was not kept. window_reading.py
says so to explain and diff; what-if refuses, because it replays the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy

from ttft_otel.explain.whatif.replay_facts import EngineVisit

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

MAX_UNSEEN: Final = 1.5  # of the tokens of others in a step, as recorded to as accounted for
FEW_TOKENS: Final = 4.0
MIN_STEPS: Final = 20  # prompts whose steps are looked at; fewer say nothing
MAX_LOOKED_AT: Final = 400  # prompts whose steps are looked at, evenly over the window


@dataclass(frozen=True, slots=True)
class OthersTokens:
    """Tokens of others in a step of a traced prompt, on average."""

    recorded: float
    expected: float  #: by the requests that are stored

    @property
    def is_partial(self) -> bool:
        """Whether requests are missing."""
        return self.recorded > MAX_UNSEEN * self.expected + FEW_TOKENS


def compare_others(
    visits: Sequence[EngineVisit], weights: Sequence[float] | None = None
) -> OthersTokens | None:
    """The tokens of others in steps; None where too few prompts tell, or ends of answers are not known."""
    weights = weights or [1.0] * len(visits)
    by_instance: dict[str, list[tuple[EngineVisit, float]]] = {}
    for visit, weight in zip(visits, weights, strict=True):
        if visit.stages.get("prefill.compute") and visit.answer_us >= 0:
            by_instance.setdefault(visit.instance, []).append((visit, weight))
    known = sum(map(len, by_instance.values()))
    if known < MIN_STEPS or 2 * known < len(visits):
        return None
    sums = numpy.sum(
        [
            _sum_instance(some, max(1, len(some) * len(by_instance) // MAX_LOOKED_AT))
            for some in by_instance.values()
        ],
        axis=0,
    )
    chunks, recorded, expected = (float(each) for each in sums)
    return OthersTokens(recorded / chunks, expected / chunks) if chunks else None


def _sum_instance(some: Sequence[tuple[EngineVisit, float]], every: int) -> Array:
    """Chunks of every so-manieth prompt, the tokens of others with them, and those accounted for."""
    columns = numpy.array(
        [
            (
                visit.sampled - visit.stages.get("sample", 0) - visit.stages["prefill.compute"],
                visit.sampled - visit.stages.get("sample", 0),
                visit.sampled + visit.answer_us,
                visit.computed,
                weight,
            )
            for visit, weight in some
        ],
        numpy.float64,
    )
    begun, ended, left, computed, weights = columns.T
    sums = numpy.zeros(3)
    for at in range(0, len(some), every):
        visit, weight = some[at]
        if visit.step_tokens < visit.own_tokens or not visit.own_tokens:
            continue
        # At a random moment of its computing: one decodes if it had its first token and has not left.
        middle = (begun[at] + ended[at]) / 2
        decoding = weights[(ended <= middle) & (middle < left)].sum()
        shared = numpy.minimum(ended[at], ended) - numpy.maximum(begun[at], begun)
        parts = (
            numpy.clip(shared / numpy.maximum(ended - begun, 1.0), 0.0, 1.0) * computed * weights
        )
        others = parts.sum() - parts[at]
        sums += weight * numpy.array(
            [
                visit.chunks,
                visit.step_tokens - visit.own_tokens,
                visit.chunks * decoding + others,
            ]
        )
    return sums
