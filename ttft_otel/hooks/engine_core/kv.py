# SPDX-License-Identifier: Apache-2.0
"""BlockTransfers: waits for KV blocks from other instances, and how long blocks are kept for another one.

install.py puts these hooks around the scheduler's side of a KV connector. Waits go to the request's
EngineTimeline; the API server calls answer_kept_blocks() over vLLM's utility channel. KeptAnswers, which
encodings.py uses, too, brings its questions and the answers together.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from typing import Any, Final

from ttft_otel.hooks import vllm_fields
from ttft_otel.hooks.vllm_fields import SchedulerFacts
from ttft_otel.hooks.wrap import Patcher
from ttft_otel.model import breakdown
from ttft_otel.tracing import clock
from ttft_otel.tracing.carrier import KEPT_BLOCKS_BIT, KeptBlocks, encode_answer
from ttft_otel.tracing.engine_timeline import EngineTimeline

MAX_TRACKED_REQUESTS: Final = 8192  # with blocks in transfer, or kept for another instance
MAX_UNASKED_ANSWERS: Final = 256  # answers that the API server has not asked for yet


class KeptAnswers:
    """Answers about what was kept for another instance; the API server asks for each before or after its end.

    Without a lock: hooks and utility calls run on the engine core's main thread.
    """

    def __init__(self) -> None:
        #: The API server's queries about what is still kept.
        self.asked: dict[str, Future[str]] = {}
        #: Answers that came before the query.
        self.unasked: OrderedDict[str, str] = OrderedDict()

    def settle(self, request_id: str, answer: str) -> None:
        """Nothing is kept any more: `answer` who has asked, or will; "" where it is not known."""
        if request_id in self.asked:
            self.asked.pop(request_id).set_result(answer)
            return
        self.unasked[request_id] = answer
        if len(self.unasked) > MAX_UNASKED_ANSWERS:
            self.unasked.popitem(last=False)

    def ask(self, request_id: str, is_kept: bool) -> Any:
        """The answer, "" when unknown; a Future while it is kept, which vLLM's utility channel awaits."""
        if not is_kept:
            return self.unasked.pop(request_id, "")
        return self.asked.setdefault(request_id, Future())


