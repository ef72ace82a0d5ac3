# SPDX-License-Identifier: Apache-2.0
"""Describe what a scheduled step computes: prompt tokens, decode tokens, embeddings, the largest requests.

held_steps.py calls describe_step() with the scheduler's output for each step while a traced request waits.
Its cost does not depend on the number of requests in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from ttft_otel.model.held_waits import SEGMENT_SIZE
from ttft_otel.model.stages import HOLDING_KIND_NAMES

PREFILL, DECODE, ENCODER, OWN, IDLE, OTHER_RANK = range(len(HOLDING_KIND_NAMES))
MAX_LOOKED_AT: Final = 32  # requests of a step that are looked at to find prompts
MAX_NAMED: Final = 8  # requests of each kind that are named
SCALE: Final = 10  # bits of a microsecond's fraction in `held`: shares of many short steps add up


class StepWork(msgspec.Struct, eq=False, gc=False):
    """The work of one step; its weights are tokens."""

    #: The scheduler's output, which identifies the step.
    output: Any
    #: Time (us), 0 if it was not seen.
    scheduled: int
    #: Decode tokens: a request with one token counts as decoding, unless more is known.
    decode: int
    #: Sum of all tokens and embeddings, 0 without work.
    total: int
    #: Number of decoding requests.
    decoders: int
    #: Prompt tokens.
    prefill: int = 0
    #: Embeddings.
    encoder: int = 0
    #: (tokens, request ID) of the largest prompts, and of media items.
    chunks: Sequence[tuple[int, str]] = ()
    items: Sequence[tuple[int, str]] = ()
    #: The same with their Holder (holders.py).
    parts: Sequence[tuple[Any, int]] = ()
    #: Keys of those that end with the step.
    completed: Sequence[tuple[str, int]] = ()
    #: Nobody but those who decoded before has a part in it, and it follows the step before.
    is_plain: bool = False
    #: There were more prompts or items than are named.
    unnamed: bool = False
    #: The scheduler was paused before it.
    resumed: bool = False
    #: Another data-parallel rank needed it; this one has nothing to compute.
    is_dummy: bool = False
    #: Microseconds from its end to the next step's begin, once known.
    turnaround: int = 0
    #: The sums of the log at that begin (step_log.py).
    sums: tuple[int, int, int, int] = (0, 0, 0, 0)


def describe_step(scheduler: Any, output: Any, scheduled: int) -> StepWork:
    """The work of the step `output`, which was scheduled at `scheduled` (us), 0 if that is not known."""
    total: int = output.total_num_scheduled_tokens
    work = StepWork(output, scheduled, total, total, len(output.num_scheduled_tokens))
    if total > work.decoders:  # else nobody has more than one token
        _find_prompts(work)
    if output.scheduled_encoder_inputs:
        _find_items(work, scheduler.requests)
    return work


def _find_prompts(work: StepWork) -> None:
    """Requests with more than one token, from the end: the scheduler puts those that decode first."""
    tokens = work.output.num_scheduled_tokens
    drafts = getattr(work.output, "scheduled_spec_decode_tokens", None) or ()
    surplus = work.decode - work.decoders  # tokens beyond one for each request
    found = []
    for request_id in islice(reversed(tokens), MAX_LOOKED_AT):
        count = tokens[request_id]
        if count > 1:
            surplus -= count - 1
            if request_id not in drafts:
                found.append((count, request_id))
                work.prefill += count
            if not surplus:
                break
    # With drafts those that were not looked at decode; without, they could be prompts.
    if surplus and not drafts:
        work.unnamed = True
        work.prefill += surplus
    work.decode -= work.prefill
    work.decoders -= len(found)
    work.chunks = _name_largest(work, found)


def _find_items(work: StepWork, requests: Any) -> None:
    """The embeddings of each request's media items that the step encodes."""
    found = []
    for request_id, indices in work.output.scheduled_encoder_inputs.items():
        request = requests.get(request_id)
        features = getattr(request, "mm_features", None)
        if features:
            embeddings = sum([features[index].mm_position.length for index in indices])
            found.append((embeddings, request_id))
            work.encoder += embeddings
            work.total += embeddings
    work.items = _name_largest(work, found)


def _name_largest(work: StepWork, found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    if len(found) > MAX_NAMED:
        found.sort(reverse=True)
        work.unnamed = True
        del found[MAX_NAMED:]
    return found


def take_out_own(segments: list[int], request_id: str, work: StepWork | None) -> None:
    """Take the request's own work out of the last segment, which is of the step `work`."""
    if work is None or not work.total or len(segments) < SEGMENT_SIZE:
        return
    length = segments[-SEGMENT_SIZE]
    tokens = work.output.num_scheduled_tokens.get(request_id, 0)
    embeddings = sum([count for count, each in work.items if each == request_id])
    # A request with one token counts as one that decodes (step_work.py).
    for kind, weight in ((PREFILL if tokens > 1 else DECODE, tokens), (ENCODER, embeddings)):
        place = kind + 1 - SEGMENT_SIZE
        own = min(length * weight // work.total, segments[place])
        segments[place] -= own
        segments[OWN + 1 - SEGMENT_SIZE] += own


def share_decode(work: StepWork, length: int, total: int) -> int:
    """What each request that decodes has of `length` microseconds of the step (<< SCALE)."""
    return (length << SCALE) * work.decode // (total * work.decoders) if work.decode else 0


def share_parts(work: StepWork, length: int) -> dict[Any, tuple[int, int]]:
    """What each part has of `length` microseconds of the step (<< SCALE), and its tokens."""
    if not length:
        return {}
    total = work.total
    return {holder: ((length << SCALE) * tokens // total, tokens) for holder, tokens in work.parts}
