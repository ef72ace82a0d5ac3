# SPDX-License-Identifier: Apache-2.0
"""Stages and unattributed time always add up, no time lands in a wrong stage; waits divided add up, too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttft_otel.model import breakdown
from ttft_otel.model.breakdown import (
    CODE_EC_TRANSFER,
    CODE_ENCODER,
    CODE_FORWARD,
    CODE_KV_TRANSFER,
    LATE_STAGE,
    LOST_AFTER,
    LOST_BEFORE,
    LOST_ENCODER,
    LOST_FORWARD,
    LOST_LOAD,
    LOST_SAVE,
    MAX_PIECES,
    Breakdown,
    EngineStep,
    Marks,
    divide_dispatch,
    find_failed_stage,
    partition_marks,
)
from ttft_otel.model.names import keys
from ttft_otel.model.record import HeldBy, Ttft
from ttft_otel.model.stages import STALL_STAGE, WAIT_REASON_NAMES, WAIT_REASONS
from ttft_otel.model.waits import (
    MAX_SLICES,
    SEGMENT_SIZE,
    ReasonSlice,
    divide_held,
    divide_waits,
    halve_segments,
    split_length,
    split_step,
)
from ttft_otel.tracing.carrier import EngineDetails, EngineTimeline
from ttft_otel.tracing.context import start_context
from ttft_otel.tracing.request_trace import RequestTrace, make_ttft
from ttft_otel.tracing.settings import Settings


def make_marks(**changes: object) -> Marks:
    """A text request through a monolithic server, 100 us a stage, one chunk."""
    marks = Marks(
        arrive=1000,
        render=1100,
        assign=1200,
        added=1300,
        scheduled=1400,
        steps=[EngineStep([(CODE_FORWARD, 1500, 1600)], 1700)],
        entered=1750,
        received=1780,
        output=1800,
        egress=1900,
    )
    for name, value in changes.items():
        setattr(marks, name, value)
    return marks


def is_closed(breakdown: Breakdown) -> bool:
    """Sum of stages and remainder, and contiguous pieces from start to end."""
    total = sum(breakdown.stages.values()) + breakdown.unattributed
    at = breakdown.start
    for _, low, high in breakdown.pieces:
        if low != at or high < low:
            return False
        at = high
    return total == breakdown.end - breakdown.start and at == breakdown.end


def cut(**changes: object) -> Breakdown:
    """The partition of make_marks(), which adds up."""
    found = partition_marks(make_marks(**changes))
    assert is_closed(found)
    return found


def test_every_stage_of_a_text_request_is_its_own_hundred_microseconds() -> None:
    """With all marks there, each stage is as long as it was and nothing is left over."""
    breakdown = cut()

    assert breakdown.stages == {
        name: 100
        for name in (
            *("receive", "preprocess", "ipc", "prefill.queue", "dispatch"),
            *("prefill.compute", "sample", "output", "egress"),
        )
    }
    assert breakdown.unattributed == breakdown.clamped == 0


def test_a_lost_mark_opens_its_stage_and_the_next_one_only() -> None:
    """Each host mark in turn: two stages become unattributed with their sum unchanged, others stay."""
    full = cut().stages
    for mark, stages in (
        ("render", {"receive", "preprocess"}),
        ("assign", {"preprocess", "ipc"}),
        ("added", {"ipc", "prefill.queue"}),
        ("scheduled", {"prefill.queue", "dispatch"}),
        ("output", {"output", "egress"}),
    ):
        breakdown = cut(**{mark: 0})

        assert breakdown.stages == {name: us for name, us in full.items() if name not in stages}, (
            mark
        )
        assert breakdown.unattributed == 200


FORWARD = (CODE_FORWARD, 1500, 1600)
TWO_CHUNKS = [
    EngineStep([(CODE_FORWARD, 1450, 1500)], 1510),
    EngineStep([(CODE_ENCODER, 1540, 1560), (CODE_FORWARD, 1570, 1650)], 1700),
]
LOADED_AND_SAVED = [(CODE_KV_TRANSFER, 1420, 1450), FORWARD, (CODE_KV_TRANSFER, 1600, 1670)]
SAVED_LATE = [FORWARD, (CODE_KV_TRANSFER, 1720, 1760)]
SAVED_BETWEEN = [
    EngineStep([(CODE_FORWARD, 1410, 1430), (CODE_KV_TRANSFER, 1440, 1450)], 1435),
    EngineStep([FORWARD], 1700),
]
SAVE_LOST_BETWEEN = [
    EngineStep([(CODE_FORWARD, 1420, 1450)], 0, LOST_AFTER),
    EngineStep([FORWARD], 1700),
]


def one_step(*pairs: tuple[int, int, int], sampled: int = 1700, lost: int = 0) -> list[EngineStep]:
    """The only step of a request."""
    return [EngineStep(list(pairs), sampled, lost)]


# What happened, its marks, the lengths of stages (0: not told), and what is unattributed.
CASES: dict[str, tuple[dict[str, Any], dict[str, int], int]] = {
    "without the forward nobody knows when dispatch ended and sampling began": (
        {"steps": one_step(lost=LOST_FORWARD)},
        {"dispatch": 0, "prefill.compute": 0, "sample": 0, "output": 100},
        300,
    ),
    "the gap in which a lost encoder, or a lost load, must have run is not dispatch": (
        {"steps": one_step(FORWARD, lost=LOST_ENCODER)},
        {"dispatch": 0, "prefill.compute": 100},
        100,
    ),
    "the V1 runner saves within the encoder's call: the inner pair wins": (
        {
            "steps": one_step(
                (CODE_ENCODER, 1450, 1650), (CODE_EC_TRANSFER, 1500, 1530), sampled=0
            ),
            "encode_only": True,
        },
        {"encoder.compute": 170, "ec.transfer": 30, "output": 150},
        0,
    ),
    "nobody can tell encoding from a lost save": (
        {"steps": one_step((CODE_ENCODER, 1450, 1650), sampled=0, lost=LOST_SAVE)}
        | {"encode_only": True},
        {"encoder.compute": 0},
        350,
    ),
    "without a turn it is not known whether others were worked for": (
        {"steps": TWO_CHUNKS},
        {"prefill.stall": 0},
        40,
    ),
    "a connector's wait is cut out of the queue": (
        {"waits": [("ec.transfer", 1320, 1370)]},
        {"prefill.queue": 50, "ec.transfer": 50},
        0,
    ),
    "of a worker's clock on another host lengths stay, places are unknown": (
        {"steps": [EngineStep([(CODE_FORWARD, 5, 105)], 200)], "foreign": True},
        {"prefill.compute": 100},
        300,
    ),
    "loads before the forward are no dispatch, saves after it no sampling": (
        {"steps": one_step(*LOADED_AND_SAVED)},
        {"kv.transfer": 100, "dispatch": 70, "prefill.compute": 100, "sample": 30},
        0,
    ),
    "a lost load of blocks hides dispatch and the forward": (
        {"steps": one_step(FORWARD, lost=LOST_BEFORE)},
        {"dispatch": 0, "prefill.compute": 0},
        200,
    ),
    "a lost save of blocks hides sampling and the way back": (
        {"steps": one_step(FORWARD, lost=LOST_AFTER)},
        {"sample": 0, "output": 0},
        200,
    ),
    "a save lost after a chunk hides the way to the next one": (
        {"steps": SAVE_LOST_BETWEEN},
        {"prefill.stall": 0},
        50,
    ),
    "V2's runner lets the connector work between the sampler and the output": (
        {"steps": one_step(*SAVED_LATE)},
        {"sample": 100, "kv.transfer": 40, "output": 60},
        0,
    ),
    "the same where the sampler was not seen": (
        {"steps": one_step(*SAVED_LATE, sampled=0)},
        {"sample": 0, "kv.transfer": 40},
        160,
    ),
    "what a connector does after a chunk's forward is no dispatch": (
        {"steps": SAVED_BETWEEN, "turns": [(1460, 1490)]},
        {"dispatch": 40, "prefill.stall": 30, "kv.transfer": 10},
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_marks_make_stages(case: str) -> None:
    """Each time is in its own stage or unattributed, and all of them add up."""
    changes, lengths, unattributed = CASES[case]
    found = cut(**changes)

    assert {name: found.stages.get(name, 0) for name in lengths} == lengths
    assert (found.unattributed, found.clamped) == (unattributed, 0)


def test_marks_out_of_order_are_clamped_and_counted() -> None:
    """No stage is negative; what was cut is on the record."""
    found = cut(assign=1050)

    assert (found.stages.get("preprocess", 0), found.clamped) == (0, 50)


@pytest.mark.parametrize(
    ("waiting", "stage", "queue"),
    [({}, "prefill.queue", 3700), ({"asking": 1350}, "ec.transfer", 50)]
    + [({"moving": 1350}, "kv.transfer", 50)],
)
def test_a_request_dies_in_what_it_waits_for(
    waiting: dict[str, int], stage: str, queue: int
) -> None:
    """From the first "not yet" of its connector until its end it waited for nothing else than that."""
    gone = dict.fromkeys(("scheduled", "entered", "received", "output", "egress"), 0)
    marks = make_marks(steps=[], **gone, **waiting)
    assert find_failed_stage(marks) == stage
    found = partition_marks(marks, 5000, stage)

    assert (found.stages["prefill.queue"], found.end) == (queue, 5000)
    assert queue == 3700 or found.stages[stage] == 3650
    assert found.unattributed == 0 and is_closed(found)


@pytest.mark.parametrize(
    ("turn", "stall"),
    [
        ((1515, 0), 0),  # no step left it out: its own turnaround
        ((1515, 1525), 10),  # until a step that left it out had ended
        ((1490, 1530), 30),  # its own step's end came before its forward's, by a clock's error
        ((1515, 1590), 25),  # the worker began before the engine core had the other's end
        ((1545, 1560), 0),  # async scheduling: both were known after the worker had begun
        ((1530, 1520), 0),
    ],
)
def test_between_chunks_only_what_left_the_request_out_is_a_stall(
    turn: tuple[int, int], stall: int
) -> None:
    """Two chunks with an image in the second one's step; all else of the gap is dispatch."""
    breakdown = cut(steps=TWO_CHUNKS, turns=[turn])

    assert breakdown.stages.get("prefill.stall", 0) == stall
    assert breakdown.stages["dispatch"] == 50 + 40 + 10 - stall
    assert breakdown.stages["prefill.compute"] == 130
    assert breakdown.stages["encoder.compute"] == 20
    assert breakdown.stages["sample"] == 50
    assert breakdown.unattributed == breakdown.clamped == 0


