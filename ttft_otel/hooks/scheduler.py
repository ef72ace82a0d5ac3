# SPDX-License-Identifier: Apache-2.0
"""Engine core: end of the queue, the join with the worker's marks, and their way back to the API server.

wrap.py hangs these around Scheduler's methods; engine.py gives each traced Request its Journey;
what is known travels as one string in the first output's trace_headers (carrier.py).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any, Final

from ttft_otel import carrier, clock, names
from ttft_otel.carrier import Journey
from ttft_otel.hooks import fields, kv, wrap

log = logging.getLogger("ttft_otel")
AWAITING_LIMIT: Final = 8192
DEAD_LIMIT: Final = 256

# Scheduled, and without a first token yet: only these cost anything per step.
running: dict[str, Journey] = {}
dead: OrderedDict[str, str] = OrderedDict()  # ended without a first token, until asked for
_freed: list[str] = []
_inside = [False]
dropped = 0


def scheduled(_: None, output: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After schedule(): admit new traced requests, note who is in this step, mark it for the worker."""
    fresh = output.scheduled_new_reqs
    if not fresh and not running:
        return
    for data in fresh:
        _admit(scheduler.requests.get(data.req_id))
    if not running:
        return
    now = clock.now()
    tokens = output.num_scheduled_tokens
    encoding = output.scheduled_encoder_inputs
    preempted = getattr(output, "preempted_req_ids", None)
    if preempted:
        _preempt(preempted)
    held = False
    for request_id, journey in running.items():
        if request_id in tokens or request_id in encoding:
            held = True
            if not journey.complete:
                _chunk(journey, scheduler, output, request_id, now)
    if held:
        output._ttft = True  # one attribute that survives pickling: workers measure this step


def _admit(request: Any) -> None:
    journey = getattr(request, "_ttft", None)
    if journey is None:
        headers = getattr(request, "trace_headers", None)
        if not headers or names.CARRIER not in headers:
            return
        journey = request._ttft = Journey()
    if len(running) >= AWAITING_LIMIT:
        _room()
    running[request.request_id] = journey


def _room() -> None:
    global dropped
    del running[next(iter(running))]
    dropped += 1
    if dropped == 1:
        log.warning("ttft-otel: more than %d requests await a token; oldest lost", AWAITING_LIMIT)


def _preempt(ids: Any) -> None:
    for request_id in ids:
        journey = running.get(request_id)
        if journey is not None:
            journey.preempted += 1
            journey.complete = False


def _chunk(journey: Journey, scheduler: Any, output: Any, request_id: str, now: int) -> None:
    """One prefill chunk of one request: counts only, times come from the worker."""
    request = scheduler.requests[request_id]
    own = output.num_scheduled_tokens.get(request_id, 0)
    end = request.num_computed_tokens
    encoding = output.scheduled_encoder_inputs
    if not journey.scheduled:
        _first(journey, scheduler, request, end - own, now)
        journey.encoder_first = request_id in encoding
    if end - own < journey.high:
        journey.recomputed += min(end, journey.high) - end + own
    if end > journey.high:
        journey.high = end
    journey.chunks += 1
    journey.own_tokens += own
    journey.step_tokens += output.total_num_scheduled_tokens
    if encoding:
        journey.own_items += len(encoding.get(request_id, ()))
        journey.step_items += sum(map(len, encoding.values()))
    journey.complete = end >= request.num_tokens


def _first(journey: Journey, scheduler: Any, request: Any, start: int, now: int) -> None:
    """The first chunk: the queue ends, `start` tokens were cached."""
    facts = fields.facts(scheduler)
    journey.scheduled = now
    journey.cached = journey.high = start
    journey.prompt = request.num_prompt_tokens
    journey.rank = facts.rank
    if facts.loads:
        journey.wait_lost = kv.scheduled(journey, request.request_id, facts.block)
    features = getattr(request, "mm_features", None)
    if features:
        journey.items = len(features)
        journey.wait_lost |= facts.waits and not wrap.active("transfer.wait")


def updating(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> bool:
    """Before update_from_output(): give this step's worker record to the requests it held."""
    record = getattr(model_runner_output, "_ttft", None)
    now = clock.now()
    tokens = scheduler_output.num_scheduled_tokens
    encoding = scheduler_output.scheduled_encoder_inputs
    held = False
    for request_id, journey in running.items():
        if request_id in tokens or request_id in encoding:
            journey.step(record)
            journey.entered = now
            held = True
    _inside[0] = True
    return held


def updated(held: bool | None, outputs: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After update_from_output(): the first output of a traced request carries its marks away."""
    _inside[0] = False
    if outputs and (held or _freed):
        for batch in outputs.values():
            for output in batch.outputs:
                journey = running.pop(output.request_id, None)
                if journey is not None:
                    _carry(journey, output, scheduler)
    for request_id in _freed:
        _bury(request_id)
    _freed.clear()


def _carry(journey: Journey, output: Any, scheduler: Any) -> None:
    kept = None  # later tokens need not carry anything, unless vLLM traces by itself
    sent = {names.CARRIER: carrier.fold(journey)}
    if fields.facts(scheduler).tracing:
        kept = {**(output.trace_headers or {})}
        kept.pop(names.CARRIER, None)
        sent |= kept
    output.trace_headers = sent
    request = scheduler.requests.get(output.request_id)
    if request is not None:
        request.trace_headers = kept


def freed(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before _free_request(): a request that ends without a first token is kept for the asking."""
    journey = getattr(request, "_ttft", None)
    if journey is None or journey.sent:
        return
    running.setdefault(request.request_id, journey)
    if journey.moving:
        kv.moving.pop(request.request_id, None)
    if _inside[0]:
        _freed.append(request.request_id)  # its only output may still be made in this very call
    else:
        _bury(request.request_id)


def _bury(request_id: str) -> None:
    journey = running.pop(request_id, None)
    if journey is None:
        return
    dead[request_id] = carrier.fold(journey)
    if len(dead) > DEAD_LIMIT:
        dead.popitem(last=False)


HOOKS: Final = {
    "scheduler.schedule": wrap.Hook(after=scheduled),
    "scheduler.update": wrap.Hook(before=updating, after=updated, ready=running, arrives=True),
    "scheduler.free": wrap.Hook(before=freed),
}
