# SPDX-License-Identifier: Apache-2.0
"""breakdown.py: stages and unattributed time always add up, and no time lands in a wrong stage."""

from __future__ import annotations

import random

import pytest

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
    partition_marks,
)
from ttft_otel.model.failed_stage import find_failed_stage


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


def test_every_stage_of_a_text_request_is_its_own_hundred_microseconds() -> None:
    """With all marks there, each stage is as long as it was and nothing is left over."""
    breakdown = partition_marks(make_marks())

    assert breakdown.stages == {
        name: 100
        for name in (
            *("receive", "preprocess", "ipc", "prefill.queue", "dispatch"),
            *("prefill.compute", "sample", "output", "egress"),
        )
    }
    assert breakdown.unattributed == 0
    assert breakdown.clamped == 0
    assert is_closed(breakdown)


def test_a_lost_mark_opens_its_stage_and_the_next_one_only() -> None:
    """Each host mark in turn: two stages become unattributed with their sum unchanged, others stay."""
    full = partition_marks(make_marks()).stages
    for mark, stages in (
        ("render", {"receive", "preprocess"}),
        ("assign", {"preprocess", "ipc"}),
        ("added", {"ipc", "prefill.queue"}),
        ("scheduled", {"prefill.queue", "dispatch"}),
        ("output", {"output", "egress"}),
    ):
        breakdown = partition_marks(make_marks(**{mark: 0}))

        assert breakdown.stages == {name: us for name, us in full.items() if name not in stages}, (
            mark
        )
        assert breakdown.unattributed == 200
        assert is_closed(breakdown)


def test_a_lost_forward_takes_dispatch_and_sample_with_it() -> None:
    """Without the forward's pair nobody knows when dispatch ended and sampling began."""
    breakdown = partition_marks(make_marks(steps=[EngineStep([], 1700, LOST_FORWARD)]))

    assert breakdown.unattributed == 300
    assert "output" in breakdown.stages


def test_a_lost_encoder_does_not_fatten_dispatch() -> None:
    """The gap in which the encoder must have run is unattributed, not dispatch."""
    steps = [EngineStep([(CODE_FORWARD, 1500, 1600)], 1700, LOST_ENCODER)]

    breakdown = partition_marks(make_marks(steps=steps))

    assert breakdown.unattributed == 100
    assert "dispatch" not in breakdown.stages
    assert breakdown.stages["prefill.compute"] == 100


def test_a_lost_load_hides_dispatch_and_itself() -> None:
    """An encoder-cache load that nobody timed lies between scheduling and the forward."""
    steps = [EngineStep([(CODE_FORWARD, 1500, 1600)], 1700, LOST_LOAD)]

    assert partition_marks(make_marks(steps=steps)).unattributed == 100


def test_a_save_inside_the_encoder_is_cut_out_of_it() -> None:
    """The V1 runner saves within the encoder's call: the inner pair wins."""
    steps = [EngineStep([(CODE_ENCODER, 1450, 1650), (CODE_EC_TRANSFER, 1500, 1530)])]

    breakdown = partition_marks(make_marks(steps=steps, encode_only=True))

    assert breakdown.stages["encoder.compute"] == 170
    assert breakdown.stages["ec.transfer"] == 30
    assert breakdown.stages["output"] == 150
    assert breakdown.unattributed == 0


def test_a_lost_save_takes_the_encoder_that_may_contain_it() -> None:
    """Nobody can tell encoding from saving then."""
    steps = [EngineStep([(CODE_ENCODER, 1450, 1650)], 0, LOST_SAVE)]

    breakdown = partition_marks(make_marks(steps=steps, encode_only=True))

    assert "encoder.compute" not in breakdown.stages
    assert breakdown.unattributed == 350
    assert is_closed(breakdown)


TWO_CHUNKS = [
    EngineStep([(CODE_FORWARD, 1450, 1500)], 1510),
    EngineStep([(CODE_ENCODER, 1540, 1560), (CODE_FORWARD, 1570, 1650)], 1700),
]


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
    breakdown = partition_marks(make_marks(steps=TWO_CHUNKS, turns=[turn]))

    assert breakdown.stages.get("prefill.stall", 0) == stall
    assert breakdown.stages["dispatch"] == 50 + 40 + 10 - stall
    assert breakdown.stages["prefill.compute"] == 130
    assert breakdown.stages["encoder.compute"] == 20
    assert breakdown.stages["sample"] == 50
    assert breakdown.unattributed == breakdown.clamped == 0 and is_closed(breakdown)


