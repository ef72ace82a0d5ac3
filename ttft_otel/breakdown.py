# SPDX-License-Identifier: Apache-2.0
"""Marks -> stages: cut one request's way to its first token into pieces that add up, exactly.

recorder.py gives the Marks it collected, and gets the Breakdown it puts into the Record. Pure.
A cursor walks the marks in the vocabulary's order. A mark that is missing leaves its interval open;
the next one closes both as `unattributed`, so a lost hook never fattens a neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ttft_otel.stages import UNATTRIBUTED

ENCODER: Final = 9  # carrier codes of the worker's pairs: stages.BY_CODE
FORWARD: Final = 10
CACHE: Final = 8
BLOCKS: Final = 6

LOST_ENCODER: Final = 1  # the step encoded, but no pair says when
LOST_FORWARD: Final = 2
LOST_LOAD: Final = 4
LOST_SAVE: Final = 8
LOST_BEFORE: Final = 16  # KV blocks may have been loaded before the forward (on V2: inside it)
LOST_AFTER: Final = 32  # ... or loaded or saved after it (on V2: after sampling)

_LABEL: Final = {
    ENCODER: "encoder.compute",
    FORWARD: "prefill.compute",
    CACHE: "ec.transfer",
    BLOCKS: "kv.transfer",
}
MOST: Final = 96  # pieces kept one by one; what follows is merged per stage


@dataclass(slots=True)
class Step:
    """One engine step that held the request: the worker's pairs (code, start, end) in microseconds."""

    pairs: list[tuple[int, int, int]]
    sampled: int = 0
    lost: int = 0


