# SPDX-License-Identifier: Apache-2.0
"""Divide the time of queues and stalls among the kinds of work that held the engine meanwhile. Pure.

The engine core tells what ran when, in segments (hooks/engine_core/held_steps.py, EngineTimeline.held);
breakdown.py passes its pieces, and record_parts.py makes attributes of the result.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ttft_otel.model.stages import HOLDING_KIND_NAMES
from ttft_otel.model.wait_reasons import WAIT_STAGES

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