class BlockTransfers:
    """KV blocks of one engine core's traced requests that are on their way here, or kept for others."""

    def __init__(self, patcher: Patcher) -> None:
        self.patcher = patcher
        #: By engine request ID: the timeline while blocks are transferred here, KeptBlocks while they are
        #: kept for another instance. While it is empty the hooks return at once.
        self.tracked: dict[str, EngineTimeline | KeptBlocks] = {}
        self.answers = KeptAnswers()

    def record_match(
        self, _: None, match: Any, connector: Any, request: Any, *args: Any, **kw: Any
    ) -> None:
        """After get_num_new_matched_tokens(), which is called until the request's blocks are allocated.

        match: (tokens, loaded asynchronously); tokens None means that the connector is still looking.
        """
        timeline = getattr(request, "_ttft_timeline", None)
        if timeline is None or timeline.scheduled:
            return  # after a preemption further waits belong to `prefill.stall`
        count, loads_later = match
        if timeline.details is None and count == 0:
            return  # nothing to fetch, and it has not waited
        details = timeline.open_details()
        if count is None:
            details.looking = details.looking or clock.now_us()
            return
        if details.looking:
            details.waits += (breakdown.CODE_KV_TRANSFER, details.looking, clock.now_us())
            details.looking = 0
        if details.moving:  # its blocks could not be allocated; this is another attempt
            self.tracked.pop(request.request_id, None)
            details.moving = 0
        details.blocks = [count, 0, 0, 0] if count else []
        if count and loads_later:
            details.moving = clock.now_us()
            self._track_request(request.request_id, timeline)

    def _track_request(self, request_id: str, state: EngineTimeline | KeptBlocks) -> None:
        if len(self.tracked) >= MAX_TRACKED_REQUESTS:
            oldest = next(iter(self.tracked))
            evicted = self.tracked.pop(oldest)
            if isinstance(evicted, KeptBlocks) and oldest in self.answers.asked:
                self.answers.settle(oldest, "")  # its caller must not wait any longer
        self.tracked[request_id] = state

    def close_wait(self, timeline: EngineTimeline, request: Any, facts: SchedulerFacts) -> bool:
        """End the wait for blocks when the first chunk is scheduled.

        True when the request may have waited for blocks without a hook that noticed it.
        """
        details = timeline.read_details()
        if details.blocks:
            # The connector offers; vLLM takes none where its own cache has as many.
            tokens = vllm_fields.count_external_tokens(request, details.blocks[0])
            details.blocks[0] = tokens
            if facts.block_size:
                details.blocks[1] = -(-tokens // facts.block_size)  # rounded up
            if tokens:
                found = vllm_fields.find_block_source(facts.kv_connector, request, tokens)
                details.connector, details.source = found
            else:
                details.blocks = []
        lost = bool(timeline.cached) and not self.patcher.is_active("kv.match")
        if details.moving:
            # Loaded inside the step after all, or the hook that sees arrivals is missing.
            self.tracked.pop(request.request_id, None)
            details.moving = 0
            lost = lost or not self.patcher.is_active("kv.arrive")
        return lost

    def record_arrivals(self, scheduler: Any, kv_connector_output: Any) -> None:
        """Before _update_from_kv_xfer_finished(): requests whose blocks have arrived, or were fetched."""
        received_ids = kv_connector_output.finished_recving
        for request_id in received_ids or ():
            timeline = self.tracked.pop(request_id, None)
            if isinstance(timeline, EngineTimeline) and (details := timeline.read_details()).moving:
                details.waits += (breakdown.CODE_KV_TRANSFER, details.moving, clock.now_us())
                details.moving = 0
                # The connector's figures are per step.
                if len(received_ids) == 1 and details.blocks:
                    connector = getattr(scheduler, "connector", None)
                    details.blocks[2:] = vllm_fields.read_transfer(
                        kv_connector_output, connector, request_id
                    )
        for request_id in kv_connector_output.finished_sending or ():
            lease = self.tracked.pop(request_id, None)
            if isinstance(lease, KeptBlocks):
                self._end_lease(request_id, lease, has_expired(kv_connector_output))

    def record_kept_blocks(
        self,
        _: None,
        result: Any,
        connector: Any,
        request: Any,
        block_ids: Any,
        *args: Any,
        **kw: Any,
    ) -> None:
        """After request_finished(): result[0] is true if the connector keeps the blocks for another."""
        timeline = getattr(request, "_ttft_timeline", None)
        if timeline is None or timeline.sent or not result[0]:
            return
        # With hybrid KV cache groups there is one list per group; the longest one counts.
        groups = block_ids if isinstance(block_ids, tuple) else (block_ids,)
        timeline.open_details().kept |= KEPT_BLOCKS_BIT
        blocks = max(map(len, groups))
        lease = KeptBlocks(clock.now_us(), 0, request.num_computed_tokens, blocks, False)
        self._track_request(request.request_id, lease)

    def _end_lease(self, request_id: str, lease: KeptBlocks, expired: bool) -> None:
        lease.until = clock.now_us()
        lease.expired = expired
        self.answers.settle(request_id, encode_answer(lease))

    def answer_kept_blocks(self, request_id: str) -> Any:
        """Utility call: how long blocks were kept, as KeptBlocks JSON; see KeptAnswers.ask()."""
        return self.answers.ask(request_id, isinstance(self.tracked.get(request_id), KeptBlocks))


def has_expired(output: Any) -> bool:
    """Whether the leases in `output` expired before the blocks were fetched (NIXL reports that)."""
    over = sum(
        len(data.get("num_kv_expired_reqs", ()))
        for data in vllm_fields.list_connector_stats(output).values()
    )
    # The figures are per step: only if all of its leases expired is it known of each.
    return over >= len(output.finished_sending)
