# SPDX-License-Identifier: Apache-2.0
"""EngineTimeline: what the engine core measured of one request; hooks/ fill it, carrier.py serializes it for
the API server.
"""

from __future__ import annotations

from typing import Final

import msgspec

# Hosts of one data-parallel deployment may have different releases of this package.
TIMELINE_VERSION: Final = 8
# Steps kept per request. Of a prompt with more chunks the first ones and the last one stay, so that
# the time between them becomes unattributed.
MAX_STEPS: Final = 512


class EngineDetails(msgspec.Struct, array_like=True, gc=False):
    """What most requests do not have, apart: an array is written to its end, whatever is default.

    Times are as in EngineTimeline.
    encoder_first: its first step ran the encoder. wait_lost: it may have waited for a connector
        whose hook is missing. truncated: steps were dropped (MAX_STEPS).
    preempted, recomputed: preemptions, tokens computed again.
    asked: since when an encoder-cache connector has been answering "not yet".
    looking, moving: since when a KV connector has been looking for blocks, or transferring them.
    blocks: tokens, blocks, bytes and microseconds of that transfer (0: unknown).
    kept: what this instance keeps of it for another instance (KEPT_*_BIT), ENCODER_RUN_BIT.
    media: its media items and where their encodings came from (media_items.py); empty without any.
    waits: stage code, start, end, repeated.
    reasons: since when, and why (position in stages.WAIT_REASONS), repeated: in the queue and in stalls.
    holders: whose work held the queue longest: microseconds, tokens, kind (position in
        stages.HOLDING_KINDS), request ID, traceparent ("" without).
    holders_lost: a larger one may be missing.
    """

    encoder_first: bool = False
    wait_lost: bool = False
    truncated: bool = False
    holders_lost: bool = False
    preempted: int = 0
    recomputed: int = 0
    asked: int = 0
    looking: int = 0
    moving: int = 0
    kept: int = 0
    blocks: list[int] = []
    media: list[int] = []
    waits: list[int] = []
    reasons: list[int] = []
    holders: list[tuple[int, int, int, str, str]] = []


_NO_DETAILS: Final = EngineDetails()


class EngineTimeline(msgspec.Struct, array_like=True, gc=False):
    """One engine request between the engine core's input and its first output.

    Times are microseconds of CLOCK_MONOTONIC; 0 is a time that was not (or is not yet) reached.
    boot: clock.get_boot_number() of the engine core; set when it is serialized.
    added: it reached the engine core. scheduled: its first chunk was scheduled. entered: the output
        of its latest step entered the scheduler.
    complete: its whole prompt is scheduled. sent: it was serialized.
    chunks, cached: prefill chunks, cached tokens at the start. own_tokens, step_tokens: its tokens, and
        all tokens, in its steps.
    high: largest number of computed tokens so far; below it, tokens are recomputed.
    held: what ran while it waited, as held_waits.divide_held() takes it.
    steps: worker records (boot, sampled, lost, code, start, end, code, ...); one tuple is shared by
        all requests of a step. A last entry of code CODE_CLOCK tells which clock placed the others.
    details: media items, transfers, reasons to wait and more; None for a request without any.
    """

    version: int = TIMELINE_VERSION
    boot: int = 0
    added: int = 0
    scheduled: int = 0
    entered: int = 0
    complete: bool = False
    sent: bool = False
    chunks: int = 0
    cached: int = 0
    own_tokens: int = 0
    step_tokens: int = 0
    prompt: int = 0
    rank: int = -1
    high: int = 0
    held: list[int] = []
    steps: list[tuple[int, ...]] = []
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

    def add_step(self, record: tuple[int, ...] | None) -> None:
        """Add the worker's record of one step; None makes the step's time unattributed."""
        if len(self.steps) >= MAX_STEPS:
            # Drop the step before: the latest one has the first token's sampling.
            self.steps.pop()
            self.open_details().truncated = True
        # Also without a record: a step that is left out would make a stall of its time.
        self.steps.append(record or ())
