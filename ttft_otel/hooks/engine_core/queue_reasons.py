# SPDX-License-Identifier: Apache-2.0
"""Say why a schedule() left requests out, from the scheduler's state right after the call.

waiting.py asks once per step for the reason that all queued requests share, and for each request that
the scheduler has set aside for its own. Nothing here depends on how many requests wait; what a release
of vLLM does not have reads as "other".
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
    scheduler: Any, facts: vllm_fields.SchedulerFacts, output: Any, preempted: Any
) -> int:
    """Why the queue as a whole did not move on: at its head, and for all behind it.

    In this order, because each test says what would have to change first: paused; preempted (the
    scheduler then admits nobody); all places taken; no tokens left; what the head could not get.
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
    return OTHER if head is None else _find_head_reason(scheduler, facts, head, left)


def _find_head(scheduler: Any, facts: vllm_fields.SchedulerFacts) -> Any:
    """The request at which the scheduler stopped: the first that it did not set aside."""
    deferred = facts.get_deferred(scheduler)
    # schedule() puts what it set aside back at the head: the one it stopped at comes behind.
    for request in islice(getattr(scheduler, "waiting", None) or (), MAX_SKIPPED):
        if request not in deferred:
            return request
    return None


def _find_head_reason(
    scheduler: Any, facts: vllm_fields.SchedulerFacts, head: Any, tokens_left: int
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
    # By exclusion: the budget of the step is a local variable of schedule().
    return ENCODER_BUDGET if getattr(head, "mm_features", None) else OTHER


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
    details = timeline.read_details()
    if details.asked:
        return REMOTE_EC
    if details.looking:
        return REMOTE_KV
    if getattr(request, "lora_request", None) is not None:
        return LORA
    # Without the connectors' hooks: one of them let it be set aside.
    if getattr(request, "mm_features", None) and getattr(scheduler, "ec_connector", None):
        return REMOTE_EC
    return REMOTE_KV if getattr(scheduler, "connector", None) is not None else OTHER


def find_stall_reason(scheduler: Any, output: Any, request: Any, timeline: EngineTimeline) -> int:
    """Why a prompt that has begun is not complete with this step, or has no part in it."""
    facts = vllm_fields.get_facts(scheduler)
    status = getattr(getattr(request, "status", None), "name", "")
    if status == "PREEMPTED":
        preempted = getattr(output, "preempted_req_ids", None)
        return find_common_reason(scheduler, facts, output, preempted)
    if timeline.read_details().asked:
        return REMOTE_EC
    if facts.max_tokens and output.total_num_scheduled_tokens >= facts.max_tokens:
        return TOKEN_BUDGET
    if getattr(scheduler, "_pause_state", 0):
        return PAUSED
    if getattr(request, "mm_features", None):
        return ENCODER_BUDGET
    # long_prefill_token_threshold cuts chunks below the budget, too.
    own_tokens = output.num_scheduled_tokens.get(request.request_id, 0)
    return TOKEN_BUDGET if own_tokens else OTHER