@dataclass(slots=True)
class Marks:
    """Absolute CLOCK_MONOTONIC microseconds; 0 is a mark that never came.

    `waits` are (stage, start, end) cut out of the queue. `foreign`: the worker ran on another host,
    only its lengths count. `egress` 0 and `streamed` False: the TTFT ends with `output`.
    """

    arrive: int
    render: int = 0
    assign: int = 0
    added: int = 0
    scheduled: int = 0
    moving: int = 0  # KV blocks are on their way since then, still
    encoder_first: bool = False
    waits: list[tuple[str, int, int]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    entered: int = 0
    received: int = 0
    output: int = 0
    egress: int = 0
    encode_only: bool = False
    foreign: bool = False
    truncated: bool = False
    queue_lost: bool = False
    partial: bool = False  # it died before its last chunk: no step of it sampled its first token


@dataclass(slots=True)
class Breakdown:
    """Pieces in time order, contiguous from start to end, and their totals per stage."""

    start: int
    end: int
    pieces: list[tuple[str, int, int]]
    stages: dict[str, int]
    unattributed: int
    clamped: int


class Cursor:
    """Walks from mark to mark; whatever lies behind it is already attributed."""

    __slots__ = ("at", "clamped", "open", "pieces")

    def __init__(self, start: int) -> None:
        self.at = start
        self.open = False
        self.clamped = 0
        self.pieces: list[tuple[str, int, int]] = []

    def to(self, stage: str, mark: int) -> None:
        """Close a stage at its mark; 0 leaves it open for the next mark to close as unattributed."""
        if not mark:
            self.open = True
            return
        if mark < self.at:
            self.clamped += self.at - mark
            mark = self.at
        self._add(UNATTRIBUTED if self.open else stage, mark)
        self.open = False

    def _add(self, label: str, end: int) -> None:
        if end > self.at:
            last = self.pieces[-1] if self.pieces else None
            if last and last[0] == label:
                self.pieces[-1] = (label, last[1], end)
            else:
                self.pieces.append((label, self.at, end))
        self.at = end


def partition(marks: Marks, end: int = 0, died: str = "") -> Breakdown:
    """Cut [marks.arrive, last mark] into stages.

    `end` cuts a request short that died then, in the stage `died` ("" when nobody can tell).
    """
    cursor = Cursor(marks.arrive)
    cursor.to("receive", marks.render)
    cursor.to("preprocess", marks.assign)
    cursor.to("ipc", marks.added)
    _queue(cursor, marks)
    if marks.foreign:
        _lengths(cursor, marks)
    else:
        _worker(cursor, marks)
    cursor.to("output", marks.output)
    if marks.egress:
        cursor.to("egress", marks.egress)
    if end:
        cursor.open = False
        cursor.to(died or UNATTRIBUTED, max(end, cursor.at))
    return _sum(cursor, marks.arrive)


def _queue(cursor: Cursor, marks: Marks) -> None:
    """Close the queue, with the connectors' waits cut out of it."""
    name = "encoder.queue" if marks.encoder_first else "prefill.queue"
    if marks.scheduled:
        for stage, start, stop in sorted(marks.waits, key=lambda wait: wait[1]):
            low, high = max(start, cursor.at), min(stop, marks.scheduled)
            if high > low:
                cursor.open = cursor.open or marks.queue_lost
                cursor.to(name, low)
                cursor.to(stage, high)
    elif marks.moving:
        cursor.to(name, marks.moving)
    cursor.open = cursor.open or marks.queue_lost
    cursor.to(name, marks.scheduled)


def _worker(cursor: Cursor, marks: Marks) -> None:
    """From the first worker mark to the last forward's end: by intervals, gaps named by their place."""
    last = len(marks.steps) - 1
    for number, step in enumerate(marks.steps):
        if number == last and marks.truncated:
            cursor.open = True  # steps were dropped before this one
        first = "prefill.stall" if number else "dispatch"
        end, later = 0, "prefill.stall"
        if number == last and not marks.partial:
            end, later = step.sampled, "sample" if step.sampled else UNATTRIBUTED
        _step(cursor, step, (first, later), end, marks.encode_only)
        cursor.open = cursor.open or bool(step.lost & LOST_AFTER)
    if not marks.steps:
        cursor.open = True
    elif not marks.encode_only and not marks.partial:
        _after(cursor, marks.steps[last])


def _after(cursor: Cursor, step: Step) -> None:
    """Sampling, and what a KV connector does between that and the output."""
    cursor.to("sample", step.sampled)
    for code, start, stop in _flat(step.pairs):
        if step.sampled and start >= step.sampled:
            cursor.to("output", start)
            cursor.to(_LABEL[code], stop)
    cursor.open = cursor.open or bool(step.lost & LOST_AFTER)


def _step(cursor: Cursor, step: Step, gaps: tuple[str, str], end: int, encode_only: bool) -> None:
    """One step's pairs up to `end`; a gap in which a lost pair may lie is left open.

    gaps: what lies before its first pair, and between those after its forward.
    """
    blind = bool(step.lost & (LOST_ENCODER | LOST_LOAD | LOST_BEFORE))
    save = bool(step.lost & LOST_SAVE)
    forward = False
    gap, later = gaps
    for code, start, stop in _flat(step.pairs):
        if end and start >= end:
            break
        cursor.open = cursor.open or blind
        cursor.to(gap, start)
        cursor.open = cursor.open or (save and code == ENCODER)
        cursor.open = cursor.open or (code == FORWARD and bool(step.lost & LOST_BEFORE))
        cursor.to(_LABEL[code], stop)
        forward = forward or code == FORWARD
        gap = later if forward else "dispatch"
        blind = not forward and (blind or (save and code == ENCODER))
    if encode_only:
        cursor.open = cursor.open or blind or not step.pairs
    elif not forward:
        cursor.open = True  # this step's forward went by unseen


def _flat(pairs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Make nested pairs disjoint, the inner one wins (vLLM's V1 runner saves inside the encoder)."""
    flat: list[tuple[int, int, int]] = []
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


def _lengths(cursor: Cursor, marks: Marks) -> None:
    """Another host's worker: its lengths count, their place does not; gaps are unattributed."""
    base = cursor.at
    limit = marks.output or base
    for step in marks.steps:
        for code, start, stop in _flat(step.pairs):
            if not cursor.open:
                base = min(base + stop - start, limit)
                cursor.to(_LABEL[code], base)
    cursor.open = True


def _sum(cursor: Cursor, start: int) -> Breakdown:
    totals: dict[str, int] = {}
    for label, low, high in cursor.pieces:
        totals[label] = totals.get(label, 0) + high - low
    lost = totals.pop(UNATTRIBUTED, 0)
    return Breakdown(start, cursor.at, _merge(cursor.pieces), totals, lost, cursor.clamped)


def _merge(pieces: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Bound the number of spans: pieces past MOST are laid end to end, one per stage."""
    if len(pieces) <= MOST:
        return pieces
    kept, tail = pieces[:MOST], pieces[MOST:]
    lengths: dict[str, int] = {}
    for label, low, high in tail:
        lengths[label] = lengths.get(label, 0) + high - low
    at = tail[0][1]
    for label, length in lengths.items():
        kept.append((label, at, at + length))
        at += length
    return kept


def where(marks: Marks) -> str:
    """The stage in which a request without a first token was; "" when a lost mark hides it."""
    if not marks.render:
        return "receive"
    if not marks.assign:
        return "preprocess"
    if not marks.added:
        return ""
    if not marks.scheduled:
        return "kv.transfer" if marks.moving else "prefill.queue"
    if not marks.steps:
        return "dispatch"
    if marks.encode_only:
        return "encoder.compute" if not marks.entered else "output"
    return "output" if marks.steps[-1].sampled and not marks.partial else "prefill.compute"