def test_a_turn_that_nobody_saw_is_unattributed() -> None:
    """Whether other requests were worked for cannot be told then."""
    breakdown = partition_marks(make_marks(steps=TWO_CHUNKS))

    assert "prefill.stall" not in breakdown.stages
    assert breakdown.unattributed == 40 and is_closed(breakdown)


def test_a_connectors_wait_is_cut_out_of_the_queue() -> None:
    """Queue before, transfer, queue after."""
    breakdown = partition_marks(make_marks(waits=[("ec.transfer", 1320, 1370)]))

    assert breakdown.stages["prefill.queue"] == 50
    assert breakdown.stages["ec.transfer"] == 50


def test_a_worker_on_another_host_counts_by_length_only() -> None:
    """Its clock is not ours: lengths stay, their place is unattributed."""
    steps = [EngineStep([(CODE_FORWARD, 5, 105)], 200)]

    breakdown = partition_marks(make_marks(steps=steps, foreign=True))

    assert breakdown.stages["prefill.compute"] == 100
    assert breakdown.unattributed == 300
    assert is_closed(breakdown)


def test_marks_out_of_order_are_clamped_and_counted() -> None:
    """No stage is negative; what was cut is on the record."""
    breakdown = partition_marks(make_marks(assign=1050))

    assert breakdown.stages.get("preprocess", 0) == 0
    assert breakdown.clamped == 50
    assert is_closed(breakdown)


def test_a_request_that_died_is_cut_at_its_end() -> None:
    """Aborted in the queue: the rest of its life is the queue's."""
    marks = make_marks(scheduled=0, steps=[], output=0, egress=0)

    breakdown = partition_marks(marks, 5000, find_failed_stage(marks))

    assert breakdown.stages["prefill.queue"] == 3700
    assert breakdown.end == 5000


def test_spans_are_bounded_and_the_sum_stays() -> None:
    """A prompt of 300 chunks: its pieces are merged past the bound, its totals are not."""
    steps = [EngineStep([(CODE_FORWARD, 2000 + 10 * i, 2006 + 10 * i)]) for i in range(300)]
    steps[-1].sampled = 6000
    breakdown = partition_marks(make_marks(steps=steps, output=6100, egress=6200))

    assert breakdown.stages["prefill.compute"] == 1800
    assert len(breakdown.pieces) <= MAX_PIECES + 10
    assert is_closed(breakdown)


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


def test_blocks_on_their_way_are_cut_out_of_the_queue() -> None:
    """D waits for P's blocks between two waits for its turn."""
    breakdown = partition_marks(make_marks(waits=[("kv.transfer", 1320, 1380)]))

    assert (breakdown.stages["kv.transfer"], breakdown.stages["prefill.queue"]) == (60, 40)
    assert breakdown.unattributed == 0 and is_closed(breakdown)


def test_a_request_that_dies_waiting_for_an_encoding_died_in_ec_transfer() -> None:
    """From the first "not yet" of its connector until its end it waited for nothing else."""
    marks = make_marks(
        scheduled=0, steps=[], entered=0, received=0, output=0, egress=0, asking=1350
    )
    assert find_failed_stage(marks) == "ec.transfer"
    breakdown = partition_marks(marks, 5000, find_failed_stage(marks))

    assert (breakdown.stages["prefill.queue"], breakdown.stages["ec.transfer"]) == (50, 3650)
    assert breakdown.unattributed == 0 and is_closed(breakdown)


def test_loads_and_saves_inside_a_step_are_kv_transfer() -> None:
    """Before the forward they are no dispatch, after it they are no sampling."""
    pairs = [
        (CODE_KV_TRANSFER, 1420, 1450),
        (CODE_FORWARD, 1500, 1600),
        (CODE_KV_TRANSFER, 1600, 1670),
    ]
    breakdown = partition_marks(make_marks(steps=[EngineStep(pairs, 1700)]))

    assert (breakdown.stages["kv.transfer"], breakdown.stages["dispatch"]) == (100, 70)
    assert (breakdown.stages["prefill.compute"], breakdown.stages["sample"]) == (100, 30)
    assert breakdown.unattributed == 0 and is_closed(breakdown)


