# SPDX-License-Identifier: Apache-2.0
"""A request's way through the engine as one string: the engine core folds, the API server unfolds.

It rides in vLLM's own trace_headers of the first output. A Journey is the string: a JSON
array of integers, flags and such arrays, which msgspec writes in 0.5 us (json takes 25-44 us).
"""

from __future__ import annotations

from typing import Final

import msgspec

from ttft_otel import clock
from ttft_otel.breakdown import LOST_FORWARD, Marks, Step
from ttft_otel.stages import BY_CODE

VERSION: Final = 2
STEPS: Final = (
    512  # of a prompt with more chunks the first and the last stay; between: unattributed
)


class Journey(msgspec.Struct, array_like=True, gc=False):
    """One engine request between the engine core's input and its first output; times in microseconds.

    asked: since when a connector has been saying "not yet". high: how many tokens were computed at
    most, to tell recomputed ones. waits: (stage code, start, end) one after another. steps: worker
    records (boot, sampled, lost, code, start, end, code, ...), shared by all requests of a step.
    """

    version: int = VERSION
    added: int = 0
    scheduled: int = 0
    entered: int = 0
    encoder_first: bool = False
    wait_lost: bool = False
    truncated: bool = False
    complete: bool = False
    sent: bool = False
    chunks: int = 0
    cached: int = 0
    preempted: int = 0
    recomputed: int = 0
    own_items: int = 0
    step_items: int = 0
    own_tokens: int = 0
    step_tokens: int = 0
    items: int = 0
    prompt: int = 0
    rank: int = -1
    asked: int = 0
    high: int = 0
    waits: list[int] = []
    steps: list[tuple[int, ...]] = []

    def step(self, record: tuple[int, ...] | None) -> None:
        """Add one step's worker record; without one, nobody knows what happened in it."""
        if len(self.steps) >= STEPS:
            self.steps.pop()
            self.truncated = True
        self.steps.append(record or ())


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Journey)


def fold(journey: Journey) -> str:
    """Journey -> string; it counts as sent from now on."""
    journey.sent = True
    return _encoder.encode(journey).decode()


def unfold(text: str, marks: Marks) -> Journey | None:
    """Put the string's times into `marks` and give the Journey back; None when it is not ours."""
    try:
        journey = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    if journey.version != VERSION:
        return None
    waits = journey.waits
    for code, start, end in zip(waits[::3], waits[1::3], waits[2::3], strict=False):
        if code in BY_CODE:
            marks.waits.append((BY_CODE[code].name, start, end))
    here = clock.boot_once()
    for record in journey.steps:
        marks.foreign = marks.foreign or bool(record and record[0] != here)
        marks.steps.append(_step(record))
    marks.added = journey.added
    marks.scheduled = journey.scheduled
    marks.encoder_first = journey.encoder_first
    marks.entered = journey.entered
    marks.queue_lost = journey.wait_lost
    marks.truncated = journey.truncated
    return journey


def _step(record: tuple[int, ...]) -> Step:
    if len(record) < 3:
        return Step([], 0, LOST_FORWARD)
    pairs = list(zip(record[3::3], record[4::3], record[5::3], strict=False))
    return Step(pairs, record[1], record[2])
