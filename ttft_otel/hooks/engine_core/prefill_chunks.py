# SPDX-License-Identifier: Apache-2.0
"""Count the chunks of traced requests' prompts; scheduler.py calls for each that was scheduled, and what
is found goes into the request's EngineTimeline. The first one ends its wait in the queue.
"""

from __future__ import annotations

from typing import Any

from ttft_otel.hooks import wrap
from ttft_otel.hooks.engine_core import ec_items, held_steps, kv, waiting
from ttft_otel.hooks.engine_core.waiting import arrived, waiting_requests
from ttft_otel.hooks.vllm_fields import SchedulerFacts
from ttft_otel.tracing.engine_timeline import EngineTimeline


def record_chunk(
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
        _record_later_chunk(timeline, facts, request, own_tokens, output)
        return
    timeline.scheduled = now
    end, request_id = request.num_computed_tokens, request.request_id
    if arrived and arrived[0].timeline is timeline:
        arrived.popleft()  # taken by its first step: nothing to follow, which is most of them
    elif waiting_requests:
        waiting.end_wait(timeline, request_id, now)
    timeline.high = end
    if end != own_tokens:
        timeline.cached = end - own_tokens
    timeline.prompt = request.num_prompt_tokens
    timeline.rank = facts.rank
    timeline.chunks = 1
    timeline.own_tokens = own_tokens
    timeline.step_tokens = output.total_num_scheduled_tokens
    if facts.has_kv_connector and kv.close_block_wait(timeline, request_id, facts.block_size):
        timeline.open_details().wait_lost = True
    if getattr(request, "mm_features", None):
        _open_items(timeline, facts, request)
        _settle_items(timeline, facts, request, output)
    if request_id in output.scheduled_encoder_inputs:
        timeline.open_details().encoder_first = True
    timeline.complete = end >= request.num_tokens
    held_steps.end_wait(facts, timeline, request_id, now)


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


def _open_items(timeline: EngineTimeline, facts: SchedulerFacts, request: Any) -> None:
    """The media items of a request whose first chunk was scheduled."""
    if not timeline.read_details().media:
        ec_items.open_items(timeline, request, facts.ec_connector)
    if timeline.cached:
        ec_items.skip_cached(timeline, request.mm_features, timeline.cached)
    details = timeline.open_details()
    details.wait_lost |= facts.ec_may_wait and not wrap.is_active("transfer.wait")


def _settle_items(
    timeline: EngineTimeline, facts: SchedulerFacts, request: Any, output: Any
) -> None:
    """The media items that the step `output` encodes or loads, if the request has any."""
    if timeline.details is not None and timeline.details.media:
        encoding = output.scheduled_encoder_inputs
        own_items = encoding.get(request.request_id, ())
        step_items = sum(map(len, encoding.values()))
        ec_items.settle_items(timeline, request, facts.ec_connector, own_items, step_items)
