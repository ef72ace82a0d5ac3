# SPDX-License-Identifier: Apache-2.0
"""The time of waiting stages, divided among reasons and kinds of work: whatever is told, it adds up."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.held_waits import (
    SEGMENT_SIZE,
    divide_held,
    halve_segments,
    split_length,
    split_step,
)
from ttft_otel.model.names import keys
from ttft_otel.model.record import HeldBy, Ttft
from ttft_otel.model.stages import STALL_STAGE, WAIT_REASON_NAMES, WAIT_REASONS
from ttft_otel.model.wait_reasons import MAX_SLICES, ReasonSlice, divide_waits
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.engine_timeline import EngineDetails, EngineTimeline
from ttft_otel.tracing.record_parts import make_ttft
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.settings import Settings

KV, TOKENS = WAIT_REASON_NAMES.index("kv_blocks"), WAIT_REASON_NAMES.index("token_budget")
QUEUE = "prefill.queue"
PIECES = [  # name, start and end in us
    ("ipc", 0, 100),
    (QUEUE, 100, 400),
    ("prefill.compute", 400, 500),
    (STALL_STAGE, 500, 600),
]


def test_reasons_divided() -> None:
    """Before the first reason a step ran; the last one lasts; other stages have none."""
    assert divide_waits(PIECES, [(150, KV), (300, TOKENS)]) == [
        ReasonSlice(QUEUE, "in_step", 100, 150),
        ReasonSlice(QUEUE, "kv_blocks", 150, 300),
        ReasonSlice(QUEUE, "token_budget", 300, 400),
        ReasonSlice(STALL_STAGE, "token_budget", 500, 600),
    ]
    # A reason of a later version is "other", and the sum stays.
    assert divide_waits(PIECES[1:2], [(100, 99)]) == [ReasonSlice(QUEUE, "other", 100, 400)]


def test_many_changes() -> None:
    """Of many short reasons each has one slice, as long as all of its own together."""
    changes = [(100 + 10 * number, (KV, TOKENS)[number % 2]) for number in range(30)]
    slices = divide_waits(PIECES[1:2], changes)

    assert len(changes) > MAX_SLICES
    assert [(part.reason, part.end - part.start) for part in slices] == [
        ("kv_blocks", 150),
        ("token_budget", 150),
    ]


@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    changes=st.lists(st.tuples(st.integers(0, 12_000), st.integers(-2, 20)), max_size=40),
)
def test_reasons_sum(lengths: list[int], changes: list[tuple[int, int]]) -> None:
    """The slices of a piece fill it without gap or overlap."""
    position, pieces = 0, []
    for number, length in enumerate(lengths):
        pieces.append(((QUEUE, "sample", STALL_STAGE)[number % 3], position, position + length))
        position += length
    slices = divide_waits(pieces, sorted(changes))
    for stage, start, end in pieces:
        inside = [part for part in slices if start <= part.start < end and part.stage == stage]
        bounds = [part.start for part in inside] + [end]
        if stage != "sample":
            assert bounds[0] == start
            assert [part.end for part in inside] == bounds[1:]
            assert all(part.reason in WAIT_REASONS for part in inside)


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
    # An engine core that told nothing: no claim, rather than "idle".
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
    # A step's three are split likewise, in less time.
    three = [*weights, 1, 2][:3]
    if any(three):
        assert [*split_step(length, *three, sum(three))] == split_length(length, three, sum(three))


def make_part(
    changes: Sequence[tuple[int, int]] = (),
    segments: list[int] | None = None,
    holders: list[tuple[int, int, int, str, str]] | None = None,
    lost: bool = False,
) -> Ttft:
    """The `ttft` half of a request with these reasons, or with what these segments and holders tell."""
    trace = RequestTrace(0, start_context("", "", Settings(on=True)), False)
    details = EngineDetails(holders=holders or [], holders_lost=lost)
    trace.timeline = EngineTimeline(held=segments or [], details=details)
    reasons = divide_waits(PIECES, changes) if changes else []
    held = divide_held(PIECES, segments or [])
    return make_ttft(trace, Breakdown(0, 600, PIECES, {QUEUE: 300}, 0, 0, reasons, held))


def test_recorded() -> None:
    """Kinds are on the stages' spans, those of the queue on `ttft`, too; holders on the queue's."""
    holders = [(90, 7, 0, "a", TRACEPARENT), (60, 2, 1, "b", ""), (9, 1, 99, "c", "")]
    ttft = make_part(segments=SEGMENTS, holders=holders)
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
    unsampled = [(90, 7, 0, "a", TRACEPARENT[:-1] + "0")]
    ttft = make_part(segments=SEGMENTS, holders=unsampled, lost=True)

    assert ttft.pieces[1].held_by == (HeldBy(90, 7, "prefill", "a"),)
    assert ttft.attributes[keys.HELD_BY_TRUNCATED] is True


def test_several_reasons() -> None:
    """A queue with several has a piece below it for each, and no reason of its own."""
    ttft = make_part([(150, KV)])
    below = [piece for piece in ttft.pieces if piece.kind == "reason"]

    assert [(piece.name, piece.start, piece.end) for piece in below] == [
        ("in_step", 100, 150),
        ("kv_blocks", 150, 400),
    ]
    assert not ttft.pieces[1].attributes
