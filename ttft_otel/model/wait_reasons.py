# SPDX-License-Identifier: Apache-2.0
"""Divide the time of queues and stalls among the reasons for which the scheduler left a request out. Pure.

The engine core tells when which reason began (EngineDetails.reasons); breakdown.py passes its
pieces, and record_parts.py makes spans and attributes of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ttft_otel.model.stages import QUEUE_STAGES, STALL_STAGE, WAIT_REASON_NAMES

IN_STEP: Final = WAIT_REASON_NAMES.index("in_step")
OTHER: Final = WAIT_REASON_NAMES.index("other")
_IN_STEP_NAME: Final = WAIT_REASON_NAMES[IN_STEP]
WAIT_STAGES: Final = frozenset((*QUEUE_STAGES, STALL_STAGE))
MAX_SLICES: Final = 8  # of one piece in time order; of more, each reason's are put together


class ReasonSlice(msgspec.Struct, frozen=True, gc=False):
    """Part of a waiting stage's piece that has one reason; microseconds, as the piece's times."""

    stage: str
    reason: str
    start: int
    end: int


def divide_waits(
    pieces: Iterable[tuple[str, int, int]], changes: Sequence[tuple[int, int]]
) -> list[ReasonSlice]:
    """Slices of all waiting pieces, in order; those of one piece fill it without gap or overlap.

    pieces: (stage, start, end). changes: (since when, code of the reason), in time order; time before
    the first one was spent in the step that ran when the request came.
    """
    slices: list[ReasonSlice] = []
    for stage, start, end in pieces:
        if stage not in WAIT_STAGES:
            continue
        if not changes:  # most requests, on an engine that is not full
            slices.append(ReasonSlice(stage, _IN_STEP_NAME, start, end))
            continue
        cuts = _cut_piece(start, end, changes)
        # A long wait can change its reason at every step; a span for each would tell no more.
        if len(cuts) > MAX_SLICES:
            cuts = gather_reasons(cuts)
        position = start
        for code, length in cuts:
            slices.append(ReasonSlice(stage, WAIT_REASON_NAMES[code], position, position + length))
            position += length
    return slices


def _cut_piece(start: int, end: int, changes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(code, length) of neighbouring slices with different reasons; their lengths add up."""
    cuts: list[tuple[int, int]] = []
    reason, position = IN_STEP, start
    for since, code in changes:
        # In time order, so that none of the rest can matter.
        if since >= end:
            break
        if since > position:
            _add_cut(cuts, reason, since - position)
            position = since
        # A code of a later version is a reason that this one does not know.
        reason = code if 0 <= code < len(WAIT_REASON_NAMES) else OTHER
    _add_cut(cuts, reason, end - position)
    return cuts


def _add_cut(cuts: list[tuple[int, int]], reason: int, length: int) -> None:
    if cuts and cuts[-1][0] == reason:
        cuts[-1] = (reason, cuts[-1][1] + length)
    else:
        cuts.append((reason, length))


def gather_reasons(cuts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(code, length) with each code once, in the order of their first appearance."""
    lengths: dict[int, int] = {}
    for code, length in cuts:
        lengths[code] = lengths.get(code, 0) + length
    return list(lengths.items())
