# SPDX-License-Identifier: Apache-2.0
"""Partition a request's time to first token into stages that add up to it exactly. Pure.

recorder.py passes the Marks it collected and puts the Breakdown into the Record. A cursor walks the
marks in the order of stages.STAGES. A missing mark leaves its interval open, and the next mark closes
both as `unattributed`: a missing hook never makes a neighbouring stage longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from ttft_otel.held_waits import HeldPiece, divide_held
from ttft_otel.stages import UNATTRIBUTED
from ttft_otel.wait_reasons import ReasonSlice, divide_waits

CODE_ENCODER: Final = 9  # codes of the worker's intervals, keys of stages.STAGES_BY_CODE
CODE_FORWARD: Final = 10
CODE_EC_TRANSFER: Final = 8
CODE_KV_TRANSFER: Final = 6

# Bits: a hook is missing, so that such an interval may not have been recorded.
LOST_ENCODER: Final = 1  # the step ran the encoder, but has no interval for it
LOST_FORWARD: Final = 2
LOST_LOAD: Final = 4
LOST_SAVE: Final = 8
LOST_BEFORE: Final = 16  # KV blocks may have been loaded before the forward
LOST_AFTER: Final = 32  # KV blocks may have been loaded or saved after it (on V2: after sampling)
LOST_EARLIER: Final = 128  # earlier pipeline stages worked before it (64: carrier's)

_STAGE_BY_CODE: Final = {
    CODE_ENCODER: "encoder.compute",
    CODE_FORWARD: "prefill.compute",
    CODE_EC_TRANSFER: "ec.transfer",
    CODE_KV_TRANSFER: "kv.transfer",
}
MAX_PIECES: Final = 96  # pieces (spans) kept one by one; later ones are merged per stage


@dataclass(slots=True)
class EngineStep:
    """One engine step of a request; times in microseconds, `sampled` 0 if unseen, `lost` LOST_* bits.

    pairs: the worker's intervals (code, start, end).
    """

    pairs: list[tuple[int, int, int]]
    sampled: int = 0
    lost: int = 0


@dataclass(slots=True)
class Marks:
    """The marks of one request: CLOCK_MONOTONIC in microseconds, 0 for a mark that is missing.

    waits: (stage, start, end) intervals inside the queue that belong to connectors.
    reasons, held: why the scheduler left it out (since when, code), and what ran (held_waits.py).
    foreign: the worker's clock is not the engine core's, or it gives lengths only: the places of its
        intervals are not usable.
    clock_offset, clock_error: what was subtracted from the engine core's times because its clock is
        another one, and by how much that may be wrong; see clock_offsets.py.
    egress: 0 when the TTFT ends with `output`. encode_only: the language model does not run.
    truncated: steps were dropped. queue_lost: a wait whose hook is missing may hide in the queue.
    """

    arrive: int
    render: int = 0
    assign: int = 0
    added: int = 0
    scheduled: int = 0
    moving: int = 0  # since then KV blocks have been in transfer; 0 once they have arrived
    asking: int = 0  # since then an encoder-cache connector has been answering "not yet"
    encoder_first: bool = False
    waits: list[tuple[str, int, int]] = field(default_factory=list)
    reasons: list[tuple[int, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    steps: list[EngineStep] = field(default_factory=list)
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


class Breakdown(msgspec.Struct):
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


def partition_marks(marks: Marks, end: int = 0, failed_stage: str = "") -> Breakdown:
    """Partition [marks.arrive, last mark] into stages.

    end: of a request without a first token; time up to it is `failed_stage`'s, "" unattributed.
    """
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
    return _build_breakdown(cursor, marks)


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
        first = "prefill.stall" if number else "dispatch"
        end, later = 0, "prefill.stall"
        # Only the last chunk's step gives the first token.
        if number == last and not marks.partial:
            end, later = step.sampled, "sample" if step.sampled else UNATTRIBUTED
        _close_step(cursor, step, (first, later), end, marks.encode_only)
        cursor.is_open = cursor.is_open or bool(step.lost & LOST_AFTER)
    cursor.is_open = cursor.is_open or not marks.steps
    if marks.steps and not marks.encode_only and not marks.partial:
        _close_sampling(cursor, marks.steps[last])


def _close_sampling(cursor: PartitionCursor, step: EngineStep) -> None:
    """The `sample` stage, and KV transfers between sampling and the output."""
    cursor.close_stage("sample", step.sampled)
    for code, start, stop in _flatten_intervals(step.pairs):
        if step.sampled and start >= step.sampled:
            cursor.close_stage("output", start)
            cursor.close_stage(_STAGE_BY_CODE[code], stop)
    cursor.is_open = cursor.is_open or bool(step.lost & LOST_AFTER)


def _close_step(
    cursor: PartitionCursor, step: EngineStep, gaps: tuple[str, str], end: int, encode_only: bool
) -> None:
    """One step's intervals up to `end` (0: all); a gap that may hide a lost interval is left open."""
    may_hide_interval = bool(step.lost & (LOST_ENCODER | LOST_LOAD | LOST_BEFORE | LOST_EARLIER))
    save_lost = bool(step.lost & LOST_SAVE)
    forward = False
    gap, later = gaps  # stage before the step's first interval, and stage of gaps after its forward
    for code, start, stop in _flatten_intervals(step.pairs):
        if end and start >= end:
            break
        cursor.is_open = cursor.is_open or may_hide_interval
        cursor.close_stage(gap, start)
        cursor.is_open = cursor.is_open or (save_lost and code == CODE_ENCODER)
        cursor.is_open = cursor.is_open or (code == CODE_FORWARD and bool(step.lost & LOST_BEFORE))
        cursor.close_stage(_STAGE_BY_CODE[code], stop)
        forward = forward or code == CODE_FORWARD
        gap = later if forward else "dispatch"
        may_hide_interval = not forward and (
            may_hide_interval or (save_lost and code == CODE_ENCODER)
        )
    if encode_only:
        cursor.is_open = cursor.is_open or may_hide_interval or not step.pairs
    elif not forward:
        cursor.is_open = True  # this step's forward was not recorded


