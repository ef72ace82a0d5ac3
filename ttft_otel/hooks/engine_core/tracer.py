# SPDX-License-Identifier: Apache-2.0
"""EngineCoreTracer: what the engine core measures of its traced requests, from vLLM's calls that hooks wrap.

A request gets an EngineTimeline when it arrives. The scheduler's and the connectors' hooks fill it, and put
it as one string into the trace_headers of the request's first output (carrier.py), for the API server.
Each part that needs a state of its own has an owner: queue_reasons.py, held_steps.py and transfers.py.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from functools import cache
from typing import Any, Final

from ttft_otel.hooks import vllm_fields
from ttft_otel.hooks.api_server import identify_server, measure_age
from ttft_otel.hooks.engine_core import queue_reasons, transfers
from ttft_otel.hooks.engine_core.held_steps import HeldRequests
from ttft_otel.hooks.engine_core.queue_reasons import WaitingQueue
from ttft_otel.hooks.engine_core.transfers import BlockTransfers, EncodingLeases
from ttft_otel.hooks.vllm_fields import SchedulerFacts
from ttft_otel.hooks.worker.model_runners import MAX_UNFINISHED_STEPS, WorkerTracer, stamp_time
from ttft_otel.hooks.wrap import Patcher
from ttft_otel.model import breakdown
from ttft_otel.model.names import header_names, keys
from ttft_otel.tracing import carrier, clock, context, guard, handoff, settings
from ttft_otel.tracing.carrier import (
    HEADER_LENGTH,
    SOURCE_ALLOCATED,
    SOURCE_MASK,
    EncoderRun,
    EngineTimeline,
    QueueReport,
)
from ttft_otel.tracing.engine_report import REPORT_VERSION, EngineReport, encode_report
from ttft_otel.tracing.guard import Hook
from ttft_otel.tracing.request_trace import identity

log = logging.getLogger("ttft_otel")
MAX_AWAITING_REQUESTS: Final = 8192  # in EngineCoreTracer.awaiting, .resumed and .own_reports
MAX_ABORTED_REQUESTS: Final = 256  # in EngineCoreTracer.aborted
# Of the IDs of aborted requests, which clients choose; the last ones are vLLM's own.
MAX_ID_CHARS: Final = 256
# Our router's request IDs, which front-ends put into their engine's, with a word of theirs before it.
_ROUTED_ID: Final = re.compile(r"(?:^|-)(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})(?:-|$)")
# Of all requests that have a first token.
_ANSWERED: Final = EngineTimeline(scheduled=1, complete=True, sent=True)


class StepMark:
    """On a step that the worker is to measure; pickled for it, it is the time then, in microseconds."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (clock.now_us(),)


_STEP_MARK: Final = StepMark()


