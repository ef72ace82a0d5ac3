# SPDX-License-Identifier: Apache-2.0
"""Partition a request's time to first token into stages that add up to it exactly. Pure.

recorder.py passes the Marks it collected and puts the Breakdown into the Record. A cursor walks the marks
in the order of stages.STAGES. A missing mark leaves its interval open, and the next mark closes both as
`unattributed`: a missing hook never makes a neighbouring stage longer. Of a request without a first token
find_failed_stage() says where it ended. A call to a leg is partitioned by what its instance says in
Server-Timing: router/timeline.py passes a request's attempts, exporter/span_writer.py those of a Record.
"""

from __future__ import annotations

import functools
from typing import Final, Protocol

import msgspec

from ttft_otel.model.stages import STAGE_NAMES, STAGES, STAGES_BY_NAME, UNATTRIBUTED
from ttft_otel.model.timing import ServerTiming
from ttft_otel.model.waits import WAIT_STAGES, HeldPiece, ReasonSlice, divide_held, divide_waits


class PartitionCursor:
    """Walks from mark to mark; all time before `position` is already attributed to a stage."""

    __slots__ = ("position", "clamped", "is_open", "pieces", "limit")

    def __init__(self, start: int, limit: int = 0) -> None:
        """`limit`: no mark can lie after it; 0: unknown."""
        self.position = start
        self.limit = limit
        self.is_open = False
        self.clamped = 0
        self.pieces: list[tuple[str, int, int]] = []

    def close_stage(self, stage: str, mark: int) -> None:
        """End `stage` at `mark`; with 0 the interval stays open until the next mark (unattributed).

        A mark after the limit is treated as missing: it is of a clock that is not ours.
        """
        if not mark or 0 < self.limit < mark:
            self.is_open = True
            return
        if self.is_open:
            stage = UNATTRIBUTED
            self.is_open = False
        position = self.position
        if mark > position:
            pieces = self.pieces
            # One span, not two that touch: neighbouring lost intervals are one of unknown stage.
            if pieces and pieces[-1][0] == stage:
                pieces[-1] = (stage, pieces[-1][1], mark)
            else:
                pieces.append((stage, position, mark))
            self.position = mark
        else:
            # Times of two processes, or of a device, may overlap a little: the sum stays exact.
            self.clamped += position - mark


