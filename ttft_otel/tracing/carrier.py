# SPDX-License-Identifier: Apache-2.0
"""What the engine core measured of one request, and how it gets to the API server.

Hooks fill an EngineTimeline, and transfers.py where the encodings of its media items came from. It is
written as one string into vLLM's own trace_headers of the request's first output, and the API server reads
it back. The string is a JSON array of integers, flags and arrays of them, which msgspec writes in 0.5 us
(the standard library's json takes 25-44 us).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from ttft_otel.model.breakdown import LOST_FORWARD, EngineStep, Marks
from ttft_otel.model.names import keys
from ttft_otel.model.record import Attributes
from ttft_otel.model.stages import STAGES_BY_CODE
from ttft_otel.model.timing import ClockNote, EncoderCacheCounts
from ttft_otel.tracing import clock

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
    #: Its media items and where their encodings came from (INDEX_*); empty without any.
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
    #: What ran while it waited, as waits.divide_held() takes it.
    held: list[int] = []
    #: Worker records (RECORD_*); one tuple is shared by all requests of a step.
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


# Indices of the leading numbers. OWN: items encoded for this request (encoded again after a
# preemption: counted again). STEP: all items encoded in those steps. BYTES: fetched from other
# instances. UNMATCHED: items named in the request's ec_transfer_params that it does not have;
# SOURCES_UNKNOWN there means that no source is known (no connector, or a hook is missing).
INDEX_OWN, INDEX_STEP, INDEX_BYTES, INDEX_UNMATCHED, HEADER_LENGTH = range(5)
SOURCES_UNKNOWN: Final = -1

# The source, in the lowest bits of a code. ALLOCATED is replaced within the same schedule().
SOURCE_UNSEEN: Final = 0  # never allocated for it: in the encoder cache already, or not reached yet
SOURCE_SKIPPED: Final = 1  # its tokens were in the prefix cache: its encoding was not needed
SOURCE_LOCAL: Final = 2  # loaded from a cache of this instance
SOURCE_REMOTE: Final = 3  # loaded after it was fetched from elsewhere
SOURCE_ENCODED: Final = 4  # encoded here, at least once
SOURCE_ALLOCATED: Final = 5  # allocated for it, source not decided yet
SOURCE_MASK: Final = 7
BIT_ANNOUNCED: Final = 8  # the request's ec_transfer_params name it: an encoder has encoded it
BIT_CACHED: Final = 16  # in the connector's local cache when this request was first checked
BIT_AWAITED: Final = 32  # not there then, and the request had to wait: it is being fetched


class ItemCounts(NamedTuple):
    """A request's media items by the source of their encodings; docs/stages.md explains the terms.

    cached: items that were not encoded here, for whatever reason.
    remote, recomputed: None on an instance that takes no encodings from other instances.
    remote, recomputed, local: None where the sources are unknown.
    bytes: size of what was fetched from other instances.
    """

    items: int
    cached: int
    remote: int | None
    local: int | None
    recomputed: int | None
    bytes: int


def count_items(media: Sequence[int], complete: bool, encoded_before: bool) -> ItemCounts:
    """Add up a filled EngineTimeline.media.

    media: the list, at least HEADER_LENGTH long.
    complete: the whole prompt was scheduled. Items that were never allocated were then found in a
        cache: fetched for another request, if this one waited for them too, else local.
    encoded_before: the router's header says that an encoder encoded items of this request. Used only
        where the request's ec_transfer_params name no item, since those are exact per item.
    """
    codes = media[HEADER_LENGTH:]
    sources = [code & SOURCE_MASK for code in codes]
    encoded = sources.count(SOURCE_ENCODED)
    cached = len(codes) - encoded
    if media[INDEX_UNMATCHED] == SOURCES_UNKNOWN:
        return ItemCounts(len(codes), cached, None, None, None, 0)
    remote, local = sources.count(SOURCE_REMOTE), sources.count(SOURCE_LOCAL)
    if complete:
        shared = sum(
            code & (BIT_AWAITED | SOURCE_MASK) == BIT_AWAITED | SOURCE_UNSEEN for code in codes
        )
        remote += shared
        local += sources.count(SOURCE_UNSEEN) - shared
    announced_encoded = sum(
        code & (BIT_ANNOUNCED | SOURCE_MASK) == BIT_ANNOUNCED | SOURCE_ENCODED for code in codes
    )
    unannounced_encoded = encoded - announced_encoded
    # An unmatched name may belong to any item: each can explain one item that was encoded here.
    if media[INDEX_UNMATCHED] or any(code & BIT_ANNOUNCED for code in codes):
        recomputed = announced_encoded + min(unannounced_encoded, media[INDEX_UNMATCHED])
    else:
        recomputed = unannounced_encoded if encoded_before else 0
    return ItemCounts(len(codes), cached, remote, local, recomputed, media[INDEX_BYTES])


def list_item_attributes(counts: ItemCounts | None, connector: str) -> Attributes:
    """Span attributes of a request's media items.

    connector: name of the encoder-cache connector; without one ("") only the cached items count.
    """
    if counts is None:
        return {}
    attributes: Attributes = {keys.ENCODER_CACHED_ITEMS: counts.cached}
    if not connector:
        return attributes
    attributes[keys.EC_CONNECTOR] = connector
    attributes[keys.EC_ITEMS] = counts.items
    if counts.local is not None:
        attributes[keys.EC_LOCAL_ITEMS] = counts.local
    if counts.remote is not None:
        attributes[keys.EC_REMOTE_ITEMS] = counts.remote
    if counts.recomputed is not None:
        attributes[keys.EC_RECOMPUTED_ITEMS] = counts.recomputed
    if counts.bytes:
        attributes[keys.EC_BYTES] = counts.bytes
    return attributes


def summarize_items(counts: ItemCounts | None) -> EncoderCacheCounts | None:
    """The counts for Server-Timing's entry `ec`.

    None on an instance that takes no encodings from others, or where the sources are unknown.
    """
    if counts is None or counts.remote is None or counts.local is None or counts.recomputed is None:
        return None
    return EncoderCacheCounts(
        counts.items, counts.remote, counts.local, counts.recomputed, counts.bytes
    )


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
    is_short = 0 < len(details.media) < HEADER_LENGTH
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
        attributes[keys.ENCODER_OWN_ITEMS] = details.media[INDEX_OWN]
        attributes[keys.ENCODER_STEP_ITEMS] = details.media[INDEX_STEP]
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
