# SPDX-License-Identifier: Apache-2.0
"""Say why a schedule() left requests out, from the scheduler's state right after the call.

waiting.py asks once per step for the reason that all queued requests share, and for each request that
the scheduler has set aside for its own. Nothing here depends on how many requests wait. Each reason is
looked at, none follows from the absence of others: what is not known is "other".
lab/schedule_decisions.py has each decision of schedule() with its reason.
"""

from __future__ import annotations

from concurrent.futures import Future
from itertools import islice
from typing import Any, Final

from ttft_otel.hooks import vllm_fields
from ttft_otel.model.stages import WAIT_REASON_NAMES
from ttft_otel.tracing.engine_timeline import EngineTimeline

(
    IN_STEP,
    MAX_NUM_SEQS,
    TOKEN_BUDGET,
    KV_BLOCKS,
    ENCODER_BUDGET,
    REMOTE_KV,
    REMOTE_EC,
    GRAMMAR,
    LORA,
    PRIORITY,
    PAUSED,
    OTHER,
    PREFILL_INTERVAL,
    STALE_OUTPUT,
) = range(len(WAIT_REASON_NAMES))
NO_REASON: Final = -1  # of its own: it shares the queue's
MAX_SKIPPED: Final = 16  # requests looked at to find the one at which the scheduler stopped
_OWN_REASONS: Final = {
    "WAITING_FOR_REMOTE_KVS": REMOTE_KV,
    "WAITING_FOR_FSM": GRAMMAR,
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": GRAMMAR,
    "WAITING_FOR_STREAMING_REQ": OTHER,
}


def find_common_reason(
    scheduler: Any,
    facts: vllm_fields.SchedulerFacts,
    output: Any,
    preempted: Any,
    throttled: bool = False,
) -> int:
    """Why the queue as a whole did not move on: at its head, and for all behind it.

    In this order, because each test says what would have to change first: paused; preempted (the
    scheduler then admits nobody); all places taken; no tokens left; what the head could not get.

    throttled: the engine core asked this schedule() to hold prefills back.
    """
    if facts.can_pause and scheduler._pause_state:
        return PAUSED
    if preempted:
        return KV_BLOCKS
    if facts.max_running:
        running = len(scheduler.running)
        # Streaming sessions that pause are not in `running`, but hold a slot of the model runner.
        if facts.has_sessions:
            running += scheduler.num_waiting_for_streaming_input
        if running >= facts.max_running:
            return MAX_NUM_SEQS
    left = facts.max_tokens - output.total_num_scheduled_tokens
    if facts.draft_slots:  # each scheduled request takes these out of another budget
        drafts = facts.draft_slots * (len(output.num_scheduled_tokens) + 1)
        left = min(left, facts.max_batched - output.total_num_scheduled_tokens - drafts)
    if facts.max_tokens and left <= 0:
        return TOKEN_BUDGET
    head = _find_head(scheduler, facts)
    if head is None:
        return OTHER
    # The scheduler looks at this before tokens, blocks and encoders.
    if head.num_tokens - head.num_computed_tokens > 1 and _holds_prefills_back(
        scheduler, facts, output, throttled
    ):
        return PREFILL_INTERVAL
    return _find_head_reason(scheduler, facts, output, head, left)


def _holds_prefills_back(
    scheduler: Any, facts: vllm_fields.SchedulerFacts, output: Any, throttled: bool
) -> bool:
    """Whether this schedule() computed no prompt so that answers go on, from the state that it left.

    A step that may compute prompts and leaves some waiting sets prefill_capacity_bound, and one that computes
    some sets last_prefill_step to its own number: then it held nothing back.
    """
    if not facts.can_hold_prefills or scheduler.prefill_capacity_bound:
        return False
    interval = facts.prefill_interval
    if interval > 1:
        executed, last = scheduler.num_executed_steps, scheduler.last_prefill_step
        if not output.total_num_scheduled_tokens:
            executed += 1
        elif last == executed:
            return False
        throttled = throttled or executed - last < interval
    return throttled and any(not each.is_prefill_chunk for each in scheduler.running)


def _find_head(scheduler: Any, facts: vllm_fields.SchedulerFacts) -> Any:
    """The request at which the scheduler stopped: the first that it did not set aside."""
    deferred = facts.get_deferred(scheduler)
    # Requests that hold KV blocks already come first. schedule() puts what it set aside back at the head:
    # the one it stopped at comes behind.
    for queue in (
        getattr(scheduler, "kv_holding_waiting", None),
        getattr(scheduler, "waiting", None),
    ):
        for request in islice(queue or (), MAX_SKIPPED):
            if request not in deferred:
                return request
    return None


