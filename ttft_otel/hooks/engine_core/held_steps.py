# SPDX-License-Identifier: Apache-2.0
"""Record which work the engine did while traced requests waited: kinds of work, and the largest requests.

tracer.py reports arrivals, schedule(), steps' ends and waits' ends.
Results go into EngineTimeline.held and EngineDetails.holders. Running sums are kept for all waiting requests
together: what one request waited for is the difference between two of them, so the cost of a step does not
depend on how many wait. Sums are updated at a step's end, when its begin and its length are known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from ttft_otel.hooks import vllm_fields
from ttft_otel.hooks.engine_core.step_log import (
    NO_SUMS,
    HolderShare,
    StepLog,
    StepWork,
    Sums,
    WaitStart,
    describe_step,
    take_out_own,
)
from ttft_otel.model.waits import MAX_SEGMENTS, SEGMENT_SIZE, halve_segments, split_step
from ttft_otel.tracing import clock
from ttft_otel.tracing.carrier import EngineTimeline

MAX_FOLLOWED: Final = 512  # requests; more are not followed
_NO_STEP: Final = SimpleNamespace(
    num_scheduled_tokens={}, total_num_scheduled_tokens=0, scheduled_new_reqs=()
)
NO_REASON: Final = -1  # of its own: a waiting request shares its queue's


class HeldRequest(msgspec.Struct, eq=False, gc=False):
    """A traced request that waits for its first step, or between its prompt's chunks."""

    request_id: str
    timeline: EngineTimeline
    #: The time from which other requests' work counts as holding it up.
    since: int
    #: Steps since its arrival in which the scheduler did not know it.
    misses: int = 0
    start: WaitStart | None = None
    #: When its first step was scheduled, 0 before.
    ended: int = 0
    #: The time up to which `timeline.held` is written, and the log's sums then; 0 while it waits.
    last: int = 0
    sums: Sums = NO_SUMS
    #: The latest step that computed a part of it.
    own: StepWork | None = None
    #: False for one beyond MAX_FOLLOWED, or whose arrival was not seen.
    is_followed: bool = True
    #: vLLM's Request, while it is in the scheduler's queue.
    request: Any = None
    #: Its own reason to wait (queue_reasons), NO_REASON while it shares the queue's.
    reason: int = NO_REASON
    #: From then on the queue's reason is its own; 0 while it has a reason of its own.
    shared_since: int = 0
    #: ID of a request that came later and runs in its place; "" without one.
    overtaker: str = ""

    def add_segment(self, upto: int, sums: Sums) -> None:
        """Write what ran from `last` up to the time `upto` (us), when the log's sums are these."""
        before = self.sums
        self.timeline.held += (
            upto - self.last, sums[0] - before[0], sums[1] - before[1], sums[2] - before[2],
            0, sums[3] - before[3],
        )  # fmt: skip
        self.last = upto
        self.sums = sums


def drop_arrival(arrivals: deque[HeldRequest], timeline: EngineTimeline) -> None:
    """Take the request of `timeline` out of `arrivals`, to which the input thread may append meanwhile."""
    for _ in range(len(arrivals)):
        if (each := arrivals.popleft()).timeline is not timeline:
            arrivals.append(each)