def _flatten_intervals(pairs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Make nested intervals disjoint; the inner one wins (V1's runner saves inside the encoder call)."""
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


def _add_remote_lengths(cursor: PartitionCursor, marks: Marks) -> None:
    """A worker on another host: use its lengths, not its clock; gaps become unattributed.

    Lengths that are longer than the time until the output are wrong: the worker's clock has stepped.
    """
    intervals = [pair for step in marks.steps for pair in _flatten_intervals(step.pairs)]
    available = marks.output - cursor.position
    if not cursor.is_open and sum(stop - start for _, start, stop in intervals) <= available:
        for code, start, stop in intervals:
            cursor.close_stage(_STAGE_BY_CODE[code], cursor.position + stop - start)
    cursor.is_open = True


def _build_breakdown(cursor: PartitionCursor, marks: Marks) -> Breakdown:
    totals: dict[str, int] = {}
    for label, low, high in cursor.pieces:
        totals[label] = totals.get(label, 0) + high - low
    lost = totals.pop(UNATTRIBUTED, 0)  # the remainder, no stage that somebody can tune
    many = len(cursor.pieces) > MAX_PIECES
    pieces = _merge_tail_pieces(cursor.pieces) if many else cursor.pieces
    waits = divide_waits(pieces, marks.reasons), divide_held(pieces, marks.held)
    return Breakdown(marks.arrive, cursor.position, pieces, totals, lost, cursor.clamped, *waits)


def _merge_tail_pieces(pieces: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Bound the number of spans: pieces after MAX_PIECES are merged to one per stage, end to end."""
    merged, tail = pieces[:MAX_PIECES], pieces[MAX_PIECES:]
    lengths: dict[str, int] = {}
    for label, low, high in tail:
        lengths[label] = lengths.get(label, 0) + high - low
    position = tail[0][1]
    for label, length in lengths.items():
        merged.append((label, position, position + length))
        position += length
    return merged