def test_a_lost_load_or_save_of_blocks_hides_what_is_around_it() -> None:
    """Dispatch and the forward, or sampling and the way back, or the way to the next chunk."""
    for lost, gone in (
        (LOST_BEFORE, {"dispatch", "prefill.compute"}),
        (LOST_AFTER, {"sample", "output"}),
    ):
        breakdown = partition_marks(
            make_marks(steps=[EngineStep([(CODE_FORWARD, 1500, 1600)], 1700, lost)])
        )
        assert breakdown.unattributed == 200 and not gone & set(breakdown.stages)
        assert is_closed(breakdown)
    steps = [
        EngineStep([(CODE_FORWARD, 1420, 1450)], 0, LOST_AFTER),
        EngineStep([(CODE_FORWARD, 1500, 1600)], 1700),
    ]
    breakdown = partition_marks(make_marks(steps=steps))
    assert breakdown.unattributed == 50 and "prefill.stall" not in breakdown.stages


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


def test_a_save_after_sampling_is_no_sampling() -> None:
    """V2's runner lets the connector work between the sampler and the output."""
    pairs = [(CODE_FORWARD, 1500, 1600), (CODE_KV_TRANSFER, 1720, 1760)]
    breakdown = partition_marks(make_marks(steps=[EngineStep(pairs, 1700)]))

    assert (breakdown.stages["sample"], breakdown.stages["kv.transfer"]) == (100, 40)
    assert breakdown.stages["output"] == 60
    assert breakdown.unattributed == breakdown.clamped == 0 and is_closed(breakdown)

    unseen = partition_marks(make_marks(steps=[EngineStep(pairs, 0)]))
    assert "sample" not in unseen.stages and unseen.stages["kv.transfer"] == 40
    assert unseen.unattributed == 160 and is_closed(unseen)


def test_a_save_between_two_chunks_is_no_dispatch() -> None:
    """What a connector does after a chunk's forward lies on the way to the next chunk."""
    steps = [
        EngineStep([(CODE_FORWARD, 1410, 1430), (CODE_KV_TRANSFER, 1440, 1450)], 1435),
        EngineStep([(CODE_FORWARD, 1500, 1600)], 1700),
    ]
    breakdown = partition_marks(make_marks(steps=steps, turns=[(1460, 1490)]))

    assert (breakdown.stages["dispatch"], breakdown.stages["prefill.stall"]) == (40, 30)
    assert breakdown.stages["kv.transfer"] == 10 and is_closed(breakdown)


def test_one_that_dies_while_blocks_are_on_their_way_dies_there() -> None:
    """Until then it queued, from then on it was kv.transfer."""
    marks = make_marks(
        scheduled=0, steps=[], entered=0, received=0, output=0, egress=0, moving=1350
    )
    breakdown = partition_marks(marks, 1500, find_failed_stage(marks))

    assert (breakdown.stages["prefill.queue"], breakdown.stages["kv.transfer"]) == (50, 150)
    assert breakdown.unattributed == 0 and is_closed(breakdown)


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


def test_parts_of_dispatch_between_chunks() -> None:
    """The turnaround of the chunk before, then the next step; a stall between is no part."""
    steps = [
        EngineStep([(CODE_FORWARD, 1420, 1450)], 1455, taken=1410),
        EngineStep(
            [(CODE_ENCODER, 1540, 1560), (CODE_FORWARD, 1570, 1650)], 1700, taken=1535, sent=1533
        ),
    ]
    first = [("ipc", 1400, 1410), ("prepare", 1410, 1420)]
    last = [("prepare", 1535, 1540), ("prepare", 1560, 1570)]

    assert divide(steps=steps, turns=[(1470, 0)]) == [
        *first,
        ("turnaround", 1450, 1470),
        ("schedule", 1470, 1533),
        ("ipc", 1533, 1535),
        *last,
    ]
    assert divide(steps=steps, turns=[(1470, 1530)]) == [
        *first,
        ("turnaround", 1450, 1470),
        ("schedule", 1530, 1533),
        ("ipc", 1533, 1535),
        *last,
    ]


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
