# SPDX-License-Identifier: Apache-2.0
"""The time of waiting stages, divided among kinds of work: it adds up, whatever the engine core told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.model.test_wait_reasons import PIECES, QUEUE
from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.held_waits import (
    SEGMENT_SIZE,
    add_other_rank,
    divide_held,
    halve_segments,
    split_length,
    split_step,
)
from ttft_otel.model.names import keys
from ttft_otel.model.record import HeldBy, Ttft
from ttft_otel.model.stages import STALL_STAGE
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.engine_timeline import EngineDetails, EngineTimeline
from ttft_otel.tracing.record_parts import make_ttft
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.settings import Settings

# From 50 on: 100 us of prompts, 200 us half prompts and half answers, nothing, own and others.
SEGMENTS = [
    *(50, 100, 100, 0, 0, 0, 0),
    *(200, 100, 100, 0, 0, 0),
    *(140, 0, 0, 0, 0, 0),
    *(120, 60, 0, 0, 60, 0),
]
TRACEPARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def test_divided() -> None:
    """A segment counts as far as it lies in the piece; time in none of them is idle."""
    queue, stall = divide_held(PIECES, SEGMENTS)

    assert queue.lengths == (50 + 100, 100, 0, 0, 50, 0)
    assert stall.lengths == (50, 0, 0, 50, 0, 0)
    (stall,) = divide_held(PIECES[-1:], [0, 1000, 0, 0, 0, 0, 1000])
    assert stall.lengths == (0, 0, 0, 0, 0, 100)
    old = [50, 100, 100, 0, 0, 0, 200, 100, 100, 0, 0, 140, 0, 0, 0, 0, 120, 60, 0, 0, 60]
    assert add_other_rank(old) == SEGMENTS and add_other_rank([]) == []


def test_unknown() -> None:
    """An engine core that told nothing: no claim, rather than "idle"."""
    assert divide_held(PIECES, []) == []
    assert divide_held(PIECES[1:2], [100])[0].lengths == (0, 0, 0, 0, 300, 0)


segments = st.lists(
    st.tuples(st.integers(0, 900), st.lists(st.integers(0, 300), min_size=5, max_size=5)),
    max_size=40,
)


def flatten(start: int, made: list[tuple[int, list[int]]]) -> list[int]:
    """Segments with the kinds cut down to their length."""
    flat = [start]
    for length, kinds in made:
        total = max(sum(kinds), 1)
        flat += [length, *[min(kind, kind * length // total) for kind in kinds]]
    return flat


@given(st.integers(0, 500), segments, st.lists(st.integers(1, 3000), min_size=1, max_size=8))
def test_sum(start: int, made: list[tuple[int, list[int]]], lengths: list[int]) -> None:
    """The kinds of each piece add up to it, and none is negative; halved segments have the same sums."""
    flat, position, pieces = flatten(start, made), 0, []
    for number, length in enumerate(lengths):
        pieces.append(((QUEUE, "sample", STALL_STAGE)[number % 3], position, position + length))
        position += length
    found = divide_held(pieces, flat)
    halved = list(flat)
    halve_segments(halved)

    places = [(part.stage, part.start, part.end) for part in found]
    assert places == [piece for piece in pieces if piece[0] != "sample"]
    for part in found:
        assert sum(part.lengths) == part.end - part.start and min(part.lengths) >= 0
    for place in range(SEGMENT_SIZE):
        assert sum(flat[1 + place :: SEGMENT_SIZE]) == sum(halved[1 + place :: SEGMENT_SIZE])


@given(st.integers(0, 10**9), st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
def test_split(length: int, weights: list[int]) -> None:
    """Shares add up to the whole, and each is within the number of weights of its exact one."""
    total = sum(weights)
    shares = split_length(length, weights, max(total, 1))

    assert sum(shares) == (length if total else 0)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share * total - length * weight) <= total * len(weights)


@given(st.integers(0, 10**9), st.tuples(*[st.integers(0, 10**6)] * 3).filter(any))
def test_split_step(length: int, weights: tuple[int, int, int]) -> None:
    """A step's three weights are split as any others are."""
    assert [*split_step(length, *weights, sum(weights))] == split_length(
        length, weights, sum(weights)
    )


def make_record_part(holders: list[tuple[int, int, int, str, str]], lost: bool = False) -> Ttft:
    trace = RequestTrace(0, start_context("", "", Settings(on=True)), False)
    trace.timeline = EngineTimeline(
        held=SEGMENTS, details=EngineDetails(holders=holders, holders_lost=lost)
    )
    held = divide_held(PIECES, SEGMENTS)
    cut = Breakdown(0, 600, PIECES, {QUEUE: 300}, 0, 0, [], held)
    return make_ttft(trace, cut)


def test_recorded() -> None:
    """Kinds are on the stages' spans, those of the queue on `ttft`, too; holders on the queue's."""
    ttft = make_record_part(
        [(90, 7, 0, "a", TRACEPARENT), (60, 2, 1, "b", ""), (9, 1, 99, "c", "")]
    )
    queue, stall = ttft.pieces[1], ttft.pieces[3]
    expected = {"ttft.held.prefill_us": 150, "ttft.held.decode_us": 100, "ttft.held.idle_us": 50}

    assert queue.attributes == expected and expected.items() <= ttft.attributes.items()
    assert stall.attributes == {"ttft.held.prefill_us": 50, "ttft.held.own_us": 50}
    assert queue.held_by == (
        HeldBy(90, 7, "prefill", "a", "a" * 32, "b" * 16),
        HeldBy(60, 2, "decode", "b"),
    )
    assert not stall.held_by and keys.HELD_BY_TRUNCATED not in ttft.attributes


def test_not_sampled() -> None:
    """A holder whose spans are not exported has no link; holders that may be missing are told."""
    ttft = make_record_part([(90, 7, 0, "a", TRACEPARENT[:-1] + "0")], lost=True)

    assert ttft.pieces[1].held_by == (HeldBy(90, 7, "prefill", "a"),)
    assert ttft.attributes[keys.HELD_BY_TRUNCATED] is True
