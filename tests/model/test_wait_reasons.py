# SPDX-License-Identifier: Apache-2.0
"""The time of waiting stages, divided among reasons: it adds up, whatever the engine core told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.names import keys
from ttft_otel.model.record import Ttft
from ttft_otel.model.stages import STALL_STAGE, WAIT_REASON_NAMES, WAIT_REASONS
from ttft_otel.model.wait_reasons import MAX_SLICES, ReasonSlice, divide_waits
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.record_parts import make_ttft
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.settings import Settings

KV, TOKENS = WAIT_REASON_NAMES.index("kv_blocks"), WAIT_REASON_NAMES.index("token_budget")
QUEUE = "prefill.queue"
PIECES = [  # name, start and end in us; test_held_waits.py divides the same ones
    ("ipc", 0, 100),
    (QUEUE, 100, 400),
    ("prefill.compute", 400, 500),
    (STALL_STAGE, 500, 600),
]


def test_divided() -> None:
    """Before the first reason a step ran; the last one lasts; other stages have none."""
    assert divide_waits(PIECES, [(150, KV), (300, TOKENS)]) == [
        ReasonSlice(QUEUE, "in_step", 100, 150),
        ReasonSlice(QUEUE, "kv_blocks", 150, 300),
        ReasonSlice(QUEUE, "token_budget", 300, 400),
        ReasonSlice(STALL_STAGE, "token_budget", 500, 600),
    ]


def test_unknown_code() -> None:
    """A reason of a later version is "other", and the sum stays."""
    assert [part.reason for part in divide_waits(PIECES[1:2], [(100, 99)])] == ["other"]


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
def test_sum(lengths: list[int], changes: list[tuple[int, int]]) -> None:
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


def make_record_part(changes: list[tuple[int, int]]) -> Ttft:
    trace = RequestTrace(0, start_context("", "", Settings(on=True)), False)
    cut = Breakdown(0, 600, PIECES, {QUEUE: 300}, 0, 0, divide_waits(PIECES, changes))
    return make_ttft(trace, cut)


def test_one_reason() -> None:
    """A queue with one reason has it on its own span; nothing is added."""
    ttft = make_record_part([(100, KV)])

    assert [piece.attributes for piece in ttft.pieces] == [
        {},
        {keys.QUEUE_REASON: "kv_blocks"},
        {},
        {keys.STALL_REASON: "kv_blocks"},
    ]
    assert ttft.attributes["ttft.queue.kv_blocks_us"] == 300
    assert ttft.attributes["ttft.stall.kv_blocks_us"] == 100


def test_several_reasons() -> None:
    """A queue with several has a piece below it for each, and no reason of its own."""
    ttft = make_record_part([(150, KV)])
    below = [piece for piece in ttft.pieces if piece.kind == "reason"]

    assert [(piece.name, piece.start, piece.end) for piece in below] == [
        ("in_step", 100, 150),
        ("kv_blocks", 150, 400),
    ]
    assert not ttft.pieces[1].attributes