class EngineCoreTracer:
    """The state of one engine core's traced requests; its methods are the hooks.

    patcher: of this process, which knows the hooks that are missing. worker: the tracer of this process,
    whose steps may be those of this engine core.
    """

    def __init__(self, patcher: Patcher, worker: WorkerTracer) -> None:
        self.patcher = patcher
        self.worker = worker
        self.held = HeldRequests()
        self.queue = WaitingQueue(self.held)
        self.blocks = BlockTransfers(patcher)
        self.encodings = EncodingLeases(patcher)
        #: Of requests that this engine core traces by itself, see _begin_report(), until their first token.
        #: Filled by the input thread, emptied by the main thread.
        self.own_reports: OrderedDict[str, EngineReport] = OrderedDict()
        #: Scheduled requests without a first token, oldest first: only these cost anything per step.
        self.awaiting: dict[str, EngineTimeline] = {}
        #: Serialized timelines of requests that ended without a first token, until the API server asks.
        self.aborted: OrderedDict[str, str] = OrderedDict()
        #: Requests freed inside update_from_output(), see record_freed().
        self.freed: list[str] = []
        #: update_from_output() is running.
        self.is_updating = False
        #: Sessions whose next input began inside of it: arguments of _resume().
        self.resuming: list[tuple[Any, ...]] = []
        #: Sessions before the end of their latest input's first step -> that step, None before it.
        self.resumed: dict[str, Any] = {}
        #: Requests answered before their encoder had ended; its run as JSON once a worker has reported it.
        self.encoder_runs: OrderedDict[str, str] = OrderedDict()
        #: Requests beyond MAX_AWAITING_REQUESTS, of `awaiting` or `resumed`.
        self.dropped_requests = 0

    def build_hooks(self) -> dict[str, Hook]:
        """Hooks of the functions that have an address; connectors' methods: install.py."""
        # Requests that wait, or have no first token, are in it; a new request may not be, see _find_unseen().
        unanswered = self.held.unanswered
        return {
            "engine.input": Hook(
                before=self.stamp_input, after=self.attach_timeline, extend=self.add_queries
            ),
            "scheduler.schedule": Hook(
                after=self.record_schedule, ready=unanswered, wrap=guard.wrap_new_requests
            ),
            "scheduler.update": Hook(
                before=self.record_step,
                after=self.attach_timelines,
                ready=unanswered,
                runs_after_error=True,
            ),
            "scheduler.pause": Hook(after=self.record_pause, ready=unanswered),
            "scheduler.free": Hook(before=self.record_freed, ready=unanswered),
            "scheduler.session": Hook(before=self.note_waiting, after=self.record_input),
            # Also while nobody waits: who waits at its end has come meanwhile.
            "engine.dummy": Hook(before=stamp_time, after=self.record_dummy),
            "kv.arrive": Hook(before=self.blocks.record_arrivals, ready=self.blocks.tracked),
        }

    # Arrival, in the engine core's input thread.

    def stamp_input(
        self, core: Any, request: Any, *args: Any, **kwargs: Any
    ) -> int | EngineReport | None:
        """Before preprocess_add_request(): end of `ipc`; None for a request that is not traced.

        A report for one whose front-end has no hooks.
        """
        headers = request.trace_headers
        mark = headers.get(header_names.CARRIER_KEY) if headers else None
        if mark in (carrier.ASKED, carrier.LATER_INPUT):
            return clock.monotonic_ns() // 1000
        if mark is None:
            return _begin_report(self.patcher, core, request)
        # Off again: vLLM would put it onto every output.
        rest = {key: value for key, value in headers.items() if key != header_names.CARRIER_KEY}
        request.trace_headers = rest or None
        return None

    def attach_timeline(
        self, token: int | EngineReport, result: Any, core: Any, *args: Any, **kwargs: Any
    ) -> None:
        """After preprocess_add_request(): attach a timeline to vLLM's Request, with which it is freed."""
        request = result[0]
        if isinstance(token, EngineReport):
            self.own_reports[request.request_id] = token
            if len(self.own_reports) > MAX_AWAITING_REQUESTS:
                self.own_reports.popitem(last=False)
            token = token.added
        timeline = request._ttft_timeline = EngineTimeline(added=token)
        try:
            is_paused = core.scheduler._pause_state
        except AttributeError:
            is_paused = False
        if is_paused:  # an engine core runs no step then that could note it
            timeline.open_details().reasons += (token, queue_reasons.PAUSED)
        # Its trace_headers are replaced at the first output; step_log.py reads the traceparent here.
        headers = request._ttft_headers = request.trace_headers
        if headers and headers.get(header_names.CARRIER_KEY) == carrier.LATER_INPUT:
            # vLLM keeps nothing else of this request for the session that it continues.
            request.sampling_params._ttft_input = (timeline, headers)
            return
        # A deque, because this is the input thread, and the main thread takes requests out of it.
        self.queue.arrived.append(self.held.follow_request(request.request_id, timeline))

    def add_queries(self, core: type[Any]) -> None:
        """Add the utility methods to the class `core`: vLLM looks them up by name on the engine core."""
        setattr(core, carrier.ABORTED_QUERY, self.answer_aborted)
        setattr(core, carrier.KEPT_BLOCKS_QUERY, self.blocks.answer_kept_blocks)
        setattr(core, carrier.KEPT_ITEMS_QUERY, self.encodings.answer_kept_items)
        setattr(core, carrier.ENCODER_QUERY, self.answer_encoder_run)
        setattr(core, carrier.WAITING_QUERY, lambda core: self.answer_waiting(core.scheduler))

    # A later input of a stream reaches its session, which is one request of the scheduler.

    def note_waiting(self, scheduler: Any, session: Any, update: Any) -> bool:
        """Before _update_request_as_session(): whether the session had nothing to do."""
        return getattr(session.status, "name", "") == "WAITING_FOR_STREAMING_REQ"

    def record_input(
        self, was_waiting: bool, _: None, scheduler: Any, session: Any, update: Any
    ) -> None:
        """After _update_request_as_session(): the session goes on with the input `update`."""
        timeline, headers = vars(update.sampling_params).pop("_ttft_input", (None, None))
        if self.is_updating:  # the output of the input before still has its timeline to carry
            self.resuming.append((session, timeline, headers, was_waiting))
        else:
            self._resume(session, timeline, headers, was_waiting)

    def _resume(
        self, session: Any, timeline: EngineTimeline | None, headers: Any, was_waiting: bool
    ) -> None:
        session._ttft_timeline, session._ttft_headers = timeline, headers
        if timeline is None:
            return
        request_id = session.request_id
        if len(self.resumed) >= MAX_AWAITING_REQUESTS:
            self._drop_oldest(self.resumed)
        self.resumed[request_id] = None
        if was_waiting:
            held = self.held.follow_request(request_id, timeline)
        else:  # for the input before it
            held = self.held.note_unseen(request_id, timeline)
            timeline.open_details().reasons += (timeline.added, queue_reasons.OTHER)
        self.queue.arrived.append(held)

    def _drop_oldest(self, kept: dict[str, Any]) -> None:
        """Make room in `awaiting` or `resumed`."""
        del kept[next(iter(kept))]
        self.dropped_requests += 1
        # Once: under such a load every request would log it.
        if self.dropped_requests == 1:
            log.warning(
                "ttft-otel: more than %d traced requests wait for a first token; "
                "the engine's stages of the oldest are unattributed",
                MAX_AWAITING_REQUESTS,
            )

    # The scheduler takes the request.

    def record_schedule(self, _: None, output: Any, scheduler: Any, *args: Any) -> None:
        """After schedule(): admit new traced requests, count chunks, mark the step for the worker."""
        new_requests = output.scheduled_new_reqs
        awaiting, queue, held = self.awaiting, self.queue, self.held
        if not (new_requests or awaiting or queue.arrived or queue.waiting):
            return  # most steps of a decoding engine
        if new_requests:
            for data in new_requests:
                request = scheduler.requests.get(data.req_id)
                timeline = getattr(request, "_ttft_timeline", None) or self._find_unseen(request)
                if timeline is not None and timeline is not _ANSWERED:
                    if self.resumed and data.req_id in self.resumed:
                        self.resumed[data.req_id] = output
                    if len(awaiting) >= MAX_AWAITING_REQUESTS:
                        self._drop_oldest(awaiting)
                    awaiting[data.req_id] = timeline
            if not (awaiting or queue.arrived or queue.waiting):
                return
        now = clock.monotonic_ns() // 1000  # one time for all requests of the step
        throttled = bool(args and args[0])  # vLLM's throttle_prefills
        preempted = getattr(output, "preempted_req_ids", None)
        if awaiting:
            self._record_scheduled(scheduler, output, preempted, now, throttled)
        if held.followed or held.unmarked:
            held.note_schedule(scheduler, output, now)
            if preempted:
                for request_id in preempted:
                    if request_id in scheduler.requests:
                        held.note_end(scheduler.requests[request_id])
        if queue.arrived or queue.waiting:
            queue.record_queue(scheduler, output, preempted, now, throttled)

    def _record_scheduled(
        self, scheduler: Any, output: Any, preempted: Any, now: int, throttled: bool
    ) -> None:
        """Count the chunks of a step that was scheduled at `now`; note what stays behind."""
        tokens = output.num_scheduled_tokens
        encoding = output.scheduled_encoder_inputs
        if preempted:
            self._record_preemptions(preempted)
        facts = vllm_fields.get_facts(scheduler)
        has_part = False
        for request_id, timeline in self.awaiting.items():
            own_tokens = tokens.get(request_id)
            if own_tokens is not None or request_id in encoding:
                has_part = True
                if not timeline.complete:
                    request = scheduler.requests[request_id]
                    self._record_chunk(timeline, facts, request, own_tokens or 0, output, now)
            elif not timeline.complete and timeline.scheduled:
                timeline.open_details().left_out = now
            if not timeline.complete:
                request = scheduler.requests.get(request_id)
                if request is not None:
                    reason = queue_reasons.find_stall_reason(
                        scheduler, output, request, timeline, throttled
                    )
                    self.queue.note_stall(timeline, reason, now)
        if has_part:
            output._ttft_marked = _STEP_MARK

    def record_pause(self, _: None, result: Any, scheduler: Any, pause_state: Any) -> None:
        """After set_pause_state(): an engine core may run no step then that leaves requests out.

        With PAUSED_NEW the prompts that have begun go on.
        """
        self.queue.record_pause(pause_state)
        if getattr(pause_state, "name", "") != "PAUSED_ALL":
            return
        now = clock.now_us()
        for timeline in self.awaiting.values():
            if not timeline.complete:
                timeline.open_details().left_out = now
                self.queue.note_stall(timeline, queue_reasons.PAUSED, now)

    def record_dummy(self, begun: int, result: Any, core: Any) -> None:
        """After execute_dummy_batch(): who came meanwhile has waited for it."""
        self.held.close_dummy(core.scheduler, begun, clock.now_us())

    def _find_unseen(self, request: Any) -> EngineTimeline | None:
        """A timeline for a traced request whose arrival was not seen, as the hook at it is missing."""
        headers = getattr(request, "trace_headers", None)
        if not headers or headers.get(header_names.CARRIER_KEY) != carrier.ASKED:
            return None
        timeline = request._ttft_timeline = EngineTimeline()
        self.held.note_unseen(request.request_id, timeline)
        return timeline

    def _record_preemptions(self, ids: Any) -> None:
        for request_id in ids:
            timeline = self.awaiting.get(request_id)
            if timeline is not None:
                timeline.open_details().preempted += 1
                timeline.complete = False  # its prompt has to be scheduled again
                self.held.follow_again(request_id)

    # The chunks of its prompt.

    def _record_chunk(
        self,
        timeline: EngineTimeline,
        facts: SchedulerFacts,
        request: Any,
        own_tokens: int,
        output: Any,
        now: int,
    ) -> None:
        """Count one prefill chunk of one request; its times come from the worker.

        own_tokens: of this request in the step `output`, which was scheduled at `now` (us).
        """
        if timeline.scheduled:
            timeline.begin_turn(now)
            _record_later_chunk(timeline, facts, request, own_tokens, output)
            return
        timeline.scheduled = now
        end, request_id = request.num_computed_tokens, request.request_id
        queue = self.queue
        if queue.arrived and queue.arrived[0].timeline is timeline:
            # Taken by its first step, as most requests are: there is no wait to follow.
            queue.arrived.popleft()
        elif queue.waiting:
            queue.end_wait(timeline, request_id, now)
        timeline.high = end
        if end != own_tokens:
            timeline.cached = end - own_tokens
        timeline.prompt = request.num_prompt_tokens
        timeline.rank = facts.rank
        timeline.chunks = 1
        timeline.own_tokens = own_tokens
        timeline.step_tokens = output.total_num_scheduled_tokens
        if facts.kv_connector is not None and self.blocks.close_wait(timeline, request, facts):
            timeline.open_details().wait_lost = True
        if getattr(request, "mm_features", None):
            self._open_items(timeline, facts, request)
            _settle_items(timeline, facts, request, output)
        if request_id in output.scheduled_encoder_inputs:
            timeline.open_details().encoder_first = True
        timeline.complete = end >= request.num_tokens
        self.held.end_wait(facts, timeline, request_id, now)

    def _open_items(self, timeline: EngineTimeline, facts: SchedulerFacts, request: Any) -> None:
        """The media items of a request whose first chunk was scheduled."""
        if not timeline.read_details().media:
            self._open_media(timeline, request, facts.ec_connector)
        if timeline.cached:
            transfers.skip_cached(timeline, request.mm_features, timeline.cached)
        details = timeline.open_details()
        details.wait_lost |= facts.ec_may_wait and not self.patcher.is_active("transfer.wait")

    def _open_media(
        self, timeline: EngineTimeline, request: Any, connector: Any, available: bool = True
    ) -> list[int]:
        is_seen = self.patcher.is_active("transfer.place")
        return transfers.open_items(timeline, request, connector, is_seen, available)

    # The encoder-cache connector, on the scheduler's side.

    def record_ec_wait(
        self, _: None, available: Any, connector: Any, request: Any, *args: Any, **kw: Any
    ) -> None:
        """After ensure_cache_available(): the request waits from the first False to the first True.

        available: what the connector answered. vLLM asks in every step, also while decoding; once the
        request is scheduled, further waits belong to `prefill.stall` and are not recorded here.
        """
        timeline = getattr(request, "_ttft_timeline", None)
        if timeline is None or timeline.scheduled:
            return
        # Before the wait is judged: what the connector has at its first answer is not this request's.
        if not timeline.read_details().media and getattr(request, "mm_features", None):
            self._open_media(timeline, request, connector, available)
        elif timeline.details is None and available:
            return
        details = timeline.open_details()
        # From the first "not yet" on: later ones must not move the start of the wait.
        if not available:
            details.asked = details.asked or clock.now_us()
        elif details.asked:
            details.waits += (breakdown.CODE_EC_TRANSFER, details.asked, clock.now_us())
            details.asked = 0

    def note_allocated(
        self, _: None, result: Any, connector: Any, request: Any, index: int, *args: Any, **kw: Any
    ) -> None:
        """After update_state_after_alloc(): space was allocated for item `index`, to encode or load it."""
        timeline = getattr(request, "_ttft_timeline", None)
        if timeline is None or timeline.sent:
            return
        media = timeline.read_details().media or self._open_media(timeline, request, connector)
        # After a preemption space is allocated again; where the item came from first stays.
        if not media[HEADER_LENGTH + index] & SOURCE_MASK:
            media[HEADER_LENGTH + index] |= SOURCE_ALLOCATED

    # The output of its steps.

    def record_step(self, scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> bool:
        """Before update_from_output(): add the step's worker record to the requests that were in it.

        True when there was any.
        """
        record = getattr(model_runner_output, "_ttft_record", None)
        unfinished = record and record[carrier.RECORD_FLAGS] & carrier.ENCODER_UNFINISHED
        if record and self.encoder_runs:
            runs = getattr(model_runner_output, "_ttft_runs", None)
            # By another host's clock they would mean nothing here.
            if runs and record[carrier.RECORD_BOOT] == clock.get_boot_number():
                self._note_runs(runs)
        now = clock.monotonic_ns() // 1000
        awaiting, held = self.awaiting, self.held
        follows = False
        if held.followed or held.unmarked:
            follows = True
            held.close_step(scheduler, scheduler_output, now, not awaiting)
        self.is_updating = True
        if not awaiting:
            return False
        has_part = False
        tokens = scheduler_output.num_scheduled_tokens
        encoding = scheduler_output.scheduled_encoder_inputs
        for request_id, timeline in awaiting.items():
            if self.resumed:
                if self.resumed.get(request_id, scheduler_output) is not scheduler_output:
                    continue  # a step for the input before, which ran already when its answer ended
                self.resumed.pop(request_id, None)
            if request_id in tokens or request_id in encoding:
                if follows:
                    held.add_own_step(request_id)
                timeline.add_step(record, now)
                if unfinished:
                    timeline.open_details().kept |= carrier.ENCODER_RUN_BIT
                    self.encoder_runs[request_id] = carrier.PENDING_ANSWER
                    if len(self.encoder_runs) > MAX_UNFINISHED_STEPS:
                        self.encoder_runs.popitem(last=False)
                has_part = True
            elif timeline.scheduled:
                timeline.note_other_step(now)
        return has_part

    def attach_timelines(
        self, has_part: bool | None, outputs: Any, scheduler: Any, *args: Any, **kwargs: Any
    ) -> None:
        """After update_from_output(): put each traced request's timeline onto its first output.

        has_part: what record_step() returned.
        """
        self.is_updating = False
        if outputs and (has_part or self.freed):
            for batch in outputs.values():
                for output in batch.outputs:
                    request_id = output.request_id
                    timeline = self.awaiting.pop(request_id, None)
                    if timeline is not None:
                        self.held.drop_request(scheduler, request_id, 0)
                        output.trace_headers = _carry_timeline(timeline, output, scheduler)
                        if self.own_reports:
                            self._send_own(output)
        if self.freed:
            # Freed within this call, and no output carried their timelines away: they were aborted.
            for request_id in self.freed:
                self._keep_aborted(request_id)
            self.freed.clear()
        if self.resuming:
            for resumed in self.resuming:
                self._resume(*resumed)
            self.resuming.clear()

    def _send_own(self, output: Any) -> None:
        """Its front-end does not read the timeline on its first output: the exporter gets it."""
        report = self.own_reports.pop(output.request_id, None)
        if report is not None:
            text = output.trace_headers.pop(header_names.CARRIER_KEY)
            output.trace_headers = output.trace_headers or None
            error = keys.ERROR_ENGINE if vllm_fields.lacks_first_token(output) else ""
            _send_report(report, text, error)

    # Its end.

    def record_freed(self, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        """Before _free_request(): store the timeline of a request that ends without a first token."""
        timeline = getattr(request, "_ttft_timeline", None)
        if self.held.followed:
            self.held.note_end(request)
        if timeline is None or timeline.sent:
            return
        request_id = request.request_id
        self.resumed.pop(request_id, None)
        self.held.drop_request(scheduler, request_id, clock.now_us())
        self.queue.end_wait(timeline, request_id, clock.now_us())
        # A request that was never scheduled is not in there yet.
        self.awaiting.setdefault(request_id, timeline)
        if timeline.read_details().moving:
            self.blocks.tracked.pop(request_id, None)
        if self.is_updating:
            # Its only output may still be created in this call of update_from_output().
            self.freed.append(request_id)
        else:
            self._keep_aborted(request_id)

    def _keep_aborted(self, request_id: str) -> None:
        timeline = self.awaiting.pop(request_id, None)
        if timeline is None:
            return
        text = carrier.encode_timeline(timeline)
        if report := self.own_reports.pop(request_id, None):
            _send_report(report, text, keys.ERROR_CANCELLED)
            return
        self.aborted[request_id[-MAX_ID_CHARS:]] = text
        if len(self.aborted) > MAX_ABORTED_REQUESTS:
            self.aborted.popitem(last=False)

    def answer_aborted(self, request_id: str) -> str:
        """Utility call: the timeline of a request that ended without a first token; "" when unknown.

        Removes it, so that it can be read once.
        """
        return self.aborted.pop(request_id[-MAX_ID_CHARS:], "")

    # What waits now.

    def answer_waiting(self, scheduler: Any) -> str:
        """Utility call: the traced requests that wait in the queue of `scheduler`, as QueueReport JSON."""
        found = self.queue.count_reasons(bool(getattr(scheduler, "_pause_state", 0)))
        for request_id, timeline in self.awaiting.items():
            if not timeline.complete and timeline.read_details().preempted:
                status = getattr(scheduler.requests.get(request_id), "status", None)
                if getattr(status, "name", "") == "PREEMPTED":
                    reasons = timeline.read_details().reasons
                    found[reasons[-1] if reasons else queue_reasons.OTHER] += 1
        oldest = next(iter(self.queue.waiting), "")
        holders = self.held.list_holders(oldest, getattr(scheduler, "running", ()))
        return carrier.encode_answer(QueueReport(found, holders))

    # An encoder that had not ended when its request was answered. Where the worker is this process, it is
    # asked. Where it is one of its own, runs come with the output of a later step; of the last ones before
    # an instance falls idle nothing is known.

    def _note_runs(self, runs: dict[str, tuple[int, int]]) -> None:
        for request_id, interval in runs.items():
            if request_id in self.encoder_runs:
                self.encoder_runs[request_id] = carrier.encode_answer(EncoderRun(*interval))

    def answer_encoder_run(self, request_id: str) -> str:
        """Utility call: from when to when a request's encoder ran, as EncoderRun JSON.

        PENDING_ANSWER while it runs, or has not been reported; "" when nothing is known.
        """
        if request_id not in self.worker.unfinished_steps:
            reported = self.encoder_runs.get(request_id, "")
            # "Pending" stays: the API server asks again, and the run may be reported in between.
            if reported != carrier.PENDING_ANSWER:
                self.encoder_runs.pop(request_id, None)
            return reported
        interval = self.worker.take_run(request_id)
        if interval is None:
            return carrier.PENDING_ANSWER
        self.encoder_runs.pop(request_id, None)
        return carrier.encode_answer(EncoderRun(*interval))


def _record_later_chunk(
    timeline: EngineTimeline, facts: SchedulerFacts, request: Any, own_tokens: int, output: Any
) -> None:
    end = request.num_computed_tokens
    # After a preemption tokens below the highest computed one are computed again.
    if (start := end - own_tokens) < timeline.high:
        timeline.open_details().recomputed += min(end, timeline.high) - start
    if end > timeline.high:
        timeline.high = end
    timeline.chunks += 1
    timeline.own_tokens += own_tokens
    timeline.step_tokens += output.total_num_scheduled_tokens
    _settle_items(timeline, facts, request, output)
    timeline.complete = end >= request.num_tokens


def _settle_items(
    timeline: EngineTimeline, facts: SchedulerFacts, request: Any, output: Any
) -> None:
    """The media items that the step `output` encodes or loads, if the request has any."""
    if timeline.details is not None and timeline.details.media:
        encoding = output.scheduled_encoder_inputs
        own_items = encoding.get(request.request_id, ())
        step_items = sum(map(len, encoding.values()))
        transfers.settle_items(timeline, request, facts.ec_connector, own_items, step_items)


def _carry_timeline(timeline: EngineTimeline, output: Any, scheduler: Any) -> dict[str, str]:
    """The trace headers of the first output, with the timeline; its request keeps those of later ones."""
    carried = {header_names.CARRIER_KEY: carrier.encode_timeline(timeline)}
    remaining = None  # later outputs need no trace headers, unless vLLM's own tracing is on
    # They are on the scheduler since its first chunk was scheduled.
    facts = scheduler._ttft_facts if timeline.scheduled else vllm_fields.get_facts(scheduler)
    if facts.vllm_traces:
        remaining = {**(output.trace_headers or {})}
        remaining.pop(header_names.CARRIER_KEY, None)
        carried |= remaining
    request = scheduler.requests.get(output.request_id)
    if request is not None:
        # vLLM copies them onto every output: without this, each later token would carry our string.
        request.trace_headers = remaining
        request._ttft_timeline = _ANSWERED  # its own would stay for the whole answer
    return carried


# Requests of front-ends without our hooks: the engine core itself sends what it has measured of them. vLLM's
# Rust front-end is one, and so is any other client of the engine core's sockets. An API server with our
# hooks leaves a mark in the trace headers of each request, traced or not; a request without one has nobody
# who would read a timeline in its first output.


def _begin_report(patcher: Patcher, core: Any, request: Any) -> EngineReport | None:
    """In the input thread: an EngineCoreRequest without our key has come to `core`; None: not traced."""
    is_generation = getattr(request, "sampling_params", None) is not None
    # vLLM makes requests of the first kind to free another instance's KV blocks; the second one's
    # later parts have the ID of the first one.
    if not is_generation or getattr(request, "abort_immediately", False):
        return None
    if getattr(request, "resumable", False):
        return None
    chosen = settings.get_settings()
    headers = request.trace_headers or {}
    name = str(getattr(request, "external_req_id", None) or request.request_id)
    parent, routed = headers.get(header_names.TRACEPARENT, ""), None
    if not parent:
        routed = _ROUTED_ID.search(name)
        parent = routed[1] if routed else ""
    found = context.start_context(parent, headers.get(header_names.TRACESTATE, ""), chosen)
    if not (found.sampled or chosen.metrics):
        return None
    if not identity.is_known and (config := getattr(core, "vllm_config", None)) is not None:
        identify_server(patcher, config)
    _begin_sending()
    added = clock.now_us()
    # As an API server's, so that this request can be named as the holder of another one.
    request.trace_headers = {
        **headers,
        header_names.TRACEPARENT: found.format_traceparent(),
        header_names.CARRIER_KEY: carrier.ASKED,
    }
    return EngineReport(
        REPORT_VERSION,
        found,
        (routed[1] if routed else name)[:256],
        identity.role or vllm_fields.get_request_role(request) or identity.default_role,
        routed is not None,
        identity.model,
        identity.kv_connector,
        identity.ec_connector,
        identity.takes_encodings,
        added - _measure_age(core, request),
        added,
    )


@cache
def _begin_sending() -> None:
    """At the first of them."""
    log.info(
        "ttft-otel: requests come from a front-end without its hooks: the engine core sends their "
        "stages, from its input to the first token that leaves it"
    )
    # In this thread: it takes milliseconds, which a step would wait for.
    handoff.get_sender().start_exporter()


def _send_report(report: EngineReport, timeline: str, error: str) -> None:
    """Its first token leaves the engine core now, or it has ended without one for the reason `error`."""
    report.left, report.timeline, report.error = clock.now_us(), timeline, error
    handoff.get_sender().send(encode_report(report))


def _measure_age(core: Any, request: Any) -> int:
    """Microseconds since the request's front-end had it, by the wall clock that both share; 0 unknown."""
    addresses = getattr(getattr(core, "addresses", None), "inputs", ("ipc:",))
    index = getattr(request, "client_index", 0)
    # A front-end on another host has another clock.
    if not (index < len(addresses) and str(addresses[index]).startswith(("ipc:", "tcp://127."))):
        return 0
    return measure_age(getattr(request, "arrival_time", None))
