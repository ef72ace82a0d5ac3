# SPDX-License-Identifier: Apache-2.0
"""Follow traced requests while they wait for their first step, and note for which reason they do.

tracer.py hands over what has arrived, and calls after every schedule(): the scheduler's state right after it
says why it left requests out. What is found goes into the request's EngineTimeline. A step costs the same
however many wait: they share one list of the queue's reasons, and only those with a reason of their own are
looked at one by one. Each reason is looked at, none follows from the absence of others: what is not known is
"other". lab/schedule_decisions.py has each decision of schedule() with its reason.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import islice
from operator import itemgetter
from typing import Any, Final

from ttft_otel.hooks.engine_core.held_steps import (
    NO_REASON,
    HeldRequest,
    HeldRequests,
    drop_arrival,
)
from ttft_otel.hooks.vllm_fields import SchedulerFacts, get_facts
from ttft_otel.model.stages import WAIT_REASON_NAMES
from ttft_otel.model.waits import gather_reasons
from ttft_otel.tracing import clock
from ttft_otel.tracing.carrier import EngineTimeline

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
MAX_SKIPPED: Final = 16  # requests looked at to find the one at which the scheduler stopped
_OWN_REASONS: Final = {
    "WAITING_FOR_REMOTE_KVS": REMOTE_KV,
    "WAITING_FOR_FSM": GRAMMAR,
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": GRAMMAR,
    "WAITING_FOR_STREAMING_REQ": OTHER,
}
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


def find_common_reason(
    scheduler: Any,
    facts: SchedulerFacts,
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
    scheduler: Any, facts: SchedulerFacts, output: Any, throttled: bool
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


def _find_head(scheduler: Any, facts: SchedulerFacts) -> Any:
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
    scheduler: Any, facts: SchedulerFacts, output: Any, head: Any, tokens_left: int
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
            size = request.get_num_encoder_embeds(index)
            break
    else:
        return False
    spent = sum(
        scheduler.requests[request_id].get_num_encoder_embeds(index)
        for request_id, indices in output.scheduled_encoder_inputs.items()
        if request_id in scheduler.requests
        for index in indices
    )
    budget = getattr(scheduler, "max_num_encoder_input_tokens", 0)
    return bool(spent + size > budget or size > getattr(manager, "num_freeable_slots", size))


def find_own_reason(
    scheduler: Any,
    facts: SchedulerFacts,
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


def _lacks_adapter_place(scheduler: Any, facts: SchedulerFacts, request: Any) -> bool:
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
    facts = get_facts(scheduler)
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