def flatten_intervals(pairs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Make nested intervals disjoint; the inner one wins (V1's runner saves inside the encoder call)."""
    if len(pairs) < 2:  # a prompt's forward alone: most steps
        return pairs
    flat: list[tuple[int, int, int]] = []
    # Of intervals with the same start the longer one comes first: it is the outer one.
    for code, start, stop in sorted(pairs, key=lambda pair: (pair[1], -pair[2])):
        if flat and start < flat[-1][2]:
            outer, first, end = flat.pop()
            if start > first:
                flat.append((outer, first, start))
            flat.append((code, start, min(stop, end)))
            if stop < end:
                flat.append((outer, stop, end))
        else:
            flat.append((code, start, stop))
    return flat


def merge_tail_pieces(pieces: list[tuple[str, int, int]], kept: int) -> list[tuple[str, int, int]]:
    """Bound the number of spans: pieces after the first `kept` are merged to one per stage, end to end."""
    merged, tail = pieces[:kept], pieces[kept:]
    lengths: dict[str, int] = {}
    for label, low, high in tail:
        lengths[label] = lengths.get(label, 0) + high - low
    position = tail[0][1]
    for label, length in lengths.items():
        merged.append((label, position, position + length))
        position += length
    return merged


# Codes of the worker's intervals.
CODE_ENCODER: Final = STAGES_BY_NAME["encoder.compute"].code
CODE_FORWARD: Final = STAGES_BY_NAME["prefill.compute"].code
CODE_EC_TRANSFER: Final = STAGES_BY_NAME["ec.transfer"].code
CODE_KV_TRANSFER: Final = STAGES_BY_NAME["kv.transfer"].code

# Bits: a hook is missing, so that such an interval may not have been recorded.
LOST_ENCODER: Final = 1  # the step ran the encoder, but has no interval for it
LOST_FORWARD: Final = 2
LOST_LOAD: Final = 4
LOST_SAVE: Final = 8
LOST_BEFORE: Final = 16  # KV blocks may have been loaded before the forward
LOST_AFTER: Final = 32  # KV blocks may have been loaded or saved after it (on V2: after sampling)
# Nothing is lost: earlier pipeline stages worked before it (64: carrier's).
LATE_STAGE: Final = 128

_STAGE_BY_CODE: Final = {stage.code: stage.name for stage in STAGES if stage.in_worker}
MAX_PIECES: Final = 96  # pieces (spans) kept one by one; later ones are merged per stage


class EngineStep(msgspec.Struct, gc=False):
    """One engine step of a request; times in microseconds, `sampled` 0 if unseen, `lost` LOST_* bits.

    pairs: the worker's intervals (code, start, end). taken: the worker began with the step, by the host's
    clock. launched: it had queued the first interval's work for the device; 0 where the work began at once.
    sent: the engine core sent it to the workers, 0 unknown; `taken` where both are one process.
    draft_start, draft_end: of a drafter that ran before the output was ready. sync_start, sync_end: of the
    wait for other data-parallel ranks before the work, by the host's clock.
    """

    pairs: list[tuple[int, int, int]]
    sampled: int = 0
    lost: int = 0
    taken: int = 0
    launched: int = 0
    sent: int = 0
    draft_start: int = 0
    draft_end: int = 0
    sync_start: int = 0
    sync_end: int = 0


class Marks(msgspec.Struct, gc=False):
    """The marks of one request: CLOCK_MONOTONIC in microseconds, 0 for a mark that is missing.

    waits: (stage, start, end) intervals inside the queue that belong to connectors.
    reasons, held: why the scheduler left it out (since when, code), and what ran (waits.py).
    foreign: the worker's clock is not the engine core's, or it gives lengths only: the places of its
        intervals are not usable.
    clock_offset, clock_error: what was subtracted from the engine core's times because its clock is
        another one, and by how much that may be wrong; see clock.py.
    egress: 0 when the TTFT ends with `output`. encode_only: the language model does not run.
    truncated: steps were dropped. queue_lost: a wait whose hook is missing may hide in the queue.
    turns: of each step after the first one, by the engine core: when the request's step before it had ended,
        and until when steps that had left the request out were scheduled or ran, 0 where none had.
    previous: the engine core had the output of the step before its first one, if that was later than
        `scheduled`.
    """

    arrive: int
    render: int = 0
    assign: int = 0
    added: int = 0
    scheduled: int = 0
    moving: int = 0  # since then KV blocks have been in transfer; 0 once they have arrived
    asking: int = 0  # since then an encoder-cache connector has been answering "not yet"
    encoder_first: bool = False
    waits: list[tuple[str, int, int]] = []
    reasons: list[tuple[int, int]] = []
    held: list[int] = []
    steps: list[EngineStep] = []
    turns: list[tuple[int, int]] = []
    previous: int = 0
    entered: int = 0
    received: int = 0
    output: int = 0
    egress: int = 0
    encode_only: bool = False
    foreign: bool = False
    truncated: bool = False
    queue_lost: bool = False
    clock_offset: int = 0
    clock_error: int = 0
    partial: bool = False  # it ended before its last chunk: none of its steps sampled a first token


class Breakdown(msgspec.Struct, gc=False):
    """Result of a partition; microseconds. sum(stages.values()) + unattributed == end - start.

    pieces: (stage, start, end) in time order, contiguous from start to end.
    clamped: how far marks lay before their predecessor, in total; such marks are moved forward.
    reasons, held: the waiting pieces, divided by reasons, and by what held the engine.
    """

    start: int
    end: int
    pieces: list[tuple[str, int, int]]
    stages: dict[str, int]
    unattributed: int
    clamped: int
    reasons: list[ReasonSlice] = []
    held: list[HeldPiece] = []


def partition_marks(marks: Marks, end: int = 0, failed_stage: str = "") -> Breakdown:
    """Partition [marks.arrive, last mark] into stages.

    end: of a request without a first token; time up to it is `failed_stage`'s, "" unattributed.
    """
    pieces = [] if end else _cut_usual(marks)
    if pieces:
        totals = {stage: high - low for stage, low, high in pieces}
        return _build_breakdown(marks, pieces, totals, pieces[-1][2], 0)
    # Taken in this process, and nothing that another process did can be later.
    cursor = PartitionCursor(marks.arrive, marks.output or marks.egress or end)
    cursor.close_stage("receive", marks.render)
    cursor.close_stage("preprocess", marks.assign)
    cursor.close_stage("ipc", marks.added)
    _close_queue(cursor, marks)
    if marks.foreign:
        _add_remote_lengths(cursor, marks)
    else:
        _close_worker_stages(cursor, marks)
    # From here on the marks are this process's own.
    cursor.limit = 0
    cursor.close_stage("output", marks.output)
    if marks.egress:
        cursor.close_stage("egress", marks.egress)
    if end:
        cursor.is_open = False
        cursor.close_stage(failed_stage or UNATTRIBUTED, max(end, cursor.position))
    totals = {}
    for label, low, high in cursor.pieces:
        totals[label] = totals.get(label, 0) + high - low
    return _build_breakdown(marks, cursor.pieces, totals, cursor.position, cursor.clamped)


def _cut_usual(marks: Marks) -> list[tuple[str, int, int]]:
    """The pieces of most requests, in a fifth of the cursor's time; [] where it is to decide.

    Of a text prompt that one step has computed: no connector, no step more, no missing mark.
    """
    if len(marks.steps) != 1 or marks.waits or marks.encode_only or marks.encoder_first:
        return []
    step = marks.steps[0]
    if len(step.pairs) != 1 or step.lost or marks.foreign or marks.truncated:
        return []
    code, start, stop = step.pairs[0]
    if code != CODE_FORWARD or marks.queue_lost or marks.partial:
        return []
    output, egress = marks.output, marks.egress or marks.output
    arrive, render, assign, added = marks.arrive, marks.render, marks.assign, marks.added
    scheduled, sampled = marks.scheduled, step.sampled
    # Each is there, and none lies before its predecessor.
    if not 0 < arrive <= render <= assign <= added <= scheduled <= start <= stop <= sampled:
        return []
    if not start < sampled <= output <= egress:
        return []
    pieces = [
        ("receive", arrive, render),
        ("preprocess", render, assign),
        ("ipc", assign, added),
        ("prefill.queue", added, scheduled),
        ("dispatch", scheduled, start),
        ("prefill.compute", start, stop),
        ("sample", stop, sampled),
        ("output", sampled, output),
    ]
    if egress > output:
        pieces.append(("egress", output, egress))
    if arrive < render < assign < added < scheduled < start < stop < sampled < output:
        return pieces
    return [piece for piece in pieces if piece[2] > piece[1]]


def _close_queue(cursor: PartitionCursor, marks: Marks) -> None:
    """The queue's stage, with the connectors' waits cut out of it."""
    queue_stage = "encoder.queue" if marks.encoder_first else "prefill.queue"
    if marks.scheduled:
        # Two connectors can wait at once; what the first one took is cut off the second.
        for stage, start, stop in sorted(marks.waits, key=lambda wait: wait[1]):
            low, high = max(start, cursor.position), min(stop, marks.scheduled)
            if high > low:
                cursor.is_open = cursor.is_open or marks.queue_lost
                cursor.close_stage(queue_stage, low)
                cursor.close_stage(stage, high)
    # It ended while it waited for a connector: that wait has a start and no end.
    elif marks.moving or marks.asking:
        cursor.close_stage(queue_stage, marks.moving or marks.asking)
    cursor.is_open = cursor.is_open or marks.queue_lost
    cursor.close_stage(queue_stage, marks.scheduled)


def _close_worker_stages(cursor: PartitionCursor, marks: Marks) -> None:
    """Worker intervals from the first mark to the last forward; gaps take the stage of their place."""
    last = len(marks.steps) - 1
    for number, step in enumerate(marks.steps):
        if number == last and marks.truncated:
            cursor.is_open = True  # steps were dropped before this one
        if number:
            _close_turn(cursor, marks.turns, number, step)
        end, later = 0, "dispatch"
        # Only the last chunk's step gives the first token.
        if number == last and not marks.partial:
            end, later = step.sampled, "sample" if step.sampled else UNATTRIBUTED
        _close_step(cursor, step, later, end, marks.encode_only)
        cursor.is_open = cursor.is_open or bool(step.lost & LOST_AFTER)
    cursor.is_open = cursor.is_open or not marks.steps
    if marks.steps and not marks.encode_only and not marks.partial:
        _close_sampling(cursor, marks.steps[last])


def _close_turn(
    cursor: PartitionCursor, turns: list[tuple[int, int]], number: int, step: EngineStep
) -> None:
    """The stall before step `number`, and what of the turnaround lies before it.

    Until the request's own step has ended, and from the schedule() call that took it again on, the time is
    its own turnaround and preparation, `dispatch`. Only what steps that left it out account for is a stall.
    """
    if number > len(turns):
        cursor.is_open = True  # nobody saw whether a step left it out
        return
    ended, others = turns[number - 1]
    # Under async scheduling the worker begins with a step before the engine core has the one before.
    begun = min((start for _, start, _ in step.pairs), default=others)
    ended, others = max(min(ended, begun), cursor.position), min(others, begun)
    if others > ended:
        if ended > cursor.position:
            cursor.close_stage("dispatch", ended)
        cursor.close_stage("prefill.stall", others)


def divide_dispatch(pieces: list[tuple[str, int, int]], marks: Marks) -> list[tuple[str, int, int]]:
    """(part, start, end) in time order, which fill the pieces of `dispatch` without gap or overlap.

    pieces: of partition_marks(). Before the first interval of a step: `turnaround` until the request's step
    before has ended, `schedule` until the engine core sends it, `previous_step` until the one before its
    first step has ended, `ipc` until the worker takes the step, `prepare` until the work is queued, with
    `dp_sync` inside it, and again `previous_step` until the device begins. What lies between two intervals of
    a step is `prepare`. A piece before a step that the worker does not tell of has no parts, and neither has
    a request with so many pieces that the last ones are merged.
    """
    if len(pieces) >= MAX_PIECES:
        return []
    return _divide_usual_dispatch(pieces, marks) or _divide_dispatch_pieces(pieces, marks)


def _divide_usual_dispatch(
    pieces: list[tuple[str, int, int]], marks: Marks
) -> list[tuple[str, int, int]]:
    """The parts of one step that has begun at once, as most have, in a tenth of the time; [] for others."""
    if len(marks.steps) != 1 or marks.previous:
        return []
    step = marks.steps[0]
    if len(step.pairs) != 1 or step.launched or step.sync_end:
        return []
    low, high, sent, taken = marks.scheduled, step.pairs[0][1], step.sent, step.taken
    if low < sent <= taken < high and ("dispatch", low, high) in pieces:
        parts = [("schedule", low, sent), ("ipc", sent, taken), ("prepare", taken, high)]
        return parts if sent < taken else parts[::2]
    return []


def _divide_dispatch_pieces(
    pieces: list[tuple[str, int, int]], marks: Marks
) -> list[tuple[str, int, int]]:
    # By where their first piece ends: at their first interval, or where `pipeline` begins.
    steps = {
        step.sent if step.lost & LATE_STAGE else min(pair[1] for pair in step.pairs): at
        for at, step in enumerate(marks.steps)
        if step.pairs
    }
    ends = {ended for ended, others in marks.turns if others}
    parts: list[tuple[str, int, int]] = []
    for stage, low, high in pieces:
        if stage != "dispatch":
            continue
        number = steps.get(high)
        if number is None:
            parts.append(("turnaround" if high in ends else "prepare", low, high))
            continue
        step = marks.steps[number]
        if not step.taken:
            continue
        cursor = PartitionCursor(low)
        if number:
            ended = marks.turns[number - 1][0] if number <= len(marks.turns) else low
            cursor.close_stage("turnaround", max(low, min(ended, high)))
        for part, mark in (
            ("schedule", min(step.sent, step.taken)),
            ("previous_step", 0 if number else min(marks.previous, step.taken)),
            ("ipc", step.taken),
            ("prepare", step.sync_start),
            ("dp_sync", step.sync_end),
            ("prepare", step.launched or high),
        ):
            cursor.close_stage(part, max(cursor.position, min(mark, high)))
        cursor.close_stage("previous_step", high)
        parts += cursor.pieces
    return parts


def _close_sampling(cursor: PartitionCursor, step: EngineStep) -> None:
    """The `sample` stage, and KV transfers between sampling and the output."""
    cursor.close_stage("sample", step.sampled)
    for code, start, stop in flatten_intervals(step.pairs):
        if step.sampled and start >= step.sampled:
            cursor.close_stage("output", start)
            cursor.close_stage(_STAGE_BY_CODE[code], stop)
    cursor.is_open = cursor.is_open or bool(step.lost & LOST_AFTER)


def _close_step(
    cursor: PartitionCursor, step: EngineStep, later: str, end: int, encode_only: bool
) -> None:
    """One step's intervals up to `end` (0: all); a gap that may hide a lost interval is left open.

    later: the stage of gaps after its forward.
    """
    may_hide_interval = bool(step.lost & (LOST_ENCODER | LOST_LOAD | LOST_BEFORE))
    save_lost = bool(step.lost & LOST_SAVE)
    forward = False
    before = "dispatch"
    if step.lost & LATE_STAGE:  # what the stages before it do is not told apart
        before = "pipeline"
        if step.sent > cursor.position:
            cursor.close_stage("dispatch", step.sent)
    gap = before
    for code, start, stop in flatten_intervals(step.pairs):
        if end and start >= end:
            break
        cursor.is_open = cursor.is_open or may_hide_interval
        cursor.close_stage(gap, start)
        cursor.is_open = cursor.is_open or (save_lost and code == CODE_ENCODER)
        cursor.is_open = cursor.is_open or (code == CODE_FORWARD and bool(step.lost & LOST_BEFORE))
        cursor.close_stage(_STAGE_BY_CODE[code], stop)
        forward = forward or code == CODE_FORWARD
        gap = later if forward else before
        may_hide_interval = not forward and (
            may_hide_interval or (save_lost and code == CODE_ENCODER)
        )
    if encode_only:
        cursor.is_open = cursor.is_open or may_hide_interval or not step.pairs
    elif not forward:
        cursor.is_open = True  # this step's forward was not recorded


def _add_remote_lengths(cursor: PartitionCursor, marks: Marks) -> None:
    """A worker on another host: use its lengths, not its clock; gaps become unattributed.

    Lengths that are longer than the time until the output are wrong: the worker's clock has stepped.
    """
    intervals = [pair for step in marks.steps for pair in flatten_intervals(step.pairs)]
    available = marks.output - cursor.position
    if not cursor.is_open and sum(stop - start for _, start, stop in intervals) <= available:
        for code, start, stop in intervals:
            cursor.close_stage(_STAGE_BY_CODE[code], cursor.position + stop - start)
    cursor.is_open = True


def _build_breakdown(
    marks: Marks, pieces: list[tuple[str, int, int]], totals: dict[str, int], end: int, clamped: int
) -> Breakdown:
    # It is the remainder, no stage that somebody can tune.
    lost = totals.pop(UNATTRIBUTED, 0)
    if len(pieces) > MAX_PIECES:
        pieces = merge_tail_pieces(pieces, MAX_PIECES)
    waits = [piece for piece in pieces if piece[0] in WAIT_STAGES]
    reasons, held = divide_waits(waits, marks.reasons), divide_held(waits, marks.held)
    return Breakdown(marks.arrive, end, pieces, totals, lost, clamped, reasons, held)


def runs_language_model(marks: Marks) -> bool:
    """Whether any step of the request ran the language model, not only the encoder."""
    return any(
        step.sampled or any(code == CODE_FORWARD for code, _, _ in step.pairs)
        for step in marks.steps
    )


def find_failed_stage(marks: Marks) -> str:
    """The stage in which a request ended without a first token; "" when a missing mark hides it."""
    if not marks.added:
        if not marks.render:
            return "receive"
        # Between handover and input: the mark may be missing because its hook is.
        return "" if marks.assign else "preprocess"
    if not marks.scheduled:
        # A wait that has a start and no end is the one that it ended in.
        if marks.moving:
            return "kv.transfer"
        return "ec.transfer" if marks.asking else "prefill.queue"
    if not marks.steps:
        return "dispatch"
    if marks.encode_only:
        return "encoder.compute" if not marks.entered else "output"
    return "output" if marks.steps[-1].sampled and not marks.partial else "prefill.compute"


# A breakdown that is longer than its leg by more cannot be placed; by less, it is cut to the leg.
MAX_EXCESS_US: Final = 1000
MAX_STAGE_LISTS: Final = 256  # servers name few combinations of stages, again and again
_STAGE_ORDER: Final = {name: place for place, name in enumerate(STAGE_NAMES)}


class LegTimes(Protocol):
    """Times of one call to a leg, microseconds of one clock; 0 if not reached.

    first_byte_us: the end of the leg on the way to the first token. is_lost: it failed, and another call
    followed at resumed_us.
    """

    @property
    def leg(self) -> str: ...
    @property
    def sent_us(self) -> int: ...
    @property
    def first_byte_us(self) -> int: ...
    @property
    def ended_us(self) -> int: ...
    @property
    def is_lost(self) -> bool: ...
    @property
    def resumed_us(self) -> int: ...


def place_leg(
    cursor: PartitionCursor,
    times: LegTimes,
    server_timing: ServerTiming | None,
    ended_us: int,
    is_last: bool,
) -> None:
    """Move `cursor` to the end of a call, over the routing before it, the hop and the leg's stages.

    server_timing: what the instance says, None for nothing. ended_us: when the partitioned time ends, 0
    where only the last call tells it (`is_last`), because the answer is not streamed.
    """
    cursor.close_stage("router.route", times.sent_us)
    # A cancelled call may have neither a first byte nor an end: the request's is its end.
    stop_us = max(times.first_byte_us or times.ended_us or ended_us, cursor.position)
    if times.is_lost:
        # With its back-off, as neither brought the first token nearer.
        cursor.close_stage("router.retry", max(stop_us, times.resumed_us))
    elif (
        server_timing is None
        or not times.first_byte_us
        or _exceeds_leg(server_timing, stop_us - times.sent_us)
    ):
        cursor.close_stage(UNATTRIBUTED, stop_us)
    else:
        rest_us = server_timing.rest or 0
        # Not streamed: `rest` is what the server did after its first token.
        if is_last and not ended_us:
            stop_us, rest_us = max(stop_us - rest_us, cursor.position), 0
        _place_leg_stages(cursor, times.leg, server_timing, stop_us, rest_us)


def _exceeds_leg(server_timing: ServerTiming, length_us: int) -> bool:
    """Whether a server accounts for so much more than its leg's `length_us` that it must be wrong."""
    accounted_us = server_timing.ttft + (server_timing.rest or 0)
    return accounted_us > length_us + MAX_EXCESS_US + length_us // 1000  # two clocks' rates differ


def _place_leg_stages(
    cursor: PartitionCursor, leg: str, server_timing: ServerTiming, stop_us: int, rest_us: int
) -> None:
    """Place the network hop, then the leg's stages in their order: only their lengths are known."""
    hop_us = stop_us - cursor.position - server_timing.ttft - rest_us
    # The server says more than there is room for; `clamped` tells by how much.
    if hop_us < 0:
        cursor.clamped -= hop_us
        hop_us = 0
    cursor.close_stage(f"router.hop.{leg}", cursor.position + hop_us)
    lengths = server_timing.stages
    for name, full_name in _order_stages(leg, tuple(lengths)):
        mark = cursor.position + lengths[name]
        cursor.close_stage(full_name, mark if mark < stop_us else stop_us)
    cursor.close_stage(UNATTRIBUTED, stop_us)


@functools.lru_cache(MAX_STAGE_LISTS)
def _order_stages(leg: str, names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The known ones of a leg's stages in their order, each with its full name.

    Stages of a newer release have no known place: they stay in what is unattributed.
    """
    known = sorted((name for name in names if name in _STAGE_ORDER), key=_STAGE_ORDER.__getitem__)
    return tuple((name, f"{leg}.{name}") for name in known)
