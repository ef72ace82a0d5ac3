# SPDX-License-Identifier: Apache-2.0
"""EngineTimeline: what the engine core measured of one request; hooks/ fill it, carrier.py serializes it for
the API server.
"""

from __future__ import annotations

from typing import Final

import msgspec

# Hosts of one data-parallel deployment may have different releases of this package.
TIMELINE_VERSION: Final = 11
# Steps kept per request. Of a prompt with more chunks the first ones and the last one stay, so that
# the time between them becomes unattributed.
MAX_STEPS: Final = 512


class EngineDetails(msgspec.Struct, array_like=True, gc=False):
    """What most requests do not have, apart: an array is written to its end, whatever is default.

    Times are as in EngineTimeline.
    """

    #: Its first step ran the encoder.
    encoder_first: bool = False
    #: It may have waited for a connector whose hook is missing.
    wait_lost: bool = False
    #: Steps were dropped (MAX_STEPS).
    truncated: bool = False
    #: A larger one than `holders` may be missing.
    holders_lost: bool = False
    preempted: int = 0
    #: Tokens computed again after preemptions.
    recomputed: int = 0
    #: Since when an encoder-cache connector has been answering "not yet".
    asked: int = 0
    #: Since when a KV connector has been looking for blocks, or transferring them.
    looking: int = 0
    moving: int = 0
    #: What this instance keeps of it for another instance (KEPT_*_BIT), ENCODER_RUN_BIT.
    kept: int = 0
    #: Tokens, blocks, bytes and microseconds of that transfer (0: unknown).
    blocks: list[int] = []
    #: Its media items and where their encodings came from (media_items.py); empty without any.
    media: list[int] = []
    #: Stage code, start, end, repeated.
    waits: list[int] = []
    #: Since when, and why (position in stages.WAIT_REASONS), repeated: in the queue and in stalls.
    reasons: list[int] = []
    #: Of each chunk after the first one: when the step of the chunk before had ended, and until when
    #: steps that left the request out were scheduled or ran (0: none had), repeated.
    turns: list[int] = []
    #: Since its latest chunk was scheduled a step has left it out, at this time; 0: none has.
    left_out: int = 0
    #: Whose work held the queue up longest: microseconds, tokens, kind (position in
    #: stages.HOLDING_KINDS), request ID, traceparent ("" without).
    holders: list[tuple[int, int, int, str, str]] = []
    #: Where its KV blocks came from (keys.KV_SOURCES), and MultiConnector's child that had them.
    source: str = ""
    connector: str = ""


_NO_DETAILS: Final = EngineDetails()


class EngineTimeline(msgspec.Struct, array_like=True, gc=False):
    """One engine request between the engine core's input and its first output.

    Times are microseconds of CLOCK_MONOTONIC; 0 is a time that was not (or is not yet) reached.
    """

    version: int = TIMELINE_VERSION
    #: clock.get_boot_number() of the engine core; set when it is serialized.
    boot: int = 0
    #: It reached the engine core.
    added: int = 0
    #: Its first chunk was scheduled.
    scheduled: int = 0
    #: The output of its latest step entered the scheduler.
    entered: int = 0
    #: Its whole prompt is scheduled.
    complete: bool = False
    #: It was serialized.
    sent: bool = False
    #: Prefill chunks, and cached tokens at the start.
    chunks: int = 0
    cached: int = 0
    #: Its tokens, and all tokens, in its steps.
    own_tokens: int = 0
    step_tokens: int = 0
    prompt: int = 0
    rank: int = -1
    #: Largest number of computed tokens so far; below it, tokens are recomputed.
    high: int = 0
    #: What ran while it waited, as held_waits.divide_held() takes it.
    held: list[int] = []
    #: Worker records (carrier.RECORD_*); one tuple is shared by all requests of a step.
    steps: list[tuple[int, ...]] = []
    #: The output of the step before its first one entered the scheduler, if after `scheduled`.
    previous: int = 0
    #: Media items, transfers, reasons to wait and more; None for a request without any.
    details: EngineDetails | None = None

    def read_details(self) -> EngineDetails:
        """The details, to be read; empty ones where it has none."""
        return self.details or _NO_DETAILS

    def open_details(self) -> EngineDetails:
        """The details, to be written to; created where it has none."""
        details = self.details
        if details is None:
            details = self.details = EngineDetails()
        return details

    def add_step(self, record: tuple[int, ...] | None, now: int = 0) -> None:
        """The output of one of its steps entered the scheduler at `now` (us, 0 unknown).

        record: the worker's; None makes the step's time unattributed.
        """
        if len(self.steps) >= MAX_STEPS:
            # Drop the step before: the latest one has the first token's sampling.
            self.steps.pop()
            self.open_details().truncated = True
        # Also without a record: a step that is left out would make a stall of its time.
        self.steps.append(record or ())
        if now:
            self.entered = now
            details = self.details
            if details is not None and details.turns and not details.turns[-2]:
                details.turns[-2] = now

    def begin_turn(self, now: int) -> None:
        """A later chunk was scheduled at `now` (us); its step's marks begin with what was between."""
        details = self.open_details()
        if len(details.turns) >= 2 * (MAX_STEPS - 1):
            del details.turns[-2:]  # as add_step() does
        # Under async scheduling the step before has not ended yet.
        ended = self.entered if len(self.steps) >= min(self.chunks, MAX_STEPS) else 0
        details.turns += (ended, now if details.left_out else 0)
        details.left_out = 0

    def note_other_step(self, now: int) -> None:
        """The output of a step without it entered the scheduler at `now` (us)."""
        if not self.steps:
            self.previous = now
        details = self.details
        if details is None:
            return
        if details.left_out:
            details.left_out = now
        elif details.turns and details.turns[-1]:
            # Under async scheduling its next chunk is scheduled already, and runs after that step.
            details.turns[-1] = now
