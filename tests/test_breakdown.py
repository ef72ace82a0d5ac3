# SPDX-License-Identifier: Apache-2.0
"""breakdown.py: whatever the marks, the stages and their remainder add up, and nothing lands next door."""

from __future__ import annotations

import random

from ttft_otel.breakdown import (
    BLOCKS,
    CACHE,
    ENCODER,
    FORWARD,
    LOST_AFTER,
    LOST_BEFORE,
    LOST_ENCODER,
    LOST_FORWARD,
    LOST_LOAD,
    LOST_SAVE,
    MOST,
    Breakdown,
    Marks,
    Step,
    partition,
    where,
)


def whole(**changes: object) -> Marks:
    """A text request through a monolithic server, 100 us a stage, one chunk."""
    marks = Marks(
        arrive=1000,
        render=1100,
        assign=1200,
        added=1300,
        scheduled=1400,
        steps=[Step([(FORWARD, 1500, 1600)], 1700)],
        entered=1750,
        received=1780,
        output=1800,
        egress=1900,
    )
    for name, value in changes.items():
        setattr(marks, name, value)
    return marks


def closes(found: Breakdown) -> bool:
    """Sum of stages and remainder, and contiguous pieces from start to end."""
    total = sum(found.stages.values()) + found.unattributed
    at = found.start
    for _, low, high in found.pieces:
        if low != at or high < low:
            return False
        at = high
    return total == found.end - found.start and at == found.end


def test_every_stage_of_a_text_request_is_its_own_hundred_microseconds() -> None:
    """With all marks there, each stage is as long as it was and nothing is left over."""
    found = partition(whole())

    assert found.stages == {
        name: 100
        for name in (
            "receive",
            "preprocess",
            "ipc",
            "prefill.queue",
            "dispatch",
            "prefill.compute",
            "sample",
            "output",
            "egress",
        )
    }
    assert found.unattributed == 0
    assert found.clamped == 0
    assert closes(found)


def test_a_lost_mark_opens_its_stage_and_the_next_one_only() -> None:
    """Each host mark in turn: two stages become unattributed with their sum unchanged, others stay."""
    full = partition(whole()).stages
    for mark, stages in (
        ("render", {"receive", "preprocess"}),
        ("assign", {"preprocess", "ipc"}),
        ("added", {"ipc", "prefill.queue"}),
        ("scheduled", {"prefill.queue", "dispatch"}),
        ("output", {"output", "egress"}),
    ):
        found = partition(whole(**{mark: 0}))

        assert found.stages == {name: us for name, us in full.items() if name not in stages}, mark
        assert found.unattributed == 200
        assert closes(found)


def test_a_lost_forward_takes_dispatch_and_sample_with_it() -> None:
    """Without the forward's pair nobody knows when dispatch ended and sampling began."""
    found = partition(whole(steps=[Step([], 1700, LOST_FORWARD)]))

    assert found.unattributed == 300
    assert "output" in found.stages


def test_a_lost_encoder_does_not_fatten_dispatch() -> None:
    """The gap in which the encoder must have run is unattributed, not dispatch."""
    steps = [Step([(FORWARD, 1500, 1600)], 1700, LOST_ENCODER)]

    found = partition(whole(steps=steps))

    assert found.unattributed == 100
    assert "dispatch" not in found.stages
    assert found.stages["prefill.compute"] == 100


def test_a_lost_load_hides_dispatch_and_itself() -> None:
    """An encoder-cache load that nobody timed lies between scheduling and the forward."""
    steps = [Step([(FORWARD, 1500, 1600)], 1700, LOST_LOAD)]

    assert partition(whole(steps=steps)).unattributed == 100


def test_a_save_inside_the_encoder_is_cut_out_of_it() -> None:
    """The V1 runner saves within the encoder's call: the inner pair wins."""
    steps = [Step([(ENCODER, 1450, 1650), (CACHE, 1500, 1530)])]

    found = partition(whole(steps=steps, encode_only=True))

    assert found.stages["encoder.compute"] == 170
    assert found.stages["ec.transfer"] == 30
    assert found.stages["output"] == 150
    assert found.unattributed == 0


def test_a_lost_save_takes_the_encoder_that_may_contain_it() -> None:
    """Nobody can tell encoding from saving then."""
    steps = [Step([(ENCODER, 1450, 1650)], 0, LOST_SAVE)]

    found = partition(whole(steps=steps, encode_only=True))

    assert "encoder.compute" not in found.stages
    assert found.unattributed == 350
    assert closes(found)


def test_gaps_between_steps_are_stall_and_inside_a_step_dispatch() -> None:
    """Two chunks with an image in the second one's step."""
    steps = [
        Step([(FORWARD, 1450, 1500)], 1510),
        Step([(ENCODER, 1540, 1560), (FORWARD, 1570, 1650)], 1700),
    ]

    found = partition(whole(steps=steps))

    assert found.stages["prefill.compute"] == 130
    assert found.stages["prefill.stall"] == 40
    assert found.stages["dispatch"] == 60
    assert found.stages["encoder.compute"] == 20
    assert found.stages["sample"] == 50


def test_a_connectors_wait_is_cut_out_of_the_queue() -> None:
    """Queue before, transfer, queue after."""
    found = partition(whole(waits=[("ec.transfer", 1320, 1370)]))

    assert found.stages["prefill.queue"] == 50
    assert found.stages["ec.transfer"] == 50


