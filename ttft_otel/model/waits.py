# SPDX-License-Identifier: Apache-2.0
"""Divide the time of queues and stalls: by the reasons why the scheduler left a request out, and by the kinds
of work that held the engine meanwhile. Pure.

The engine core tells when which reason began (EngineDetails.reasons), and what ran when, in segments
(hooks/engine_core/held_steps.py, EngineTimeline.held); breakdown.py passes its pieces, and request_trace.py
makes spans and attributes of the results.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ttft_otel.model.stages import HOLDING_KIND_NAMES, QUEUE_STAGES, STALL_STAGE, WAIT_REASON_NAMES

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


SEGMENT_SIZE: Final = len(HOLDING_KIND_NAMES)  # its length, then all kinds but idle, the rest
_NOTHING: Final = (0,) * (SEGMENT_SIZE - 1)
_IDLE: Final = HOLDING_KIND_NAMES.index("idle")
_BEFORE_IDLE: Final = _NOTHING[:_IDLE]
_BEHIND_IDLE: Final = _NOTHING[_IDLE:]
MAX_SEGMENTS: Final = 16  # of a wait; a longer one has longer segments


class HeldPiece(msgspec.Struct, frozen=True, gc=False):
    """What held a waiting stage's piece; times in microseconds, kinds in the order of HOLDING_KINDS.

    sum(lengths) == end - start.
    """

    stage: str
    start: int
    end: int
    lengths: tuple[int, ...]


def split_length(length: int, weights: Sequence[int], total: int) -> list[int]:
    """`length` divided by weights; what rounding leaves over goes to the largest one.

    total: the sum of the weights, or more: then the rest is nobody's, and the shares are smaller.
    Integers that add up to `length` where the weights add up to `total`.
    """
    shares = [length * weight // total for weight in weights]
    rest = length * sum(weights) // total - sum(shares)
    if rest:
        shares[weights.index(max(weights))] += rest
    return shares


def split_step(
    length: int, prefill: int, decode: int, encoder: int, total: int
) -> tuple[int, int, int]:
    """split_length() of a step's three weights, whose sum is `total`, in a third of its time."""
    prefill_us = length * prefill // total
    encoder_us = length * encoder // total
    decode_us = length * decode // total
    rest = length - prefill_us - encoder_us - decode_us
    if prefill >= decode and prefill >= encoder:
        prefill_us += rest
    elif decode >= encoder:
        decode_us += rest
    else:
        encoder_us += rest
    return prefill_us, decode_us, encoder_us


def divide_held(pieces: Iterable[tuple[str, int, int]], segments: Sequence[int]) -> list[HeldPiece]:
    """What held each waiting piece; [] where nothing is known.

    pieces: (stage, start, end). segments: the time of the first one's begin, then of each its length and
    the microseconds of each kind in it; what is in none was idle.
    """
    if not segments:
        return []
    return [
        HeldPiece(stage, start, end, _divide_piece(start, end, segments))
        for stage, start, end in pieces
        if stage in WAIT_STAGES
    ]


def _divide_piece(start: int, end: int, segments: Sequence[int]) -> tuple[int, ...]:
    if len(segments) < SEGMENT_SIZE:  # nothing ran
        return (*_BEFORE_IDLE, end - start, *_BEHIND_IDLE)
    sums = list(_NOTHING)
    position = segments[0]
    for index in range(1, len(segments) - SEGMENT_SIZE + 1, SEGMENT_SIZE):
        length = segments[index]
        low, high = max(start, position), min(end, position + length)
        if high > low:
            kinds = segments[index + 1 : index + SEGMENT_SIZE]
            # Evenly within a segment: at its ends, which are those of steps, this is exact.
            shares = kinds if high - low == length else split_length(high - low, kinds, length)
            sums = [*map(operator.add, sums, shares)]
        position += length
    return (*sums[:_IDLE], end - start - sum(sums), *sums[_IDLE:])


def halve_segments(segments: list[int]) -> None:
    """Make one segment of each two neighbours; the sums stay."""
    merged = segments[:1]
    for index in range(1, len(segments), 2 * SEGMENT_SIZE):
        first = segments[index : index + SEGMENT_SIZE]
        second = segments[index + SEGMENT_SIZE : index + 2 * SEGMENT_SIZE] or [0] * SEGMENT_SIZE
        merged += [one + other for one, other in zip(first, second, strict=True)]
    segments[:] = merged
