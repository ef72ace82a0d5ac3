# SPDX-License-Identifier: Apache-2.0
"""Follow traced requests while they wait for their first step, and note for which reason they do.

tracer.py hands over what has arrived, and calls after every schedule(); what is found goes
into the request's EngineTimeline. A step costs the same however many wait: they share one list of the
queue's reasons, and only those with a reason of their own are looked at one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Final

from ttft_otel.hooks.engine_core.held_steps import HeldRequests
from ttft_otel.hooks.engine_core.queue_reasons import (
    IN_STEP,
    NO_REASON,
    OTHER,
    PAUSED,
    PRIORITY,
    find_common_reason,
    find_own_reason,
)
from ttft_otel.hooks.engine_core.step_log import HeldRequest, drop_arrival
from ttft_otel.hooks.vllm_fields import SchedulerFacts, get_facts
from ttft_otel.model.wait_reasons import gather_reasons
from ttft_otel.tracing import clock
from ttft_otel.tracing.engine_timeline import EngineTimeline

MAX_WAITING: Final = 2048  # requests that are followed; reasons of more are "other"
MAX_LOOKED_AT: Final = 32  # requests per step whose own reason is asked for
MAX_CHANGES: Final = 512  # of the queue's reason that are kept
MAX_OWN_CHANGES: Final = 48  # that travel with a request; the older ones are put together by reason
MAX_MISSES: Final = 16  # steps until an arrival that never reaches the scheduler is given up


class WaitingQueue:
    """The traced requests in one scheduler's queue, and what its reasons were while they waited."""

    def __init__(self, held: HeldRequests) -> None:
        self.held = held
        #: Filled by the engine core's input thread, emptied by its main thread.
        self.arrived: deque[HeldRequest] = deque(maxlen=MAX_WAITING)
        self.waiting: dict[str, HeldRequest] = {}
        # Those of them that have a reason of their own.
        self._blocked: dict[str, HeldRequest] = {}
        # When the queue's reason changed, while anybody waits, and to what.
        self._changes: list[tuple[int, int]] = []

    def record_queue(
        self, scheduler: Any, output: Any, preempted: Any, now: int, throttled: bool
    ) -> None:
        """After a schedule() that returned at `now` (us): why those whom it left out were left out.

        preempted: whom it has taken the blocks from. throttled: it was asked to hold prefills back.
        """
        # Before anything returns: an arrival that no step looks at would stay in the deque.
        joined = self._take_arrivals(scheduler.requests) if self.arrived else ()
        if not (self.waiting or joined):
            if self._changes:
                self._changes.clear()
            return
        facts = get_facts(scheduler)
        reason = find_common_reason(scheduler, facts, output, preempted, throttled)
        self._note_change(reason, now)
        for entry in joined:
            if len(self.waiting) < MAX_WAITING:
                entry.shared_since = now
                self.waiting[entry.request_id] = entry
            else:
                entry.timeline.open_details().reasons += (now, OTHER)
        if facts.by_priority and output.scheduled_new_reqs:
            self._note_overtaken(scheduler.requests, output.scheduled_new_reqs)
        # Without either all waiting requests share the queue's reason: none is looked at.
        deferred = facts.get_deferred(scheduler)
        if self._blocked or deferred:
            self._follow_blocked(scheduler, facts, deferred, now)

    def record_pause(self, pause_state: Any) -> None:
        """After set_pause_state(): no step may run, and note it, until the scheduler goes on."""
        self.held.note_pause()
        if pause_state and self.waiting:
            self._note_change(PAUSED, clock.now_us())

    def _take_arrivals(self, known: Any) -> Sequence[HeldRequest]:
        """Requests that have reached the scheduler and wait there; the others stay for the next step."""
        joined = []
        for _ in range(len(self.arrived)):
            entry = self.arrived.popleft()
            if entry.timeline.scheduled:
                continue
            # Not by its ID alone, which another one may have by now.
            request = known.get(entry.request_id)
            if getattr(request, "_ttft_timeline", None) is entry.timeline:
                entry.request = request
                joined.append(entry)
            elif entry.misses < MAX_MISSES:  # it came after this step's inputs had been read
                entry.misses += 1
                self.arrived.append(entry)
            else:
                self.held.drop_request(None, entry.request_id, clock.now_us())
        return joined

    def _note_change(self, reason: int, now: int) -> None:
        if self._changes and self._changes[-1][1] == reason:
            return
        if len(self._changes) >= MAX_CHANGES:
            self._changes[:] = _shorten_changes(self._changes, MAX_CHANGES // 2)
        self._changes.append((now, reason))

    def _note_overtaken(self, known: dict[str, Any], admitted: Any) -> None:
        for data in admitted:
            taker = known.get(data.req_id)
            for entry in islice(self.waiting.values(), MAX_LOOKED_AT):
                request = entry.request
                if (
                    taker is not None
                    and taker.arrival_time > request.arrival_time
                    and taker.priority < request.priority
                ):
                    entry.overtaker = data.req_id
                    self._blocked.setdefault(request.request_id, entry)

    def _follow_blocked(
        self, scheduler: Any, facts: SchedulerFacts, deferred: Any, now: int
    ) -> None:
        """Note the own reasons of those that have, or have had, one."""
        ids = [*islice(self._blocked, MAX_LOOKED_AT)]
        if len(self.waiting) <= MAX_LOOKED_AT:
            ids += [request_id for request_id in self.waiting if request_id not in self._blocked]
        else:
            ids += [each.request_id for each in islice(deferred, MAX_LOOKED_AT)]
        for request_id in ids:
            entry = self.waiting.get(request_id)
            if entry is None:
                continue
            request = entry.request
            reason = find_own_reason(scheduler, facts, request, entry.timeline, request in deferred)
            if reason == NO_REASON and entry.overtaker in scheduler.requests:
                reason = PRIORITY
            if reason != entry.reason:
                self._copy_shared(entry, now)
                entry.reason = reason
                if reason == NO_REASON:
                    entry.shared_since = now
                    self._blocked.pop(entry.request_id, None)
                else:
                    entry.shared_since = 0
                    entry.timeline.open_details().reasons += (now, reason)
                    self._blocked[entry.request_id] = entry

    def _copy_shared(self, entry: HeldRequest, now: int) -> None:
        """Copy what the queue's reasons were while they were this request's, up to `now`."""
        if not entry.shared_since or not self._changes:
            return
        # The change before `since`: its reason still held when this request joined.
        first = max(0, bisect_right(self._changes, entry.shared_since, key=itemgetter(0)) - 1)
        reasons = entry.timeline.open_details().reasons
        reasons += (entry.shared_since, self._changes[first][1])
        for change in self._changes[first + 1 :]:
            if change[0] < now:
                reasons += change

    def end_wait(self, timeline: EngineTimeline, request_id: str, now: int) -> None:
        """A step has taken the request, or it has ended: put its reasons into its timeline."""
        entry = self.waiting.pop(request_id, None)
        if entry is None:
            if not timeline.scheduled:
                drop_arrival(self.arrived, timeline)
            return
        self._blocked.pop(request_id, None)
        self._copy_shared(entry, now)
        entry.request = None  # it is vLLM's, and ends with its answer
        reasons = timeline.read_details().reasons
        if len(reasons) > 2 * MAX_OWN_CHANGES:
            changes = list(zip(reasons[::2], reasons[1::2], strict=True))
            shortened = _shorten_changes(changes, MAX_OWN_CHANGES // 2)
            timeline.open_details().reasons = [value for pair in shortened for value in pair]

    def count_reasons(self, is_paused: bool) -> Counter[int]:
        """How many wait, by the code of the reason that the last schedule() has left them with.

        is_paused: no step may run that would look at those which came since.
        """
        shared = self._changes[-1][1] if self._changes else OTHER
        found = Counter(
            shared if each.reason == NO_REASON else each.reason for each in self.waiting.values()
        )
        # The list is made in one go: the input thread may append meanwhile.
        came = sum(not each.timeline.scheduled for each in [*self.arrived])
        if came:
            found[PAUSED if is_paused else IN_STEP] += came
        return found

    def note_stall(self, timeline: EngineTimeline, reason: int, now: int) -> None:
        """Between a prompt's chunks: from `now` on, `reason` keeps the rest of it waiting."""
        reasons = timeline.open_details().reasons
        # What is over the limit stays with the last reason: the sum is kept.
        if (not reasons or reasons[-1] != reason) and len(reasons) < 4 * MAX_OWN_CHANGES:
            reasons += (now, reason)


def _shorten_changes(changes: list[tuple[int, int]], kept: int) -> list[tuple[int, int]]:
    """The last `kept` changes, and before them each earlier reason once, as long as it was in total."""
    cut = len(changes) - kept
    lengths = [(code, changes[at + 1][0] - since) for at, (since, code) in enumerate(changes[:cut])]
    position, early = changes[0][0], []
    for code, length in gather_reasons(lengths):
        early.append((position, code))
        position += length
    return early + changes[cut:]