def test_a_worker_on_another_host_counts_by_length_only() -> None:
    """Its clock is not ours: lengths stay, their place is unattributed."""
    steps = [Step([(FORWARD, 5, 105)], 200)]

    found = partition(whole(steps=steps, foreign=True))

    assert found.stages["prefill.compute"] == 100
    assert found.unattributed == 300
    assert closes(found)


def test_marks_out_of_order_are_clamped_and_counted() -> None:
    """No stage is negative; what was cut is on the record."""
    found = partition(whole(assign=1050))

    assert found.stages.get("preprocess", 0) == 0
    assert found.clamped == 50
    assert closes(found)


def test_a_request_that_died_is_cut_at_its_end() -> None:
    """Aborted in the queue: the rest of its life is the queue's."""
    marks = whole(scheduled=0, steps=[], output=0, egress=0)

    found = partition(marks, 5000, where(marks))

    assert found.stages["prefill.queue"] == 3700
    assert found.end == 5000


def test_spans_are_bounded_and_the_sum_stays() -> None:
    """A prompt of 300 chunks: its pieces are merged past the bound, its totals are not."""
    steps = [Step([(FORWARD, 2000 + 10 * i, 2006 + 10 * i)]) for i in range(300)]
    steps[-1].sampled = 6000
    found = partition(whole(steps=steps, output=6100, egress=6200))

    assert found.stages["prefill.compute"] == 1800
    assert len(found.pieces) <= MOST + 10
    assert closes(found)


def test_any_marks_add_up() -> None:
    """A thousand random sets of marks, missing and disordered ones included."""
    draw = random.Random(7)
    for _ in range(1000):
        marks = whole()
        for name in ("render", "assign", "added", "scheduled", "output", "egress"):
            setattr(marks, name, draw.choice((0, draw.randrange(900, 3000))))
        marks.steps = [
            Step(
                [
                    (draw.choice((CACHE, ENCODER, FORWARD)), low, low + draw.randrange(90))
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

        found = partition(marks, end, draw.choice(("", "dispatch")))

        assert closes(found)
        assert all(us >= 0 for us in found.stages.values())


def test_blocks_on_their_way_are_cut_out_of_the_queue() -> None:
    """D waits for P's blocks between two waits for its turn."""
    found = partition(whole(waits=[("kv.transfer", 1320, 1380)]))

    assert (found.stages["kv.transfer"], found.stages["prefill.queue"]) == (60, 40)
    assert found.unattributed == 0 and closes(found)


def test_loads_and_saves_inside_a_step_are_kv_transfer() -> None:
    """Before the forward they are no dispatch, after it they are no sampling."""
    pairs = [(BLOCKS, 1420, 1450), (FORWARD, 1500, 1600), (BLOCKS, 1600, 1670)]
    found = partition(whole(steps=[Step(pairs, 1700)]))

    assert (found.stages["kv.transfer"], found.stages["dispatch"]) == (100, 70)
    assert (found.stages["prefill.compute"], found.stages["sample"]) == (100, 30)
    assert found.unattributed == 0 and closes(found)


def test_a_lost_load_or_save_of_blocks_hides_what_is_around_it() -> None:
    """Dispatch and the forward, or sampling and the way back, or the way to the next chunk."""
    for lost, gone in (
        (LOST_BEFORE, {"dispatch", "prefill.compute"}),
        (LOST_AFTER, {"sample", "output"}),
    ):
        found = partition(whole(steps=[Step([(FORWARD, 1500, 1600)], 1700, lost)]))
        assert found.unattributed == 200 and not gone & set(found.stages)
        assert closes(found)
    steps = [
        Step([(FORWARD, 1420, 1450)], 0, LOST_AFTER),
        Step([(FORWARD, 1500, 1600)], 1700),
    ]
    found = partition(whole(steps=steps))
    assert found.unattributed == 50 and "prefill.stall" not in found.stages


def test_a_save_after_sampling_is_no_sampling() -> None:
    """V2's runner lets the connector work between the sampler and the output."""
    pairs = [(FORWARD, 1500, 1600), (BLOCKS, 1720, 1760)]
    found = partition(whole(steps=[Step(pairs, 1700)]))

    assert (found.stages["sample"], found.stages["kv.transfer"]) == (100, 40)
    assert found.stages["output"] == 60
    assert found.unattributed == found.clamped == 0 and closes(found)

    unseen = partition(whole(steps=[Step(pairs, 0)]))
    assert "sample" not in unseen.stages and unseen.stages["kv.transfer"] == 40
    assert unseen.unattributed == 160 and closes(unseen)


def test_a_save_between_two_chunks_is_no_dispatch() -> None:
    """What a connector does after a chunk's forward lies on the way to the next chunk."""
    steps = [
        Step([(FORWARD, 1410, 1430), (BLOCKS, 1440, 1450)], 1435),
        Step([(FORWARD, 1500, 1600)], 1700),
    ]
    found = partition(whole(steps=steps))

    assert (found.stages["dispatch"], found.stages["prefill.stall"]) == (10, 60)
    assert found.stages["kv.transfer"] == 10 and closes(found)


def test_one_that_dies_while_blocks_are_on_their_way_dies_there() -> None:
    """Until then it queued, from then on it was kv.transfer."""
    marks = whole(scheduled=0, steps=[], entered=0, received=0, output=0, egress=0, moving=1350)
    found = partition(marks, 1500, where(marks))

    assert (found.stages["prefill.queue"], found.stages["kv.transfer"]) == (50, 150)
    assert found.unattributed == 0 and closes(found)
