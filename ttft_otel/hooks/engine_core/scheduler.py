# SPDX-License-Identifier: Apache-2.0
"""Hooks in the engine core's scheduler: end of the queue, worker's marks, result to the API server.

engine_core.py attaches an EngineTimeline to each traced Request; these hooks fill it and put it as
one string into the trace_headers of the request's first output (carrier.py).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any, Final

from ttft_otel.hooks import encoder_runs, vllm_fields, wrap
from ttft_otel.hooks.engine_core import held_steps, kv, queue_reasons, waiting
from ttft_otel.hooks.engine_core.held_steps import followed, unanswered, unmarked
from ttft_otel.hooks.engine_core.prefill_chunks import record_chunk
from ttft_otel.hooks.engine_core.waiting import arrived, waiting_requests
from ttft_otel.model.names import header_names
from ttft_otel.tracing import carrier, clock
from ttft_otel.tracing.engine_timeline import EngineTimeline

log = logging.getLogger("ttft_otel")
MAX_AWAITING_REQUESTS: Final = 8192  # in awaiting_first_token
MAX_ABORTED_REQUESTS: Final = 256  # in aborted_timelines
MAX_ID_CHARS: Final = (
    256  # of their request IDs, which clients choose; the last ones are vLLM's own
)

# Scheduled requests without a first token, oldest first: only these cost anything per step.
awaiting_first_token: dict[str, EngineTimeline] = {}
# Serialized timelines of requests that ended without a first token, until the API server asks.
aborted_timelines: OrderedDict[str, str] = OrderedDict()
_freed_requests: list[str] = []  # freed inside update_from_output(), see record_freed()
_ANSWERED: Final = EngineTimeline(scheduled=1, complete=True, sent=True)  # of all that have a token
_in_update = [False]  # update_from_output() is running
dropped_requests = 0


def record_schedule(_: None, output: Any, scheduler: Any, *args: Any) -> None:
    """After schedule(): admit new traced requests, count chunks, mark the step for the worker."""
    new_requests = output.scheduled_new_reqs
    if not (new_requests or awaiting_first_token or arrived or waiting_requests):
        return  # most steps of a decoding engine
    if new_requests:
        for data in new_requests:
            request = scheduler.requests.get(data.req_id)
            timeline = getattr(request, "_ttft", None) or _find_unseen(request)
            if timeline is not None and timeline is not _ANSWERED:
                if len(awaiting_first_token) >= MAX_AWAITING_REQUESTS:
                    _drop_oldest()
                awaiting_first_token[data.req_id] = timeline
        if not (awaiting_first_token or arrived or waiting_requests):
            return
    now = clock.monotonic_ns() // 1000  # one time for all requests of the step
    preempted = getattr(output, "preempted_req_ids", None)
    if awaiting_first_token:
        _record_scheduled(scheduler, output, preempted, now)
    if followed or unmarked:
        held_steps.note_schedule(scheduler, output, now)
        if preempted:
            for request_id in preempted:
                if request_id in scheduler.requests:
                    held_steps.note_end(scheduler.requests[request_id])
    if arrived or waiting_requests:
        waiting.record_queue(scheduler, output, preempted, now)


def _record_scheduled(scheduler: Any, output: Any, preempted: Any, now: int) -> None:
    """Count the chunks of a step that was scheduled at `now`; note what stays behind."""
    tokens = output.num_scheduled_tokens
    encoding = output.scheduled_encoder_inputs
    if preempted:
        _record_preemptions(preempted)
    try:
        facts = scheduler._ttft  # as get_facts(), without a call
    except AttributeError:
        facts = vllm_fields.get_facts(scheduler)
    held = False
    for request_id, timeline in awaiting_first_token.items():
        own_tokens = tokens.get(request_id)
        if own_tokens is not None or request_id in encoding:
            held = True
            if not timeline.complete:
                request = scheduler.requests[request_id]
                record_chunk(timeline, facts, request, own_tokens or 0, output, now)
        if not timeline.complete:
            request = scheduler.requests.get(request_id)
            if request is not None:
                reason = queue_reasons.find_stall_reason(scheduler, output, request, timeline)
                waiting.note_stall(timeline, reason, now)
    if held:
        output._ttft = True  # survives pickling to the workers, which then measure this step


def _find_unseen(request: Any) -> EngineTimeline | None:
    """A timeline for a traced request whose arrival was not seen, as the hook that follows it is missing."""
    headers = getattr(request, "trace_headers", None)
    if not headers or header_names.CARRIER_KEY not in headers:
        return None
    request._ttft = EngineTimeline()
    unanswered[request.request_id] = None
    return request._ttft  # type: ignore[no-any-return]


def _drop_oldest() -> None:
    global dropped_requests
    del awaiting_first_token[next(iter(awaiting_first_token))]
    dropped_requests += 1
    if dropped_requests == 1:
        log.warning(
            "ttft-otel: more than %d traced requests wait for a first token; "
            "the engine's stages of the oldest are unattributed",
            MAX_AWAITING_REQUESTS,
        )


def _record_preemptions(ids: Any) -> None:
    for request_id in ids:
        timeline = awaiting_first_token.get(request_id)
        if timeline is not None:
            timeline.open_details().preempted += 1
            timeline.complete = False  # its prompt has to be scheduled again
            held_steps.follow_again(request_id)


def record_step(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> bool:
    """Before update_from_output(): add the step's worker record to the requests that were in it.

    True when there was any.
    """
    record = getattr(model_runner_output, "_ttft", None)
    unfinished = False
    if record:
        unfinished = record[2] & carrier.ENCODER_UNFINISHED
        runs = getattr(model_runner_output, "_ttft_runs", None)
        if runs and record[0] == clock.get_boot_number():  # else by another host's clock
            encoder_runs.note_runs(runs)
    now = clock.monotonic_ns() // 1000
    follows = False
    if followed or unmarked:
        follows = True
        held_steps.close_step(scheduler, scheduler_output, now, not awaiting_first_token)
    _in_update[0] = True
    if not awaiting_first_token:
        return False
    held = False
    tokens = scheduler_output.num_scheduled_tokens
    encoding = scheduler_output.scheduled_encoder_inputs
    for request_id, timeline in awaiting_first_token.items():
        if request_id in tokens or request_id in encoding:
            if follows:
                held_steps.add_own_step(request_id)
            if timeline.steps:
                timeline.add_step(record)
            else:  # most prompts have one
                timeline.steps.append(record or ())
            if unfinished:
                timeline.open_details().kept |= carrier.ENCODER_RUN_BIT
                encoder_runs.expect_run(request_id)
            timeline.entered = now
            held = True
    return held


def attach_timelines(held: bool | None, outputs: Any, scheduler: Any, *args: Any) -> None:
    """After update_from_output(): put each traced request's timeline onto its first output.

    held: what record_step() returned.
    """
    _in_update[0] = False
    if outputs and (held or _freed_requests):
        for batch in outputs.values():
            for output in batch.outputs:
                request_id = output.request_id
                timeline = awaiting_first_token.pop(request_id, None)
                if timeline is not None:
                    held_steps.drop_request(scheduler, request_id, 0)
                    output.trace_headers = _carry_timeline(timeline, output, scheduler)
    if _freed_requests:
        # Freed within this call, and no output carried their timelines away: they were aborted.
        for request_id in _freed_requests:
            _keep_aborted(request_id)
        _freed_requests.clear()


def _carry_timeline(timeline: EngineTimeline, output: Any, scheduler: Any) -> dict[str, str]:
    """The trace headers of the first output, with the timeline; its request keeps those of later ones."""
    carried = {header_names.CARRIER_KEY: carrier.encode_timeline(timeline)}
    remaining = None  # later outputs need no trace headers, unless vLLM's own tracing is on
    # They are on the scheduler since its first chunk was scheduled.
    facts = scheduler._ttft if timeline.scheduled else vllm_fields.get_facts(scheduler)
    if facts.vllm_traces:
        remaining = {**(output.trace_headers or {})}
        remaining.pop(header_names.CARRIER_KEY, None)
        carried |= remaining
    request = scheduler.requests.get(output.request_id)
    if request is not None:
        # vLLM copies them onto every output: without this, each later token would carry our string.
        request.trace_headers = remaining
        request._ttft = _ANSWERED  # its own would stay for the whole answer
    return carried


def record_freed(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before _free_request(): store the timeline of a request that ends without a first token."""
    timeline = getattr(request, "_ttft", None)
    if followed:
        held_steps.note_end(request)
    if timeline is None or timeline.sent:
        return
    held_steps.drop_request(scheduler, request.request_id, clock.now_us())
    waiting.end_wait(timeline, request.request_id, clock.now_us())
    # A request that was never scheduled is not in there yet.
    awaiting_first_token.setdefault(request.request_id, timeline)
    if timeline.read_details().moving:
        kv.tracked_blocks.pop(request.request_id, None)
    if _in_update[0]:
        # Its only output may still be created in this call of update_from_output().
        _freed_requests.append(request.request_id)
    else:
        _keep_aborted(request.request_id)


def _keep_aborted(request_id: str) -> None:
    timeline = awaiting_first_token.pop(request_id, None)
    if timeline is None:
        return
    aborted_timelines[request_id[-MAX_ID_CHARS:]] = carrier.encode_timeline(timeline)
    if len(aborted_timelines) > MAX_ABORTED_REQUESTS:
        aborted_timelines.popitem(last=False)


HOOKS: Final = {
    # What waits, or has no first token, is in `unanswered`; a new request may not be, see _find_unseen().
    "scheduler.schedule": wrap.Hook(
        after=record_schedule, ready=unanswered, watches=wrap.NEW_REQUESTS
    ),
    "scheduler.update": wrap.Hook(
        before=record_step,
        after=attach_timelines,
        ready=unanswered,
        runs_after_error=True,
    ),
    "scheduler.pause": wrap.Hook(after=waiting.record_pause, ready=unanswered),
    "scheduler.free": wrap.Hook(before=record_freed, ready=unanswered),
}