def test_spans_are_bounded_and_the_sum_stays() -> None:
    """A prompt of 300 chunks: its pieces are merged past the bound, its totals are not."""
    steps = [EngineStep([(CODE_FORWARD, 2000 + 10 * i, 2006 + 10 * i)]) for i in range(300)]
    steps[-1].sampled = 6000
    breakdown = cut(steps=steps, output=6100, egress=6200)

    assert breakdown.stages["prefill.compute"] == 1800
    assert len(breakdown.pieces) <= MAX_PIECES + 10


def test_any_marks_add_up() -> None:
    """A thousand random sets of marks, missing and disordered ones included."""
    draw = random.Random(7)
    for _ in range(1000):
        marks = make_marks()
        for name in ("render", "assign", "added", "scheduled", "output", "egress"):
            setattr(marks, name, draw.choice((0, draw.randrange(900, 3000))))
        marks.steps = [
            EngineStep(
                [
                    (
                        draw.choice((CODE_EC_TRANSFER, CODE_ENCODER, CODE_FORWARD)),
                        low,
                        low + draw.randrange(90),
                    )
                    for low in (draw.randrange(1000, 2500) for _ in range(draw.randrange(4)))
                ],
                draw.choice((0, draw.randrange(1000, 3000))),
                draw.randrange(16),
            )
            for _ in range(draw.randrange(4))
        ]
        marks.waits = [("ec.transfer", draw.randrange(1000, 2000), draw.randrange(1000, 2000))]
        marks.foreign = draw.random() < 0.2
        marks.encode_only = draw.random() < 0.3
        marks.truncated = draw.random() < 0.2
        end = draw.choice((0, draw.randrange(1000, 4000)))

        breakdown = partition_marks(marks, end, draw.choice(("", "dispatch")))

        assert is_closed(breakdown)
        assert all(us >= 0 for us in breakdown.stages.values())


