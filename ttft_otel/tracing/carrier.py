# SPDX-License-Identifier: Apache-2.0
"""Serialize what the engine core measured of a request, for the API server.

The engine core writes an EngineTimeline as one string into vLLM's own trace_headers of the request's
first output; the API server reads it back. The string is a JSON array of integers, flags and arrays
of them, which msgspec writes in 0.5 us (the standard library's json takes 25-44 us).
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from ttft_otel.model.breakdown import LOST_FORWARD, EngineStep, Marks
from ttft_otel.model.names import keys
from ttft_otel.model.record import Attributes
from ttft_otel.model.stages import STAGES_BY_CODE
from ttft_otel.model.timing import ClockNote
from ttft_otel.tracing import clock, media_items
from ttft_otel.tracing.engine_timeline import TIMELINE_VERSION, EngineTimeline

# Positions in a worker's record: the boot number of its host, the end of sampling, flags (LOST_* and
# ENCODER_UNFINISHED), and from there on code, start and end of each interval.
RECORD_BOOT: Final = 0
RECORD_SAMPLED: Final = 1
RECORD_FLAGS: Final = 2
RECORD_INTERVALS: Final = 3
# Not a stage: the last entry of a worker's record, (CODE_CLOCK, clock.CLOCK_*, error in microseconds),
# says which clock placed its intervals. Without it they are the host's times.
CODE_CLOCK: Final = 0
# No stage either: (CODE_TAKEN, when the worker took the step, when it had queued the first interval's work, 0
# for at once), both by the host's clock, behind the intervals.
CODE_TAKEN: Final = -1
# Before it: (CODE_SENT, when the engine core sent the step, by its host's clock, 0).
CODE_SENT: Final = -2
# No stages, but parts: (CODE_SYNC, start, end) of the wait for other data-parallel ranks, by the host's
# clock, before that; and of the drafter, in `output`, before both.
CODE_SYNC: Final = -4
CODE_DRAFT: Final = -3
# Values of header_names.CARRIER_KEY on its way to the engine core: the API server reads the timeline that
# replaces it, or does not trace the request. Without the key nobody would read a timeline.
ASKED: Final = "1"
LATER_INPUT: Final = "2"  # as ASKED, of a stream whose session the engine core has already
UNTRACED: Final = "0"
# Beside breakdown.LOST_*: the answer left before the encoder had ended; its interval ends there.
ENCODER_UNFINISHED: Final = 64
# Methods that request_arrival.py adds to the engine core, called through vLLM's utility channel: in
# which stage an aborted request was; how long KV blocks, or encodings, were kept.
ABORTED_QUERY: Final = "ttft_otel_died"
KEPT_BLOCKS_QUERY: Final = "ttft_otel_sent"
KEPT_ITEMS_QUERY: Final = "ttft_otel_fetched"
ENCODER_QUERY: Final = "ttft_otel_encoded"  # ... or for how long the encoder ran
WAITING_QUERY: Final = "ttft_otel_queued"  # what waits in its scheduler's queue now
PENDING_ANSWER: Final = "pending"  # to ENCODER_QUERY while it runs: ask again
KEPT_BLOCKS_BIT: Final = 1  # bits of EngineDetails.kept
KEPT_ITEMS_BIT: Final = 2
ENCODER_RUN_BIT: Final = 4  # nothing is kept, but its encoder still ran when it was answered
# Span attributes of the numbers in EngineDetails.blocks, in their order.
KV_ATTRIBUTES: Final = (keys.KV_TOKENS, keys.KV_BLOCKS, keys.KV_BYTES, keys.KV_MOVE_US)


class KeptBlocks(msgspec.Struct, array_like=True, gc=False):
    """KV blocks that an engine core kept for another instance after the answer."""

    #: From the answer until they were freed, microseconds of CLOCK_MONOTONIC.
    since: int
    until: int
    tokens: int
    blocks: int
    #: No instance fetched them.
    expired: bool


class KeptItems(msgspec.Struct, array_like=True, gc=False):
    """Encodings that an engine core kept for another instance after the answer."""

    #: From the answer until all were fetched, microseconds of CLOCK_MONOTONIC.
    since: int
    until: int
    items: int
    bytes: int
    #: When the last of them became readable; 0 where that was not seen.
    ready_at: int
    #: "expired" or "evicted" where they can no longer be fetched, else "".
    end_reason: str


class EncoderRun(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """When an encoder ran that had not ended when the answer left; microseconds of CLOCK_MONOTONIC."""

    since: int
    until: int


class QueueReport(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The traced requests that wait in an engine core's scheduler."""

    #: How many, by the code of their reason (WAIT_REASON_NAMES).
    reasons: dict[int, int]
    #: Requests that have held up the one that waits longest: microseconds until now, tokens, code of the
    #: kind of work (HOLDING_KIND_NAMES), request ID, traceparent or "".
    holders: list[tuple[int, int, int, str, str]]


