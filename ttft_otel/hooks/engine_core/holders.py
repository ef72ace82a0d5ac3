# SPDX-License-Identifier: Apache-2.0
"""Keep how much engine time each request took, so that a waiting one can name those that took most.

held_steps.py opens and closes steps, and asks at the end of a wait. For prompts and media items the time is
kept one by one. All decoding requests have equal shares of a step: one running sum serves them all, and a
request's time is what was added between its first and its last decode step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Final

import msgspec

from ttft_otel.hooks.engine_core.step_work import (
    DECODE,
    ENCODER,
    PREFILL,
    SCALE,
    StepWork,
    share_decode,
    share_parts,
)
from ttft_otel.model.names import header_names

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
        total = work.total
        self.just_ended = 0
        if self.begun:
            self.begun = []
        if work.decode:
            self.decoded += share_decode(work, length, total)
            self.decode_steps += 1
        new = work.output.scheduled_new_reqs
        if not (work.parts or new):
            return
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
        total = work.total
        share = share_decode(work, length, total)
        self.decoded += share
        for holder, tokens in work.parts:
            holder.held += (length << SCALE) * tokens // total
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
            self.decoded + share_decode(work, elapsed, work.total),
            self.decode_steps,
            [
                (holder, holder.held + shares.get(holder, (0, 0))[0], holder.tokens)
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
        now = self.decoded + share_decode(work, elapsed, work.total)
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