def test_short_way_is_the_cursors() -> None:
    """What most requests are cut by gives what the cursor gives: a wait without length leaves it to that."""
    draw = random.Random(11)
    names = ("arrive", "render", "assign", "added", "scheduled", "output", "egress")
    short = 0
    for number in range(3000):
        # In order, which a short way needs; then sometimes one that is missing, or out of place.
        times = sorted(draw.randrange(1, 40 if number % 2 else 4000) for _ in range(10))
        marks = make_marks(**dict(zip(names, [*times[:5], *times[8:]], strict=True)))
        marks.steps = [EngineStep([(CODE_FORWARD, times[5], times[6])], times[7])]
        if draw.random() < 0.3:
            setattr(marks, draw.choice(names[1:]), draw.choice((0, draw.randrange(1, 4000))))
        marks.steps[0].lost = draw.choice((0, 0, 0, LOST_LOAD))
        marks.encoder_first = draw.random() < 0.1
        marks.reasons = [(times[3], 2)] * draw.randrange(2)
        marks.held = [times[3]] * draw.randrange(2)
        breakdown = partition_marks(marks)
        short += not (marks.encoder_first or breakdown.clamped or breakdown.unattributed)
        marks.waits = [("kv.transfer", 0, 0)]

        assert partition_marks(marks) == breakdown
    assert short > 1000