_HOST_NOTE: Final = ClockNote(keys.CLOCK_WORDS[clock.CLOCK_HOST], 0)
AnyAnswer = TypeVar("AnyAnswer", KeptBlocks, KeptItems, EncoderRun, QueueReport)
_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(EngineTimeline)


def encode_timeline(timeline: EngineTimeline) -> str:
    """Serialize `timeline`; hooks leave it alone from now on (`sent`)."""
    timeline.sent, timeline.boot = True, clock.get_boot_number()
    return _encoder.encode(timeline).decode()


def encode_answer(answer: KeptBlocks | KeptItems | EncoderRun | QueueReport) -> str:
    """What the engine core answers over vLLM's utility channel."""
    return _encoder.encode(answer).decode()


def decode_answer(kind: type[AnyAnswer], text: str) -> AnyAnswer | None:
    """Parse what encode_answer() made; None where it is empty, malformed or pending."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def decode_timeline(text: str, marks: Marks) -> EngineTimeline | None:
    """Parse what encode_timeline() wrote, and copy its times, by the engine core's clock, into `marks`.

    None when `text` is malformed or of another version; `marks` is unchanged then.
    """
    try:
        timeline = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    details = timeline.read_details()
    is_short = 0 < len(details.media) < media_items.HEADER_LENGTH
    if is_short or timeline.version != TIMELINE_VERSION:
        return None
    for place in range(0, len(details.waits) - 2, 3):
        code, start, end = details.waits[place : place + 3]
        # A code of a later version is left out; its time then stays with the queue.
        if code in STAGES_BY_CODE:
            marks.waits.append((STAGES_BY_CODE[code].name, start, end))
    if details.reasons:
        marks.reasons = list(zip(details.reasons[::2], details.reasons[1::2], strict=False))
    if details.turns:
        marks.turns = list(zip(details.turns[::2], details.turns[1::2], strict=False))
    marks.held = timeline.held
    for record in timeline.steps:
        if _has_one_interval(record, timeline.boot):
            interval: Any = record[RECORD_INTERVALS:6]
            _, _, taken, launched = record[8:]
            step = EngineStep([interval], record[1], record[2], taken, launched, record[7])
            marks.steps.append(step)
            continue
        # A worker on another host (multi-node) has another boot: its times are not comparable.
        marks.foreign |= bool(record) and record[RECORD_BOOT] != timeline.boot
        marks.foreign |= _decode_clock(record)[0] == clock.CLOCK_LENGTHS
        marks.steps.append(_decode_step(record))
    marks.added = timeline.added
    marks.scheduled = timeline.scheduled
    marks.encoder_first = details.encoder_first
    marks.entered = timeline.entered
    marks.previous = timeline.previous
    marks.moving = details.looking or details.moving
    marks.asking = details.asked
    marks.queue_lost = details.wait_lost
    marks.truncated = details.truncated
    return timeline


def list_timeline_attributes(timeline: EngineTimeline, clock_error: int = 0) -> Attributes:
    """Span attributes for everything in `timeline` that is not a time.

    clock_error: of the engine core's clock against ours, in us; a mark can have the device's too.
    """
    details = timeline.read_details()
    attributes: Attributes = {
        keys.INPUT_TOKENS: timeline.prompt,
        keys.CACHED_TOKENS: timeline.cached,
        keys.CACHE_READ_TOKENS: timeline.cached,
        keys.PREFILL_CHUNKS: timeline.chunks,
        keys.PREFILL_OWN_TOKENS: timeline.own_tokens,
        keys.PREFILL_STEP_TOKENS: timeline.step_tokens,
        keys.PREEMPTIONS: details.preempted,
        keys.RECOMPUTED_TOKENS: details.recomputed,
    }
    if details.media:
        attributes[keys.ENCODER_OWN_ITEMS] = details.media[media_items.INDEX_OWN]
        attributes[keys.ENCODER_STEP_ITEMS] = details.media[media_items.INDEX_STEP]
    if details.blocks:
        values = zip(KV_ATTRIBUTES, details.blocks, strict=False)
        attributes |= {name: value for name, value in values if value}
        if details.source in keys.KV_SOURCES:
            attributes[keys.KV_SOURCE] = details.source
    if details.truncated:
        attributes[keys.TRUNCATED] = True
    if clock_error:
        attributes[keys.CLOCK_ERROR_US] = clock_error
    if note := read_clock(timeline):
        attributes[keys.CLOCK] = note.word
        if note.word == keys.CLOCK_WORDS[clock.CLOCK_DEVICE]:
            attributes[keys.CLOCK_ERROR_US] = note.error_us + clock_error
    for record in timeline.steps:
        if len(record) >= RECORD_INTERVALS and record[RECORD_FLAGS] & ENCODER_UNFINISHED:
            attributes[keys.ENCODER_UNFINISHED] = True
    return attributes


def read_clock(timeline: EngineTimeline | None) -> ClockNote | None:
    """Which clock placed the worker's marks, by the step with the greatest error; None without a record."""
    if timeline is None:
        return None
    if len(timeline.steps) == 1 and _has_one_interval(timeline.steps[0], timeline.boot):
        return _HOST_NOTE
    worst = (-1, 0)
    for record in timeline.steps:
        if len(record) >= RECORD_INTERVALS:
            worst = max(worst, _decode_clock(record))
            if (
                record[RECORD_BOOT] != timeline.boot
            ):  # another host than its engine core's: lengths alone
                worst = max(worst, (clock.CLOCK_LENGTHS, 0))
    return None if worst[0] < 0 else ClockNote(keys.CLOCK_WORDS[worst[0]], worst[1])