class HeldRequests:
    """One engine core's traced requests that other requests' work may hold up, and the log of that work."""

    def __init__(self) -> None:
        #: Request ID -> request, from its arrival (input thread) to its first output or end.
        self.unanswered: dict[str, HeldRequest] = {}
        #: Requests that arrived after the last step's end.
        self.unmarked: deque[HeldRequest] = deque(maxlen=MAX_FOLLOWED)
        #: Waiting requests, by ID.
        self.followed: dict[str, HeldRequest] = {}
        # Those whose wait has ended since the last step's end.
        self._ended: list[HeldRequest] = []
        self.log = StepLog()

    def follow_request(self, request_id: str, timeline: EngineTimeline) -> HeldRequest:
        """In the input thread: a traced request has arrived."""
        held = HeldRequest(request_id, timeline, timeline.added)
        if len(self.unanswered) < MAX_FOLLOWED:
            self.unmarked.append(held)
        else:
            held.is_followed = False
        self.unanswered[request_id] = held
        return held

    def note_unseen(self, request_id: str, timeline: EngineTimeline) -> HeldRequest:
        """A traced request whose arrival was not seen, or that waited elsewhere: who held it is not known."""
        held = HeldRequest(request_id, timeline, 0, is_followed=False)
        self.unanswered[request_id] = held
        return held

    def note_schedule(self, scheduler: Any, output: Any, now: int) -> None:
        """After a schedule() that returned at `now` (us), while a traced request waits."""
        log = self.log
        total = output.total_num_scheduled_tokens
        if total == len(output.num_scheduled_tokens) and not (
            output.scheduled_encoder_inputs or output.scheduled_new_reqs or log.halted
        ):
            # Most steps: what describe_step() makes of one in which all decode, without its call.
            work = StepWork(output, now, total, total, total)
            work.is_plain = True
            log.in_flight.append(work)
            return
        work = describe_step(scheduler, output, now)
        if output.scheduled_new_reqs or work.chunks or work.items:
            log.settle()
            log.holders.open_step(work, scheduler.requests)
        elif not log.halted:
            work.is_plain = True
        if log.halted:
            work.resumed = True
            log.halted = False
        log.in_flight.append(work)

    def note_pause(self) -> None:
        """The scheduler is paused, or goes on: its next step does not follow at once."""
        self.log.halted = True

    def end_wait(
        self, facts: vllm_fields.SchedulerFacts, timeline: EngineTimeline, request_id: str, now: int
    ) -> None:
        """The request's first step was scheduled at `now` (us)."""
        held = self.unanswered.get(request_id)
        if held is None or held.ended or not held.is_followed:
            return
        held.ended = now
        if timeline.complete and not (self.log.edge or facts.overlaps):
            if (
                self.unmarked and self.unmarked[0] is held
            ):  # it came to an idle engine: one step takes all of it
                self.unmarked.popleft()
                timeline.held = [timeline.added]
                held.last = now
                return
        self._ended.append(held)

    def follow_again(self, request_id: str) -> None:
        """A request whose prompt was complete has lost its blocks: it waits again."""
        held = self.unanswered.get(request_id)
        if held is not None and held.last and request_id not in self.followed:
            if not self.log.edge:
                self.log.begin(clock.now_us())
            self.log.settle()
            # What lies between was not waited for, or nothing ran in it.
            segments = held.timeline.held
            gap = self.log.edge - segments[0] - sum(segments[1::SEGMENT_SIZE])
            segments += (max(gap, 0), *NO_SUMS, 0)
            held.last = max(self.log.edge, held.last)
            held.sums = self.log.sums
            held.own = None
            self.followed[request_id] = held

    def note_end(self, request: Any) -> None:
        """A request, traced or not, is freed or preempted while a traced one waits."""
        self.log.settle()
        self.log.steady = 0
        # With overlapping steps one may still run for it.
        if self._is_in_flight(request.request_id):
            self.log.ending.append(request)
        else:
            self.log.holders.note_end(request)

    def close_step(self, scheduler: Any, output: Any, now: int, is_plain: bool) -> None:
        """Before update_from_output() at `now` (us), while a traced request waits: a step has ended.

        is_plain: no request without a first token has a part in it.
        """
        log = self.log
        if (
            is_plain
            and log.steady
            and not (self.unmarked or self._ended)
            and log.extend_decoding(output, now)
        ):
            return
        log.settle()
        work = log.take_step(output)
        if work is None:
            work = describe_step(scheduler, output, 0)
            log.holders.open_step(work, scheduler.requests)
        self._close_work(scheduler, work, now)

    def close_dummy(self, scheduler: Any, begun: int, now: int) -> None:
        """A batch without requests, which another rank needed, has run from `begun` to `now` (us)."""
        if self.followed or self.unmarked:
            self.log.settle()
            work = StepWork(_NO_STEP, begun, 0, 0, 0, resumed=self.log.halted, is_dummy=True)
            self.log.halted = False  # the end of a pause is noted as well
            self._close_work(scheduler, work, now)

    def _close_work(self, scheduler: Any, work: StepWork, now: int) -> None:
        log = self.log
        if not log.edge:
            if self._ended and len(self._ended) == len(self.unmarked) and self._settle_taken(work):
                return
            self._begin_log(now)
        if log.holders.closing:
            log.holders.drop_completed(work)
        self._end_turnaround(work, now)
        length = now - (begin := log.edge)  # since when it has had the engine for itself
        while self.unmarked:
            self._mark_start(self.unmarked.popleft(), work, begin, length)
        for held in self._ended:
            self._name_holders(held, scheduler, work, min(max(held.ended - begin, 0), length))
        log.add_step(work, now, length)
        log.step_end = now
        log.holders.close_step(work, length)
        if work.parts or work.output.scheduled_new_reqs:
            log.steady = 0
        if log.ending:
            ending = log.ending
            log.ending = []
            for request in ending:
                self.note_end(request)
        if self._ended:
            for held in self._ended:
                self._write_wait(held)
            self._ended.clear()

    def _settle_taken(self, work: StepWork) -> bool:
        """Whether the first step to end since they came has taken all that wait: then none ran before it."""
        for index, held in enumerate(self._ended):
            is_taken = self.unmarked[index] is held and held.ended == work.scheduled
            if not (is_taken and held.timeline.complete):
                return False
        for held in self._ended:
            self.unmarked.popleft()
            held.timeline.held = [held.timeline.added]
            held.last = held.ended
        self._ended.clear()
        self.log.reset()
        return True

    def _end_turnaround(self, work: StepWork, now: int) -> None:
        """Up to the begin of `work` no step ran: this time is that of the step before."""
        begin = min(work.scheduled, now)
        before = self.log.latest
        if (gap := begin - self.log.edge) <= 0:
            return
        if before is None or not (before.total or before.is_dummy) or work.resumed:
            self.log.add_edge(begin)
            self.log.edge = begin
            return
        self.log.add_step(before, begin, gap)
        self.log.holders.extend_step(before, gap)
        before.turnaround = gap
        before.sums = self.log.sums

    def _begin_log(self, now: int) -> None:
        # When the first of those that wait came; a list, because the input thread may append meanwhile.
        self.log.begin(min([now, *[each.timeline.added for each in [*self.unmarked]]]))

    def _mark_start(self, held: HeldRequest, work: StepWork, begin: int, length: int) -> None:
        # A turnaround in which it came is idle to it: whether it is known depends on who else waited.
        if held.since >= self.log.step_end:
            held.since = max(held.since, begin)
        elapsed = min(max(held.timeline.added - begin, 0), length)
        held.start = self.log.holders.start_wait(work, elapsed)
        self.followed[held.request_id] = held

    def _name_holders(
        self, held: HeldRequest, scheduler: Any, work: StepWork, elapsed: int
    ) -> None:
        if held.start is None or scheduler is None:
            return
        running = getattr(scheduler, "running", ())
        found = self.log.holders.list_holders(held.start, held.request_id, running, work, elapsed)
        # A pipeline has several batches: who decodes is in one of them, and its share is too large here.
        is_pipeline = vllm_fields.get_facts(scheduler).is_pipeline
        lost = is_pipeline or self.log.holders.is_truncated(held.start)
        if found or lost:
            details = held.timeline.open_details()
            details.holders = found
            details.holders_lost = lost
        held.start = None  # so that its holders can be freed

    def list_holders(self, request_id: str, running: Any) -> list[HolderShare]:
        """Who has held up a request that still waits, up to the latest step's end; largest first.

        running: vLLM's running requests.
        """
        held = self.followed.get(request_id)
        if held is None or held.start is None:
            return []
        self.log.settle()
        work = StepWork(_NO_STEP, 0, 0, 0, 0)
        return self.log.holders.list_holders(held.start, request_id, running, work, 0)

    def _write_wait(self, held: HeldRequest) -> None:
        """What ran between the request's arrival and the end of the latest step, as segments."""
        times, all_sums = self.log.times, self.log.all_sums
        first = max(0, bisect_right(times, held.since) - 1)
        edges = range(first, len(times))
        if len(edges) > MAX_SEGMENTS:
            # The first and the last ones have the wait's ends in them, these stay as they are.
            stride = -(-len(edges) // MAX_SEGMENTS)
            edges = [*edges[:2], *edges[2:-3:stride], *edges[-3:]]  # type: ignore[assignment]
        held.last = times[edges[0]]
        held.sums = all_sums[edges[0]]
        held.timeline.held = [held.last]
        for index in edges[1:]:
            held.add_segment(times[index], all_sums[index])

    def add_own_step(self, request_id: str) -> None:
        """After close_step() of a step in which the request itself was."""
        held = self.followed.get(request_id)
        if held is None or not held.last:
            return
        if (before := held.own) is not None and before.turnaround:
            held.add_segment(held.last + before.turnaround, before.sums)
            take_out_own(held.timeline.held, request_id, before)
        held.own = work = self.log.latest
        self.log.steady = 0
        if held.last < self.log.edge:
            # The step before it apart: only in its own one it can have held itself.
            if self.log.times[-2] > held.last:
                held.add_segment(self.log.times[-2], self.log.all_sums[-2])
            held.add_segment(self.log.edge, self.log.sums)
        take_out_own(held.timeline.held, request_id, work)
        if len(held.timeline.held) > SEGMENT_SIZE * 2 * MAX_SEGMENTS:
            halve_segments(held.timeline.held)
        if held.timeline.complete and not self._is_in_flight(request_id):
            self._release(request_id)

    def _is_in_flight(self, request_id: str) -> bool:
        return any(request_id in work.output.num_scheduled_tokens for work in self.log.in_flight)

    def drop_request(self, scheduler: Any, request_id: str, now: int) -> None:
        """The request has ended, or has its first token: at `now` (us) nothing of it is waited for."""
        held = self.unanswered.pop(request_id, None)
        # The usual case is the second one: its wait has ended, and nobody else waits.
        if held is None or not held.is_followed or (held.last and not self.log.edge):
            return
        if not held.ended:
            self._end_early(held, scheduler, now)
        elif held in self._ended:  # its first step runs, whose end is not noted any more
            self._ended.remove(held)
            drop_arrival(self.unmarked, held.timeline)
        self._release(request_id)

    def _end_early(self, held: HeldRequest, scheduler: Any, now: int) -> None:
        """It ended while it waited: what is known up to `now`, also of the step that runs."""
        if not self.log.edge:
            self._begin_log(held.timeline.added)
        self.log.settle()
        work = self.log.in_flight[0] if self.log.in_flight else StepWork(_NO_STEP, now, 0, 0, 0)
        if work.total:  # else no step has followed the last one, and the time since then is idle
            self._end_turnaround(work, now)
        begin = max(work.scheduled, self.log.edge)
        elapsed = max(now - begin, 0)
        if held.start is None:
            self._mark_start(held, work, begin, elapsed)
            drop_arrival(self.unmarked, held.timeline)
        held.ended = now
        self._name_holders(held, scheduler, work, elapsed)
        self._write_wait(held)
        if begin > held.last:
            held.add_segment(begin, held.sums)
        if elapsed and work.total:
            shares = split_step(elapsed, work.prefill, work.decode, work.encoder, work.total)
            held.timeline.held += (elapsed, *shares, 0, 0)

    def _release(self, request_id: str) -> None:
        self.followed.pop(request_id, None)
        # Also what is kept of other requests ends with the last one that waits.
        if (self.log.edge or self.log.in_flight) and not (
            self.followed or self.unmarked or self._ended
        ):
            self.log.reset()