@pytest.mark.parametrize("sent", [0, 1405])
@pytest.mark.parametrize("load", [[], [(CODE_KV_TRANSFER, 1410, 1412)]])
def test_earlier_pipeline_stages(sent: int, load: list[tuple[int, int, int]]) -> None:
    """From where a step is sent until the last stage's forward begins; its other intervals stay."""
    steps = [
        EngineStep([*load, (CODE_FORWARD, 1420, 1450)], 0, LATE_STAGE, 1408, sent=sent),
        EngineStep([(CODE_FORWARD, 1500, 1600)], 1700, LATE_STAGE, 1490, sent=sent and 1480),
    ]
    marks = make_marks(steps=steps, turns=[(1460, 1470)])
    found = partition_marks(marks)

    assert (found.stages["prefill.compute"], found.stages["sample"]) == (130, 100)
    assert found.stages["prefill.stall"] == 10
    assert found.stages["pipeline"] == 20 + 30 - (5 + 10 if sent else 0) - (2 if load else 0)
    assert found.stages["dispatch"] == 10 + (5 + 10 if sent else 0)
    assert found.unattributed == 0 and is_closed(found)
    parts = [("turnaround", 1450, 1460)]
    if sent:
        parts = [("schedule", 1400, 1405), *parts, ("schedule", 1470, 1480)]
    assert divide_dispatch(found.pieces, marks) == parts


def divide(**changes: object) -> list[tuple[str, int, int]]:
    """The parts of dispatch, which have to fill its pieces."""
    marks = make_marks(**changes)
    breakdown = partition_marks(marks)
    parts = divide_dispatch(breakdown.pieces, marks)
    length = sum(high - low for _, low, high in parts)
    assert length in (0, breakdown.stages["dispatch"])
    return parts


