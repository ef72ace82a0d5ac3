# SPDX-License-Identifier: Apache-2.0
"""A request's way through the engine as one string: the engine core folds, the API server unfolds.

It rides in vLLM's own trace_headers of the first output. A Journey is the string: a JSON
array of integers, flags and such arrays, which msgspec writes in 0.5 us (json takes 25-44 us).
"""

from __future__ import annotations

from typing import Final

import msgspec

from ttft_otel import clock, names
from ttft_otel.breakdown import LOST_FORWARD, Marks, Step
from ttft_otel.stages import BY_CODE

VERSION: Final = 3
# Questions to the engine core, as utility calls of vLLM: where an aborted request was, and how long
# blocks were kept.
DIED: Final = "ttft_otel_died"
SENT: Final = "ttft_otel_sent"
KV: Final = (names.KV_TOKENS, names.KV_BLOCKS, names.KV_BYTES, names.KV_MOVE)  # Journey.blocks
STEPS: Final = (
    512  # of a prompt with more chunks the first and the last stay; between: unattributed
)


class Journey(msgspec.Struct, array_like=True, gc=False):
    """One engine request between the engine core's input and its first output; times in microseconds.

    asked: since when a connector has been saying "not yet". looking, moving: since when a KV connector
    has been looking for blocks, and they have been on their way; blocks: tokens, blocks, bytes and
    microseconds of what came (0: nobody tells). kept: its own are kept for another instance. high: how
    many tokens were computed at most, to tell recomputed ones. waits: (stage code, start, end) one
    after another. steps: worker records (boot, sampled, lost, code, start, end, code, ...), shared by
    all requests of a step.
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
    looking: int = 0
    moving: int = 0
    high: int = 0
    kept: bool = False
    blocks: list[int] = []
    waits: list[int] = []
    steps: list[tuple[int, ...]] = []

    def step(self, record: tuple[int, ...] | None) -> None:
        """Add one step's worker record; without one, nobody knows what happened in it."""
        if len(self.steps) >= STEPS:
            self.steps.pop()
            self.truncated = True
        self.steps.append(record or ())


class Kept(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Blocks that were kept for another instance: from the answer until they were free, microseconds.

    over: nobody came for them in time.
    """

    since: int
    until: int
    tokens: int
    blocks: int
    over: bool

    def fold(self) -> str:
        """As a string, for the utility channel."""
        return _encoder.encode(self).decode()


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Journey)
_kept: Final = msgspec.json.Decoder(Kept)


def fold(journey: Journey) -> str:
    """Journey -> string; it counts as sent from now on."""
    journey.sent = True
    return _encoder.encode(journey).decode()


def kept(text: str) -> Kept | None:
    """The Kept of a string; None when it is empty or not ours."""
    try:
        return _kept.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


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
    marks.moving = journey.looking or journey.moving
    marks.truncated = journey.truncated
    return journey


def counts(journey: Journey) -> dict[str, int | bool]:
    """What a Journey says besides times, as span attributes."""
    found: dict[str, int | bool] = {}
    found[names.INPUT_TOKENS] = journey.prompt
    found[names.CACHED_TOKENS] = journey.cached
    found[names.CHUNKS] = journey.chunks
    found[names.OWN_TOKENS] = journey.own_tokens
    found[names.STEP_TOKENS] = journey.step_tokens
    found[names.PREEMPTIONS] = journey.preempted
    found[names.RECOMPUTED_TOKENS] = journey.recomputed
    if journey.items:
        found[names.OWN_ITEMS] = journey.own_items
        found[names.STEP_ITEMS] = journey.step_items
        found[names.CACHED_ITEMS] = max(0, journey.items - journey.own_items)
    if journey.blocks:
        told = zip(KV, journey.blocks, strict=False)
        found |= {name: value for name, value in told if value}
    if journey.truncated:
        found[names.TRUNCATED] = True
    return found


def _step(record: tuple[int, ...]) -> Step:
    if len(record) < 3:
        return Step([], 0, LOST_FORWARD)
    pairs = list(zip(record[3::3], record[4::3], record[5::3], strict=False))
    return Step(pairs, record[1], record[2])
