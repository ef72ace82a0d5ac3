# SPDX-License-Identifier: Apache-2.0
"""Keep what steps computed while traced requests waited: time by kind of work, and by the largest requests.

held_steps.py describes each step when it is scheduled, adds it to the StepLog at its end, and asks the log at
both ends of a request's wait. For prompts and media items (Holder) the time is kept one by one. All decoding
requests have equal shares of a step: one running sum serves them all, and a request's time is what was added
between its first and its last decode step. A step costs the same however many requests are in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Final

import msgspec

from ttft_otel.model.names import header_names
from ttft_otel.model.stages import HOLDING_KIND_NAMES
from ttft_otel.model.waits import SEGMENT_SIZE, split_step

PREFILL, DECODE, ENCODER, OWN, IDLE, OTHER_RANK = range(len(HOLDING_KIND_NAMES))
MAX_LOOKED_AT: Final = 32  # requests of a step that are looked at to find prompts
MAX_PARTS: Final = 8  # requests of each kind that are told apart in a step
SCALE: Final = 10  # bits of a microsecond's fraction in `held`: shares of many short steps add up
MAX_HOLDERS: Final = 64  # prompts and media items that are kept
MAX_OPEN: Final = 32  # incomplete ones among them
MAX_PARTIAL: Final = 12  # incomplete ones that a wait's start notes
MAX_ENDED: Final = 64  # requests that ended while decoding
MAX_STARTED: Final = 2048  # requests whose first decode step is known
MAX_RUNNING: Final = 8  # running requests that are looked at for decoding ones
MAX_NAMED: Final = 3  # holders that a waiting request names
MAX_ID_CHARS: Final = 256  # of a request ID, which clients choose
_NOTHING: Final = (0, 0)
_FIRST: Final = itemgetter(0)
_NEVER: Final = 1 << 80  # a sum that is not reached: it has not begun to decode
HolderShare = tuple[int, int, int, str, str]  # microseconds, tokens, kind, request ID, traceparent
MAX_EDGES: Final = 512  # ends of steps that are kept; of older ones every second is forgotten
MAX_IN_FLIGHT: Final = 8  # scheduled steps that have not ended

Sums = tuple[int, int, int, int]  # microseconds of PREFILL, DECODE, ENCODER, OTHER_RANK
NO_SUMS: Final[Sums] = (0, 0, 0, 0)


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
    #: The same with their Holder.
    parts: Sequence[tuple[Holder, int]] = ()
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
    #: The sums of the log at that begin.
    sums: Sums = NO_SUMS


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
    if len(found) > MAX_PARTS:
        found.sort(reverse=True)
        work.unnamed = True
        del found[MAX_PARTS:]
    return found


def take_out_own(segments: list[int], request_id: str, work: StepWork | None) -> None:
    """Take the request's own work out of the last segment, which is of the step `work`."""
    if work is None or not work.total or len(segments) < SEGMENT_SIZE:
        return
    length = segments[-SEGMENT_SIZE]
    tokens = work.output.num_scheduled_tokens.get(request_id, 0)
    embeddings = sum([count for count, each in work.items if each == request_id])
    # A request with one token counts as one that decodes.
    for kind, weight in ((PREFILL if tokens > 1 else DECODE, tokens), (ENCODER, embeddings)):
        place = kind + 1 - SEGMENT_SIZE
        own = min(length * weight // work.total, segments[place])
        segments[place] -= own
        segments[OWN + 1 - SEGMENT_SIZE] += own


def share_decode(work: StepWork, length: int) -> int:
    """What each request that decodes has of `length` microseconds of the step (<< SCALE)."""
    return (length << SCALE) * work.decode // (work.total * work.decoders) if work.decode else 0


def share_parts(work: StepWork, length: int) -> dict[Holder, tuple[int, int]]:
    """What each part has of `length` microseconds of the step (<< SCALE), and its tokens."""
    if not length:
        return {}
    total = work.total
    return {holder: ((length << SCALE) * tokens // total, tokens) for holder, tokens in work.parts}


class Holder(msgspec.Struct, eq=False):
    """A prompt, or a request's media items, that steps compute part by part."""

    request_id: str
    parent: str
    kind: int
    #: Holders are numbered as they begin.
    number: int
    #: Its share of those steps, microseconds << SCALE.
    held: int = 0
    tokens: int = 0


class WaitStart(msgspec.Struct, eq=False):
    """The log's sums when a wait began."""

    number: int
    decoded: int
    decode_steps: int
    #: Holders begun before: (holder, its `held`, its tokens).
    partial: list[tuple[Holder, int, int]]


class HolderLog:
    """The holders of all steps since the log was reset."""

    def __init__(self) -> None:
        self.holders: list[Holder] = []
        self.open: dict[tuple[str, int], Holder] = {}
        self.closing: Sequence[tuple[str, int]] = ()
        self.started: dict[str, tuple[int, int]] = {}
        #: Request ID, traceparent; `decoded` and `decode_steps` at its first step, and at its end.
        self.ended: deque[tuple[str, str, int, int, int, int]] = deque(maxlen=MAX_ENDED)
        self.next_number = 0
        #: Holders with lower numbers may have been dropped.
        self.lost_number = 0
        #: Sum of one decoding request's shares (microseconds << SCALE), and of how many steps.
        self.decoded = 0
        self.decode_steps = 0
        #: Requests that decode from the next step on.
        self.begun: list[str] = []
        #: How many of `ended` were in the latest step.
        self.just_ended = 0

    def open_step(self, work: StepWork, requests: Any) -> None:
        """Find the holders of a step that has just been scheduled."""
        for data in work.output.scheduled_new_reqs:
            self.started[data.req_id] = (_NEVER, 0)
        if not (work.chunks or work.items):
            return
        parts: list[tuple[Holder, int]] = []
        completed: list[tuple[str, int]] = []
        work.parts = parts
        work.completed = completed
        for kind, named in ((PREFILL, work.chunks), (ENCODER, work.items)):
            for tokens, request_id in named:
                request = requests.get(request_id)
                key = (request_id[:MAX_ID_CHARS], kind)
                holder = self.open.get(key) or self._add_holder(key, request)
                parts.append((holder, tokens))
                if request is None or request.num_computed_tokens >= request.num_tokens:
                    completed.append(key)
                if kind == PREFILL:
                    self.started[request_id] = (_NEVER, 0)

    def drop_completed(self, work: StepWork) -> None:
        """Forget as open what the step before `work`, which ends now, has completed.

        Not earlier: of a step whose schedule() was not seen the next one may continue a prompt.
        """
        still = {(holder.request_id, holder.kind) for holder, _ in work.parts}
        for key in self.closing:
            if key not in still:
                self.open.pop(key, None)
        self.closing = ()

    def _add_holder(self, key: tuple[str, int], request: Any) -> Holder:
        parent = _find_traceparent(request)
        holder = self.open[key] = Holder(key[0], parent, key[1], self.next_number)
        self.next_number += 1
        self.holders.append(holder)
        if len(self.open) > MAX_OPEN:
            del self.open[next(iter(self.open))]
            self.lost_number = self.next_number
        if len(self.holders) > MAX_HOLDERS:
            self._drop_holders()
        return holder

    def _drop_holders(self) -> None:
        """Forget holders that no wait can name: all waits end now, so three larger later ones suffice."""
        kept: list[Holder] = []
        top: list[int] = []
        for holder in reversed(self.holders):
            if (
                len(top) < MAX_NAMED
                or holder.held > top[0]
                or self.open.get((holder.request_id, holder.kind)) is holder
            ):
                kept.append(holder)
                top = sorted([*top, holder.held])[-MAX_NAMED:]
        kept.reverse()
        over = len(kept) - MAX_HOLDERS // 2
        if over > 0:  # falling shares for long: forget the earliest of them
            self.lost_number = kept[over - 1].number + 1
            del kept[:over]
        self.holders = kept

    def close_step(self, work: StepWork, length: int) -> None:
        """Add a step that has ended and has taken `length` microseconds."""
        before = (self.decoded, self.decode_steps)
        self.just_ended = 0
        if self.begun:
            self.begun = []
        if work.decode:
            self.decoded += share_decode(work, length)
            self.decode_steps += 1
        new = work.output.scheduled_new_reqs
        if not (work.parts or new):
            return
        total = work.total
        for holder, tokens in work.parts:
            holder.held += (length << SCALE) * tokens // total
            holder.tokens += tokens
        counts = work.output.num_scheduled_tokens
        for data in new:
            if counts.get(data.req_id) == 1:
                self.started[data.req_id] = before
            else:
                self._begin_decoding(data.req_id)
        if len(self.started) > MAX_STARTED:
            del self.started[next(iter(self.started))]
            self.lost_number = self.next_number
        if work.unnamed:
            self.lost_number = self.next_number
        self.closing = work.completed
        # Also of an incomplete one: its last token alone would count as decoding.
        for _, request_id in work.chunks:
            self._begin_decoding(request_id)

    def _begin_decoding(self, request_id: str) -> None:
        self.started[request_id] = (self.decoded, self.decode_steps)
        self.begun.append(request_id)

    def extend_step(self, work: StepWork, length: int) -> None:
        """Add `length` microseconds to the latest step: its turnaround."""
        share = share_decode(work, length)
        self.decoded += share
        for holder, tokens in work.parts:
            holder.held += (length << SCALE) * tokens // work.total
        for request_id in self.begun:
            if request_id in self.started:
                self.started[request_id] = (self.decoded, self.decode_steps)
        ended = self.ended
        for index in range(-min(self.just_ended, len(ended)), 0):
            request_id, parent, decoded, steps, until, last = ended[index]
            ended[index] = (request_id, parent, decoded, steps, until + share, last)

    def note_end(self, request: Any) -> None:
        """A request ends, or loses its place; none of its steps runs any more."""
        request_id = request.request_id
        start = self.started.pop(request_id, (0, 0))
        shown_id = request_id[:MAX_ID_CHARS]
        for kind in (PREFILL, ENCODER):
            self.open.pop((shown_id, kind), None)
        # Its prompt may have been computed by the step with which it ends.
        has_decoded = (
            getattr(request, "num_output_tokens", 0)
            or request.num_computed_tokens >= request.num_prompt_tokens
        )
        if has_decoded and start[0] < self.decoded:
            parent = _find_traceparent(request)
            self.ended.append((shown_id, parent, *start, self.decoded, self.decode_steps))
            self.just_ended += 1

    def start_wait(self, work: StepWork, elapsed: int) -> WaitStart:
        """The log as it was `elapsed` microseconds after the begin of the step that ends now."""
        shares = share_parts(work, elapsed)
        holders = [*self.open.values()]
        if len(holders) > MAX_PARTIAL:
            self.lost_number = self.next_number + 1
        return WaitStart(
            self.next_number,
            self.decoded + share_decode(work, elapsed),
            self.decode_steps,
            [
                (holder, holder.held + shares.get(holder, _NOTHING)[0], holder.tokens)
                for holder in holders[-MAX_PARTIAL:]
            ],
        )

    def list_holders(
        self, start: WaitStart, own_id: str, running: Iterable[Any], work: StepWork, elapsed: int
    ) -> list[HolderShare]:
        """Holders of a wait that ended `elapsed` microseconds after the begin of a step; largest first."""
        shares = share_parts(work, elapsed)
        parts = [*start.partial]
        for holder in reversed(self.holders):
            if holder.number < start.number:
                break
            parts.append((holder, 0, 0))
        shown_id = own_id[:MAX_ID_CHARS]
        ranked = [
            (holder.held + shares.get(holder, _NOTHING)[0] - held, tokens, holder)
            for holder, held, tokens in parts
            if holder.request_id != shown_id
        ]
        ranked.sort(key=_FIRST, reverse=True)
        found: list[HolderShare] = []
        for held, tokens, holder in ranked[:MAX_NAMED]:
            tokens = holder.tokens + shares.get(holder, _NOTHING)[1] - tokens
            found.append((held, tokens, holder.kind, holder.request_id, holder.parent))
        decoders = self._list_decoders(start, own_id, running, work, elapsed)
        found += [each for each in decoders if each[3] != shown_id]
        found.sort(key=_FIRST, reverse=True)
        # Below zero: of one that has not begun to decode.
        return [(us, *each[1:]) for each in found[:MAX_NAMED] if (us := each[0] >> SCALE) > 0]

    def _list_decoders(
        self, start: WaitStart, own_id: str, running: Iterable[Any], work: StepWork, elapsed: int
    ) -> list[HolderShare]:
        found: list[HolderShare] = []
        for request_id, parent, decoded, steps, until, last in reversed(self.ended):
            if until <= start.decoded:  # they are in the order of their end
                break
            held = until - max(decoded, start.decoded)
            found.append((held, last - max(steps, start.decode_steps), DECODE, request_id, parent))
        now = self.decoded + share_decode(work, elapsed)
        steps_now = self.decode_steps + (elapsed > 0 and work.decoders > 0)
        others = {own_id, *[request_id for _, request_id in work.chunks]}
        # In the order in which they came: hardly one beyond these has decoded for longer.
        decoding = [
            (max(self.started.get(each.request_id, _NOTHING)[0], start.decoded), each)
            for each in islice(running, MAX_RUNNING)
            if each.num_computed_tokens >= each.num_prompt_tokens and each.request_id not in others
        ]
        decoding.sort(key=_FIRST)
        for since, request in decoding[:MAX_NAMED]:
            steps = self.started.get(request.request_id, _NOTHING)[1]
            tokens = steps_now - max(steps, start.decode_steps)
            shown_id = request.request_id[:MAX_ID_CHARS]
            found.append((now - since, tokens, DECODE, shown_id, _find_traceparent(request)))
        return found

    def is_truncated(self, start: WaitStart) -> bool:
        """Whether a holder of the wait may be missing."""
        is_full = len(self.ended) == MAX_ENDED
        return self.lost_number > start.number or (is_full and self.ended[0][4] > start.decoded)


def _find_traceparent(request: Any) -> str:
    headers = getattr(request, "_ttft_headers", None)
    return headers.get(header_names.TRACEPARENT, "") if headers else ""


class StepLog:
    """The steps since the first of the waiting requests came."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Empty the log: no traced request waits any more."""
        #: The time up to which `sums` count: the latest step's end, later the next one's begin; 0: no step.
        self.edge = 0
        self.sums = NO_SUMS
        #: The end of the latest step.
        self.step_end = 0
        self.latest: StepWork | None = None
        #: The scheduler was paused or resumed since the latest schedule().
        self.halted = False
        #: How many requests have decoded since the last but one of `times`; 0 if anything else was done.
        self.steady = 0
        #: How many steps only went on with that since the last of `times`: settle() writes their time.
        self.extended = 0
        #: Ends of steps, and the sums at each of them.
        self.times: list[int] = []
        self.all_sums: list[Sums] = []
        self.in_flight: deque[StepWork] = deque(maxlen=MAX_IN_FLIGHT)
        self.holders = HolderLog()
        #: Requests that end with a step in flight.
        self.ending: list[Any] = []

    def begin(self, at: int) -> None:
        """Begin the log at the time `at` (us)."""
        self.edge = at
        self.add_edge(at)

    def add_edge(self, at: int) -> None:
        """Keep the present sums as those at the time `at` (us)."""
        self.steady = 0
        if len(self.times) >= MAX_EDGES:
            # Between two edges the sums are taken to grow evenly: fewer of them change no total.
            half = MAX_EDGES // 2
            self.times[:half] = self.times[:half:2]
            self.all_sums[:half] = self.all_sums[:half:2]
        self.times.append(at)
        self.all_sums.append(self.sums)

    def add_step(self, work: StepWork, now: int, length: int) -> None:
        """Up to `now` (us) the engine was the step's for `length`: it has ended, or its turnaround has."""
        steady = 0
        if length:
            prefill, decode, encoder, other_rank = self.sums
            if not work.total:
                self.sums = (prefill, decode, encoder, other_rank + length * work.is_dummy)
            elif work.decode == work.total:  # most steps
                self.sums = (prefill, decode + length, encoder, other_rank)
                steady = work.decoders
            else:
                shares = split_step(length, work.prefill, work.decode, work.encoder, work.total)
                prefill_us, decode_us, encoder_us = shares
                self.sums = (
                    prefill + prefill_us,
                    decode + decode_us,
                    encoder + encoder_us,
                    other_rank,
                )
            self.add_edge(now)
        self.edge = now
        self.latest = work
        self.steady = steady

    def extend_decoding(self, output: Any, now: int) -> bool:
        """Add the step `output` if it only goes on with what `steady` says; most steps do. Whether it does.

        Its time is not written before settle(): no edge lies between such steps, as time is divided evenly
        between two, which is exact here.
        """
        work = self.in_flight[0] if self.in_flight else None
        if work is None or not work.is_plain or work.output is not output:
            return False
        if work.decoders != self.steady:
            return False
        self.in_flight.popleft()
        self.edge = now
        self.latest = work
        self.extended += 1
        return True

    def settle(self) -> None:
        """Write the steps that extend_decoding() has added; before sums, times or holders are used."""
        if not self.extended or self.latest is None:
            return
        length = self.edge - self.times[-1]
        prefill, decode, encoder, other_rank = self.sums
        self.sums = self.all_sums[-1] = (prefill, decode + length, encoder, other_rank)
        self.times[-1] = self.step_end = self.edge
        self.holders.decoded += (length << SCALE) // self.latest.decoders
        self.holders.decode_steps += self.extended
        self.extended = 0

    def take_step(self, output: Any) -> StepWork | None:
        """The scheduled step `output`; None for one that was scheduled before anybody waited."""
        in_flight = self.in_flight
        if in_flight and in_flight[0].output is output:
            return in_flight.popleft()
        # A step of which nothing came back is left out.
        if any(work.output is output for work in in_flight):
            while (work := in_flight.popleft()).output is not output:
                pass
            return work
        return None