def _has_one_interval(record: tuple[int, ...], boot: int) -> bool:
    """Whether it is of this boot, and has one interval by the host's clock: most steps are such."""
    return len(record) == 12 and record[RECORD_BOOT] == boot and record[6] == CODE_SENT


def _decode_step(record: tuple[int, ...]) -> EngineStep:
    if len(record) < RECORD_INTERVALS:
        return EngineStep([], 0, LOST_FORWARD)
    pairs = list(zip(*[iter(record[RECORD_INTERVALS:])] * 3, strict=False))
    if pairs and pairs[-1][0] == CODE_CLOCK:
        pairs.pop()
    taken = launched = sent = 0
    if pairs and pairs[-1][0] == CODE_TAKEN:
        _, taken, launched = pairs.pop()
    if pairs and pairs[-1][0] == CODE_SENT:
        _, sent, _ = pairs.pop()
    step = EngineStep(pairs, record[RECORD_SAMPLED], record[RECORD_FLAGS], taken, launched, sent)
    if pairs and pairs[-1][0] == CODE_SYNC:
        _, step.sync_start, step.sync_end = pairs.pop()
    if pairs and pairs[-1][0] == CODE_DRAFT:
        _, step.draft_start, step.draft_end = pairs.pop()
    return step


def _decode_clock(record: tuple[int, ...]) -> tuple[int, int]:
    """Which clock placed the record's intervals, and the estimated error of that."""
    if len(record) < RECORD_INTERVALS + 3:
        return clock.CLOCK_HOST, 0
    code, kind, error_us = record[-3:]
    if code != CODE_CLOCK:
        return clock.CLOCK_HOST, 0
    if 0 <= kind < len(keys.CLOCK_WORDS):
        return kind, error_us
    return clock.CLOCK_LENGTHS, 0  # a later version's clock: what its places mean is not known
