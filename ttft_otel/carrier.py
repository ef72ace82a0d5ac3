# SPDX-License-Identifier: Apache-2.0
"""A request's way through the engine as one string of integers: the engine core folds, the API unfolds.

It rides in vLLM's own trace_headers of the first output. Commas and decimal integers, because JSON
costs 25-44 us here and a join 1.4 us. Layout: VERSION, the SCALARS, then waits, then steps.
"""

from __future__ import annotations

from typing import Any, Final

from ttft_otel import clock
from ttft_otel.breakdown import LOST_FORWARD, Marks, Step
from ttft_otel.stages import BY_CODE

VERSION: Final = 1
STEPS: Final = (
    512  # prompts of more chunks keep the first and the last; what is between is unattributed
)
SCALARS: Final = (
    "added",
    "scheduled",
    "encoder_first",
    "entered",
    "wait_lost",
    "truncated",
    "chunks",
    "cached",
    "preempted",
    "recomputed",
    "own_items",
    "step_items",
    "own_tokens",
    "step_tokens",
    "items",
    "prompt",
    "rank",
)


class Journey:
    """One engine request between the engine core's input and its first output; times in microseconds."""

    __slots__ = (*SCALARS, "asked", "complete", "high", "sent", "steps", "waits")

    def __init__(self, added: int) -> None:
        self.added = added
        self.scheduled = self.entered = 0
        self.encoder_first = self.wait_lost = self.truncated = False
        self.chunks = self.cached = self.preempted = self.recomputed = 0
        self.own_items = self.step_items = self.own_tokens = self.step_tokens = 0
        self.items = self.prompt = self.rank = 0
        self.asked = 0  # since when a connector has been saying "not yet"
        self.complete = False
        self.high = 0
        self.sent = False
        self.steps: list[Any] = []
        self.waits: list[int] = []

    def step(self, record: list[int] | None) -> None:
        """Add one step's worker record (shared by all requests of the step, never changed)."""
        if len(self.steps) >= STEPS:
            self.steps.pop()
            self.truncated = True
        self.steps.append(record or ())


def fold(journey: Journey) -> str:
    """Journey -> string."""
    journey.sent = True
    out = [VERSION, *(int(getattr(journey, name)) for name in SCALARS)]
    out.append(len(journey.waits))
    out.extend(journey.waits)
    out.append(len(journey.steps))
    for record in journey.steps:
        out.append(len(record))
        out.extend(record)
    return ",".join(map(str, out))


def unfold(text: str, marks: Marks) -> dict[str, int] | None:
    """Put the string's times into `marks` and give back its counts; None when it is not ours.

    A worker record is (boot, sampled, lost, code, start, end, code, start, end, ...).
    """
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        return None
    if len(numbers) < len(SCALARS) + 3 or numbers[0] != VERSION:
        return None
    counts = dict(zip(SCALARS, numbers[1:], strict=False))
    at = 1 + len(SCALARS)
    waits, at = _take(numbers, at)
    for place in range(0, len(waits) - 2, 3):
        code, start, end = waits[place : place + 3]
        if code in BY_CODE:
            marks.waits.append((BY_CODE[code].name, start, end))
    steps = numbers[at] if at < len(numbers) else 0
    at += 1
    here = clock.boot_once()
    for _ in range(steps):
        record, at = _take(numbers, at)
        marks.foreign = marks.foreign or bool(record and record[0] != here)
        marks.steps.append(_step(record))
    marks.added = counts["added"]
    marks.scheduled = counts["scheduled"]
    marks.encoder_first = bool(counts["encoder_first"])
    marks.entered = counts["entered"]
    marks.queue_lost = bool(counts["wait_lost"])
    marks.truncated = bool(counts["truncated"])
    return counts


def _take(numbers: list[int], at: int) -> tuple[list[int], int]:
    length = numbers[at] if at < len(numbers) else 0
    return numbers[at + 1 : at + 1 + length], at + 1 + length


def _step(record: list[int]) -> Step:
    if len(record) < 3:
        return Step([], 0, LOST_FORWARD)
    pairs = list(zip(record[3::3], record[4::3], record[5::3], strict=False))
    return Step(pairs, record[1], record[2])