def test_parts_of_dispatch() -> None:
    """Until the engine core sends the step, RPC until the worker takes it, inputs until its work begins."""
    step = EngineStep([(CODE_FORWARD, 1500, 1600)], 1700, taken=1440, sent=1410)

    assert divide(steps=[step]) == [
        ("schedule", 1400, 1410),
        ("ipc", 1410, 1440),
        ("prepare", 1440, 1500),
    ]
    step.sent = step.taken  # one process: there is no RPC
    assert divide(steps=[step]) == [("schedule", 1400, 1440), ("prepare", 1440, 1500)]
    assert divide() == []  # a worker that does not tell when it took the step


def test_the_step_before_is_a_part_of_dispatch() -> None:
    """Under async scheduling: until the worker is free, and until the device is."""
    step = EngineStep([(CODE_FORWARD, 1500, 1600)], 1700, taken=1440, launched=1470, sent=1405)

    assert divide(steps=[step], previous=1430) == [
        ("schedule", 1400, 1405),
        ("previous_step", 1405, 1430),
        ("ipc", 1430, 1440),
        ("prepare", 1440, 1470),
        ("previous_step", 1470, 1500),
    ]
    # The engine core has the other step's output later than the worker takes this one.
    assert divide(steps=[step], previous=1450)[1:3] == [
        ("previous_step", 1405, 1440),
        ("prepare", 1440, 1470),
    ]


def test_the_wait_for_other_ranks_is_a_part_of_dispatch() -> None:
    """It lies in the worker's preparation, as the host saw it; on a device the work may begin later."""
    sync = {"taken": 1440, "sent": 1410, "sync_start": 1450, "sync_end": 1480}
    step = EngineStep([(CODE_FORWARD, 1500, 1600)], 1700, **sync)
    parts = [
        ("schedule", 1400, 1410),
        ("ipc", 1410, 1440),
        ("prepare", 1440, 1450),
        ("dp_sync", 1450, 1480),
    ]

    assert divide(steps=[step]) == [*parts, ("prepare", 1480, 1500)]
    step.launched = 1485
    assert divide(steps=[step])[4:] == [("prepare", 1480, 1485), ("previous_step", 1485, 1500)]
    step.launched, step.sync_end = 0, 1510  # a clock that is off
    assert divide(steps=[step]) == [*parts[:3], ("dp_sync", 1450, 1500)]


@pytest.mark.parametrize("taken", [1390, 1400, 1401, 1440, 1499, 1500, 1510])
@pytest.mark.parametrize("launched", [0, 1470])
@pytest.mark.parametrize("sent", [0, 1401, 1440])
def test_the_usual_parts_are_the_general_ones(taken: int, launched: int, sent: int) -> None:
    """The short way for one step gives what the cursor gives, or leaves it to the cursor."""
    step = EngineStep([(CODE_FORWARD, 1500, 1600)], 1700, taken=taken, launched=launched, sent=sent)
    marks = make_marks(steps=[step])
    pieces = partition_marks(marks).pieces
    usual = breakdown._divide_usual_dispatch(pieces, marks)

    assert usual in ([], breakdown._divide_dispatch_pieces(pieces, marks))
    assert bool(usual) == (1400 < sent <= taken < 1500 and not launched)


def test_merged_pieces_have_no_parts() -> None:
    """Of a prompt with so many chunks the last ones have no places of their own."""
    steps = [
        EngineStep([(CODE_FORWARD, 1410 + 10 * at, 1415 + 10 * at)], 0, taken=1408 + 10 * at)
        for at in range(MAX_PIECES)
    ]
    steps[-1].sampled = 2400
    turns = [(1416 + 10 * at, 0) for at in range(MAX_PIECES - 1)]
    marks = make_marks(
        steps=steps, turns=turns, entered=2410, received=2420, output=2430, egress=2440
    )
    found = partition_marks(marks)

    assert is_closed(found) and found.unattributed == 0
    assert divide_dispatch(found.pieces, marks) == []


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
