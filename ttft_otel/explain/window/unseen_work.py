# SPDX-License-Identifier: Apache-2.0
"""Tell whether the requests of a window are all that its engines served. Pure; needs numpy.

Input: EngineVisits with weights. The steps of a traced prompt record the tokens of everybody in them; the
requests that are stored account for some. What is missing was not sampled, or was not kept. window_reading.py
says so to explain and diff; what-if refuses, because it replays the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy

from ttft_otel.explain.whatif.replay_facts import EngineVisit
from ttft_otel.explain.whatif.step_work import Array, Neighbours

MAX_UNSEEN: Final = 1.5  # of the tokens of others in a step, as recorded to as accounted for
FEW_TOKENS: Final = 4.0
MIN_STEPS: Final = 20  # prompts whose steps are looked at; fewer say nothing
MAX_LOOKED_AT: Final = 400  # prompts whose steps are looked at, evenly over the window


def find_unseen(
    visits: Sequence[EngineVisit], weights: Sequence[float] | None = None
) -> tuple[float, float] | None:
    """Where requests are missing: the tokens of others in a step, as recorded, and those of stored requests.

    On average; None also where too few prompts tell, or ends of answers are not known.
    """
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
    is_partial = recorded > MAX_UNSEEN * expected + FEW_TOKENS * chunks
    return (recorded / chunks, expected / chunks) if is_partial else None


def _sum_instance(some: Sequence[tuple[EngineVisit, float]], every: int) -> Array:
    """Chunks of every so-manieth prompt, the tokens of others with them, and those accounted for."""
    near = Neighbours([visit for visit, _ in some])
    weights, sums = numpy.array([weight for _, weight in some]), numpy.zeros(3)
    for at in range(0, len(some), every):
        visit, weight = some[at]
        if visit.step_tokens < visit.own_tokens or not visit.own_tokens:
            continue
        decoding = weights[near.find_decoding(near.middle[at])].sum()
        parts = near.share_prompts(near.begun[at], near.computed_at[at]) * near.computed * weights
        recorded = visit.step_tokens - visit.own_tokens
        expected = visit.chunks * decoding + parts.sum() - parts[at]
        sums += weight * numpy.array([visit.chunks, recorded, expected])
    return sums
