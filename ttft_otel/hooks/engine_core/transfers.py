# SPDX-License-Identifier: Apache-2.0
"""Transfers between instances, as the engine core sees them: waits for them, and what is kept for others.

install.py puts these hooks around the scheduler's side of KV and encoder-cache connectors. tracer.py opens a
request's list of media items when the connector is first asked, or the first chunk scheduled, and passes the
items that a step encodes. Waits and items go to the request's EngineTimeline (EngineDetails.media, layout in
carrier.py, is empty for a request without media items). How long something was kept the API server asks
over vLLM's utility channel; KeptAnswers brings its questions and the answers together.

EncodingLeases works only for connectors whose scheduler side serves the fetches (ECCPUConnector over NIXL:
`ProducerSession`). ECMooncakeConnector pushes from threads of its worker, and its scheduler does not learn
which item arrived.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, Final

import msgspec

from ttft_otel.hooks import vllm_fields
from ttft_otel.hooks.vllm_fields import SchedulerFacts
from ttft_otel.hooks.wrap import Patcher
from ttft_otel.model import breakdown
from ttft_otel.tracing import carrier, clock
from ttft_otel.tracing.carrier import (
    BIT_ANNOUNCED,
    BIT_AWAITED,
    BIT_CACHED,
    HEADER_LENGTH,
    KEPT_BLOCKS_BIT,
    KEPT_ITEMS_BIT,
    SOURCE_ALLOCATED,
    SOURCE_ENCODED,
    SOURCE_LOCAL,
    SOURCE_MASK,
    SOURCE_REMOTE,
    SOURCE_SKIPPED,
    EngineTimeline,
    KeptBlocks,
    KeptItems,
    encode_answer,
)
from ttft_otel.tracing.guard import Hook

log = logging.getLogger("ttft_otel")

MAX_TRACKED_REQUESTS: Final = 8192  # with blocks in transfer, or kept for another instance
MAX_UNASKED_ANSWERS: Final = 256  # answers that the API server has not asked for yet
MAX_LEASES: Final = 8192  # answered requests whose encodings are not fetched yet
MAX_WAITING_ENCODINGS: Final = 65536  # encodings of those requests
MAX_FETCHED_HASHES: Final = 8192  # encodings remembered as fetched
# Microseconds: twice the longest time that ECCPUConnector's consumer waits for an encoding (60 s,
# vLLM's _ADMIT_DEFER_TIMEOUT_S). After that it has encoded the item itself, or failed.
MAX_KEPT_US: Final = 120_000_000
REASON_EXPIRED: Final = "expired"
REASON_EVICTED: Final = "evicted"


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
                lease.until, lease.expired = clock.now_us(), _has_expired(kv_connector_output)
                self.answers.settle(request_id, encode_answer(lease))

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

    def answer_kept_blocks(self, request_id: str) -> Any:
        """Utility call: how long blocks were kept, as KeptBlocks JSON; see KeptAnswers.ask()."""
        return self.answers.ask(request_id, isinstance(self.tracked.get(request_id), KeptBlocks))


def _has_expired(output: Any) -> bool:
    """Whether the leases in `output` expired before the blocks were fetched (NIXL reports that)."""
    over = sum(
        len(data.get("num_kv_expired_reqs", ()))
        for data in vllm_fields.list_connector_stats(output).values()
    )
    # The figures are per step: only if all of its leases expired is it known of each.
    return over >= len(output.finished_sending)


def open_items(
    timeline: EngineTimeline, request: Any, connector: Any, is_seen: bool, available: bool
) -> list[int]:
    """Create the list of a request: which items its ec_transfer_params name, and which are cached here.

    Called once, right after the connector was first asked about the request: what is in its cache then
    was not fetched for this request.
    connector: None without one. is_seen: the hook at its allocations is there. available: what it answered.
    """
    features = request.mm_features
    # One list of integers, not objects: it travels in the timeline's JSON.
    media = [0] * (HEADER_LENGTH + len(features))
    timeline.open_details().media = media
    # `added` is 0 where the hook at the engine core's input is missing: the timeline was then created
    # after schedule(), too late for this request's first allocations.
    if connector is None or not (is_seen and timeline.added):
        media[carrier.INDEX_UNMATCHED] = carrier.SOURCES_UNKNOWN
        return media
    params = vllm_fields.get_announced_params(request)
    if params:
        _mark_named(media, features, params)
    # A producer's cache says nothing: it holds what it encoded itself, for others.
    is_cached = vllm_fields.find_cache_test(connector)
    if is_cached is not None and vllm_fields.is_consumer(connector):
        _mark_cached(media, features, is_cached, available)
    return media


def _mark_named(media: list[int], features: Any, params: dict[str, Any]) -> None:
    names, places = vllm_fields.list_announced_names(params)
    matched: set[str] = set()
    for at, feature in enumerate(features, HEADER_LENGTH):
        # The key of vLLM's encoder cache, by which both sides of a transfer name an item.
        if feature.identifier in names:
            media[at] |= BIT_ANNOUNCED
            matched.add(feature.identifier)
    for place in places:
        if place < len(features):
            media[HEADER_LENGTH + place] |= BIT_ANNOUNCED
    media[carrier.INDEX_UNMATCHED] = len(names) - len(matched)


def _mark_cached(
    media: list[int], features: Any, is_cached: Callable[[str], bool], available: bool
) -> None:
    seen: set[str] = set()  # of equal items only the first one waits for the transfer
    for at, feature in enumerate(features, HEADER_LENGTH):
        if is_cached(feature.identifier):
            media[at] |= BIT_CACHED
        elif media[at] & BIT_ANNOUNCED and not available and feature.identifier not in seen:
            media[at] |= BIT_AWAITED
        seen.add(feature.identifier)


def skip_cached(timeline: EngineTimeline, features: Any, computed: int) -> None:
    """Mark the items that need no encoding, because the prefix cache covers all their tokens.

    computed: number of prompt tokens computed before the first chunk.
    """
    media = timeline.open_details().media
    for at, feature in enumerate(features, HEADER_LENGTH):
        position = feature.mm_position
        # All of its tokens: an item that is cached in part is encoded again as a whole.
        is_covered = position.offset + position.length <= computed
        if is_covered and not media[at] & SOURCE_MASK:
            media[at] |= SOURCE_SKIPPED


def settle_items(
    timeline: EngineTimeline,
    request: Any,
    connector: Any,
    encoded: Collection[int],
    step_items: int,
) -> None:
    """Decide the sources of the items that were allocated for a step of this request.

    encoded: indices of its items that the step encodes; allocated items that are not among them are
        loaded by the connector. step_items: items of all requests that the step encodes.
    The first source of an item stays, unless it is encoded here later, for example after a preemption.
    """
    media = timeline.open_details().media
    media[carrier.INDEX_OWN] += len(encoded)
    media[carrier.INDEX_STEP] += step_items
    for index in encoded:
        # The other bits stay: an announced item that is encoded here counts as recomputed.
        media[HEADER_LENGTH + index] = media[HEADER_LENGTH + index] & ~SOURCE_MASK | SOURCE_ENCODED
    for at in range(HEADER_LENGTH, len(media)):
        if media[at] & SOURCE_MASK != SOURCE_ALLOCATED:
            continue
        source = SOURCE_LOCAL if media[at] & BIT_CACHED else SOURCE_REMOTE
        media[at] += source - SOURCE_ALLOCATED
        if source == SOURCE_REMOTE:
            name = request.mm_features[at - HEADER_LENGTH].identifier
            media[carrier.INDEX_BYTES] += vllm_fields.find_item_bytes(connector, request, name)


class EncodingLease(msgspec.Struct, eq=False):
    """Encodings of an answered request that are kept until another instance fetches them.

    kept: what is known of them. waiting: mm_hashes that are not fetched yet. unready: those of them whose
    copy out of the device is still in progress.
    """

    request_id: str
    kept: KeptItems
    waiting: set[str]
    unready: set[str]


class EncodingLeases:
    """Encodings of one engine core's answers that are kept until other instances fetch them."""

    def __init__(self, patcher: Patcher) -> None:
        self.patcher = patcher
        #: By engine request ID, oldest first. While it is empty the hooks return at once.
        self.leases: OrderedDict[str, EncodingLease] = OrderedDict()
        #: By mm_hash.
        self.leases_by_hash: dict[str, list[EncodingLease]] = {}
        self.answers = KeptAnswers()
        #: mm_hashes that a consumer has fetched before.
        self.fetched_hashes: OrderedDict[str, None] = OrderedDict()
        #: Leases beyond MAX_LEASES or MAX_WAITING_ENCODINGS.
        self.dropped_leases = 0

    def build_session_hooks(self) -> dict[str, Hook]:
        """Hooks of the connector's session that serves fetches."""
        return {
            "transfer.fetched": Hook(
                before=snapshot_reads, after=self.record_fetched, ready=self.leases
            ),
            "transfer.lease": Hook(
                before=self.drop_overdue, after=self.record_expired, ready=self.leases
            ),
        }

    def record_announced(
        self, _: None, result: Any, connector: Any, request: Any, *args: Any, **kwargs: Any
    ) -> None:
        """After request_finished(): open a lease for the encodings that the answer announces.

        Encodings that a consumer has fetched before are left out: it has them and does not fetch them
        again. So are requests whose own transfer parameters show that they are not an encoder's: prefill
        on an ec_both instance announces its encodings, too.
        """
        timeline = getattr(request, "_ttft_timeline", None)
        # An encoder's timeline is sent after this call; one that was sent has had its token.
        if timeline is None or timeline.sent or not timeline.complete:
            return
        items = timeline.read_details().media[HEADER_LENGTH:]
        if getattr(request, "kv_transfer_params", None) or any(
            each & BIT_ANNOUNCED for each in items
        ):
            return
        if not self.patcher.is_active("transfer.fetched"):
            return
        # result: (whether vLLM frees the cache later, ec_transfer_params of the answer).
        announced = result[1] if isinstance(result[1], dict) else {}
        sizes = {
            name: item.get("size_bytes", 0)
            for name, item in announced.items()
            if isinstance(item, dict) and "peer_host" in item
        }
        is_cached = vllm_fields.find_cache_test(connector)
        unready = {name for name in sizes if is_cached is not None and not is_cached(name)}
        for name in unready:
            self.fetched_hashes.pop(name, None)  # saved again: this copy has not been fetched
        unfetched = {name for name in sizes if name not in self.fetched_hashes}
        if unfetched:
            timeline.open_details().kept |= KEPT_ITEMS_BIT
            unready &= unfetched
            size = sum(sizes[name] for name in unfetched)
            now = clock.now_us()
            kept = KeptItems(now, 0, len(unfetched), size, 0 if unready else now, "")
            self._add_lease(EncodingLease(request.request_id, kept, unfetched, unready))

    def _add_lease(self, lease: EncodingLease) -> None:
        while self.leases and (
            len(self.leases) >= MAX_LEASES
            or len(self.leases_by_hash) + len(lease.waiting) > MAX_WAITING_ENCODINGS
        ):
            self._remove_lease(next(iter(self.leases.values())), "")
            self.dropped_leases += 1
            # Once: under such a load every request would log it.
            if self.dropped_leases == 1:
                log.warning(
                    "ttft-otel: more than %d requests or %d encodings are waiting to be fetched; "
                    "`ttft.ec.kept` spans of the oldest requests are dropped",
                    MAX_LEASES,
                    MAX_WAITING_ENCODINGS,
                )
        self.leases[lease.request_id] = lease
        for name in lease.waiting:
            self.leases_by_hash.setdefault(name, []).append(lease)

    def _end_lease(self, lease: EncodingLease, why: str = "") -> None:
        """End a lease: all its encodings were fetched (`why` ""), or will not be."""
        lease.kept.until, lease.kept.end_reason = clock.now_us(), why
        self._remove_lease(lease, encode_answer(lease.kept))

    def _remove_lease(self, lease: EncodingLease, answer: str) -> None:
        self.leases.pop(lease.request_id, None)
        for name in lease.waiting:
            others = self.leases_by_hash[name]
            others.remove(lease)
            if not others:
                del self.leases_by_hash[name]
        self.answers.settle(lease.request_id, answer)

    def record_saved(
        self, _: None, result: Any, connector: Any, output: Any, *args: Any, **kw: Any
    ) -> None:
        """After update_connector_output(): its `output` names the encodings whose copy is complete."""
        meta = getattr(output, "ec_connector_worker_meta", None)
        for name in getattr(meta, "completed_saves", ()):
            for lease in self.leases_by_hash.get(name, ()):
                lease.unready.discard(name)
                if not lease.unready:
                    lease.kept.ready_at = lease.kept.ready_at or clock.now_us()

    def record_fetched(
        self, active: dict[str, Any], result: Any, session: Any, *args: Any, **kw: Any
    ) -> None:
        """After _drain_notifs(): fetches of `active` that are gone now were completed by a consumer.

        A fetch serves every lease that waits for the encoding, whichever request it was made for.
        """
        for name in _list_ended_reads(active, session):
            self.fetched_hashes[name] = None
            self.fetched_hashes.move_to_end(name)
            if len(self.fetched_hashes) > MAX_FETCHED_HASHES:
                self.fetched_hashes.popitem(last=False)
            for lease in self.leases_by_hash.pop(name, ()):
                lease.waiting.discard(name)
                if not lease.waiting:
                    self._end_lease(lease)

    def drop_overdue(self, session: Any, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        """Before _sweep_timeouts(), in every step: end leases that are evicted or too old.

        Goes from the oldest to the first that is neither, because the connector evicts in about that
        order. Returns the fetches in progress, as snapshot_reads().
        """
        now = clock.now_us()
        while self.leases:
            oldest = next(iter(self.leases.values()))
            if any(session._cache.get(name) is None for name in oldest.waiting):
                self._end_lease(oldest, REASON_EVICTED)
            elif now - oldest.kept.since > MAX_KEPT_US:
                self._end_lease(oldest, REASON_EXPIRED)
            else:
                break
        return snapshot_reads(session)

    def record_expired(
        self, active: dict[str, Any], result: Any, session: Any, *args: Any, **kw: Any
    ) -> None:
        """After _sweep_timeouts(): fetches of `active` that are gone now did not complete in time."""
        for name in _list_ended_reads(active, session):
            for lease in list(self.leases_by_hash.get(name, ())):
                self._end_lease(lease, REASON_EXPIRED)

    def answer_kept_items(self, request_id: str) -> Any:
        """Utility call: how long encodings were kept, as KeptItems JSON; see KeptAnswers.ask()."""
        return self.answers.ask(request_id, request_id in self.leases)


def snapshot_reads(session: Any, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
    """Before _drain_notifs(): a copy of the fetches in progress; None without any."""
    # A copy, because the call that follows removes the completed ones from vLLM's dict.
    return dict(session._active_xfers) or None


def _list_ended_reads(active: dict[str, Any], session: Any) -> list[str]:
    return [read.mm_hash for key, read in active.items() if key not in session._active_xfers]