def _find_head_reason(
    scheduler: Any, facts: vllm_fields.SchedulerFacts, output: Any, head: Any, tokens_left: int
) -> int:
    """What the request at the head could not get, with `tokens_left` in the step."""
    tokens = head.num_tokens - head.num_computed_tokens
    if facts.max_tokens and not facts.chunked and tokens > tokens_left:
        return TOKEN_BUDGET
    # Only the first chunk needs blocks then, and the step's budget bounds it.
    if not facts.reserves_prompt and facts.max_tokens:
        tokens = min(tokens, tokens_left)
    manager = getattr(scheduler, "kv_cache_manager", None)
    pool = getattr(manager, "block_pool", None)
    if pool is None or not facts.block_size:
        return OTHER
    # Upper bound: cached blocks are not taken off, as they are taken out of the free ones as well.
    needed = facts.cache_groups * -(-tokens // facts.block_size)
    if pool.get_num_free_blocks() < needed + getattr(manager, "watermark_blocks", 0):
        return KV_BLOCKS
    return ENCODER_BUDGET if _lacks_encoder_room(scheduler, output, head) else OTHER


def _lacks_encoder_room(scheduler: Any, output: Any, request: Any) -> bool:
    """Whether its next media item has no room in the step's encoder budget, or in the encoder cache."""
    features = getattr(request, "mm_features", None)
    manager = getattr(scheduler, "encoder_cache_manager", None)
    if not features or manager is None:
        return False
    cached = getattr(manager, "cached", ())
    for index, feature in enumerate(features):
        position = feature.mm_position
        if position.offset + position.length <= request.num_computed_tokens:
            continue
        if feature.identifier not in cached:
            size = _count_embeddings(request, index)
            break
    else:
        return False
    spent = sum(
        _count_embeddings(scheduler.requests[request_id], index)
        for request_id, indices in output.scheduled_encoder_inputs.items()
        if request_id in scheduler.requests
        for index in indices
    )
    budget = getattr(scheduler, "max_num_encoder_input_tokens", 0)
    return spent + size > budget or size > getattr(manager, "num_freeable_slots", size)


def _count_embeddings(request: Any, index: int) -> int:
    """What media item `index` takes of the encoder's budget and cache."""
    return int(request.get_num_encoder_embeds(index))


def find_own_reason(
    scheduler: Any,
    facts: vllm_fields.SchedulerFacts,
    request: Any,
    timeline: EngineTimeline,
    skipped: bool,
) -> int:
    """Why this request in particular could not run, whatever the queue did; NO_REASON without one.

    skipped: the scheduler has set it aside.
    """
    status = getattr(request, "status", None)
    own = facts.reason_by_status.get(status)
    if own is None:
        own = _OWN_REASONS.get(getattr(status, "name", ""), NO_REASON)
        facts.reason_by_status[status] = own
    if own == REMOTE_KV:
        arrived = getattr(scheduler, "finished_recving_kv_req_ids", ())
        return NO_REASON if request.request_id in arrived else REMOTE_KV
    if own == GRAMMAR:  # the status changes only when the scheduler reaches the request
        compiled = getattr(request.structured_output_request, "_grammar", None)
        pending = compiled is None or (isinstance(compiled, Future) and not compiled.done())
        return GRAMMAR if pending else NO_REASON
    if own != NO_REASON or not skipped:
        return own
    # Looked at in the order of the scheduler, which goes no further than the first that holds.
    if _waits_for_stale_output(request):
        return STALE_OUTPUT
    if _lacks_adapter_place(scheduler, facts, request):
        return LORA
    details = timeline.read_details()
    if details.asked:
        return REMOTE_EC
    return REMOTE_KV if details.looking else OTHER


def _waits_for_stale_output(request: Any) -> bool:
    """Whether output from before its preemption is in flight, and will be delivered."""
    stale = getattr(request, "num_stale_output_tokens", 0)
    return bool(stale) and not getattr(request, "drop_stale_output", False)


def _lacks_adapter_place(scheduler: Any, facts: vllm_fields.SchedulerFacts, request: Any) -> bool:
    """Whether running requests use as many LoRA adapters as there are places, and not this request's."""
    adapter = getattr(request, "lora_request", None)
    if adapter is None or not facts.max_loras:
        return False
    running = {
        each.lora_request.lora_int_id for each in scheduler.running if each.lora_request is not None
    }
    return len(running) >= facts.max_loras and adapter.lora_int_id not in running


def find_stall_reason(
    scheduler: Any, output: Any, request: Any, timeline: EngineTimeline, throttled: bool = False
) -> int:
    """Why a prompt that has begun is not complete with this step, or has no part in it.

    throttled: the engine core asked this schedule() to hold prefills back.
    """
    facts = vllm_fields.get_facts(scheduler)
    status = getattr(getattr(request, "status", None), "name", "")
    if status == "PREEMPTED":
        preempted = getattr(output, "preempted_req_ids", None)
        if _waits_for_stale_output(request):
            return STALE_OUTPUT
        return find_common_reason(scheduler, facts, output, preempted, throttled)
    own_tokens = output.num_scheduled_tokens.get(request.request_id, 0)
    if not own_tokens and _holds_prefills_back(scheduler, facts, output, throttled):
        return PREFILL_INTERVAL
    if timeline.read_details().asked:
        return REMOTE_EC
    if facts.max_tokens and output.total_num_scheduled_tokens >= facts.max_tokens:
        return TOKEN_BUDGET
    if getattr(scheduler, "_pause_state", 0):
        return PAUSED
    if _lacks_encoder_room(scheduler, output, request):
        return ENCODER_BUDGET
    # long_prefill_token_threshold cuts chunks below the budget, too.
    return TOKEN_BUDGET if own_tokens else OTHER
