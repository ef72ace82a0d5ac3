# SPDX-License-Identifier: Apache-2.0
"""The state that the policy of one leg decides by, and the pending requests of its instances.

routing_service.py records what happens to requests: `record_sent` after each choice, then
`record_first_token` at the first token or `record_left` at any other end; policies read. All times are
arguments, so that simulations can use it. Sums are kept as integers, so they return to exactly zero.
"""

from __future__ import annotations

import abc
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, NamedTuple

from ttft_otel.model.stages import ENCODE
from ttft_otel.router.routing.policies.block_index import BlockHolders
from ttft_otel.router.routing.policies.prefill_model import (
    PredictionQuality,
    PrefillLine,
    PrefillModels,
    PrefillWork,
    compute_work,
)
from ttft_otel.router.types import Decision, Instance, RoutingRequest, find_base_model

RequestKey = tuple[str, str]  # leg, request id
US_PER_SECOND: Final = 1_000_000  # microseconds
# Entries older than this are dropped: a safety net in case the end of a request was never recorded.
MAX_PENDING_US: Final = 600 * US_PER_SECOND
AVERAGING_S: Final = 60  # seconds over which arrival rate and utilisation are averaged
# Upper bound of utilisation in the queueing formula, which diverges at 1.
MAX_BUSY_SHARE: Final = 0.95


class PendingRequest(NamedTuple):
    """One request without a first token; `predicted_s` is its predicted TTFT, None without prediction."""

    url: str
    sent_us: int
    work: PrefillWork
    block_keys: tuple[int, ...]
    predicted_s: float | None
    decodes: int = 0  # answers under way at the instance when it was sent
    base_model: str = ""  # whose prefill it teaches


# An absolute time, so that it stays right while nothing changes.
class BusyUntil(NamedTuple):
    """Predicted end of an instance's pending prefills, by one prefill model."""

    line: PrefillLine
    end_s: float  # on the monotonic clock
    min_wait_s: float  # seconds that are assumed to remain even after `end_s`


@dataclass(slots=True)
class InstanceLoad:
    """The pending requests of one instance, in the order in which they were sent, and their sums."""

    entries: dict[RequestKey, PendingRequest] = field(default_factory=dict)
    tokens_to_compute: int = 0
    pairs: int = 0
    # When the request before the first entry ended, so that this one began.
    head_started_us: int = 0
    # Blocks of pending prompts: cached once those have run.
    queued_blocks: Counter[int] = field(default_factory=Counter)
    recent_tokens: int = 0  # tokens sent to be computed, halved every window
    last_sent_us: int = 0
    # Cached prediction of a policy; reset whenever the entries change.
    busy_until: BusyUntil | None = None

    def estimate_running(self, now_us: int) -> tuple[PrefillWork, float]:
        """The prefill that is assumed to run at `now_us`, and for how many seconds; of a busy instance.

        Assumes that the engine prefills one prompt after the other, in the order of sending.
        """
        entry = next(iter(self.entries.values()))
        # It waited for the one before it, or the instance was idle when it came.
        began_us = entry.sent_us if entry.sent_us > self.head_started_us else self.head_started_us
        return entry.work, (now_us - began_us) / US_PER_SECOND if now_us > began_us else 0.0


# Shared by all idle instances, so nothing must ever be written to it.
NO_LOAD: Final = InstanceLoad()


class PendingLoads:
    """The load of every instance of a leg.

    max_pending_us: microseconds after which an entry is dropped. window_s: seconds over which arrival rate
    and utilisation are averaged.
    """

    def __init__(self, max_pending_us: int = MAX_PENDING_US, window_s: int = AVERAGING_S) -> None:
        self.max_pending_us = max_pending_us
        self.window_s = window_s
        self.on_removed: Callable[[], None] | None = None  # an entry has left: with --max-queue-ms
        self._loads: dict[str, InstanceLoad] = {}  # by URL, of instances that were sent something
        self._entries: dict[RequestKey, PendingRequest] = {}  # in the order of sending
        self._busy_count = 0  # instances with entries
        # Exponentially weighted over the window: number of busy instances, and arrivals per second.
        self._mean_busy = self._arrival_rate = 0.0
        self._averaged_us = self._halved_us = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get_load(self, url: str) -> InstanceLoad:
        """The load of the instance at `url`; an empty one if it was sent nothing."""
        return self._loads.get(url, NO_LOAD)

    def find_entry(self, key: RequestKey) -> PendingRequest | None:
        """The pending request of `key`, None if it has its first token or is over."""
        return self._entries.get(key)

    def list_loads(self, instances: Iterable[Instance]) -> list[InstanceLoad]:
        """The loads of `instances`, in their order."""
        loads = self._loads
        return [loads.get(each.url, NO_LOAD) for each in instances]

    def estimate_delay_cost(self, now_us: int, instance_count: int) -> float:
        """Expected number of later requests delayed per extra second of prefill on a busy instance.

        instance_count: instances that requests can go to.
        In an M/G/1 queue with arrival rate r and utilisation u, an extra second of work delays the arrivals
        until the queue is empty again: r / (1 - u) per second, here with both per instance. Later requests
        can avoid the delay while other instances are idle, hence the factor of the share that is busy.
        """
        self._update_averages(now_us)
        # Instances that are no candidates now still take a part of the arrivals.
        instance_count = max(instance_count, len(self._loads))
        return (
            self._arrival_rate
            / instance_count
            / (1 - min(MAX_BUSY_SHARE, self._mean_busy / instance_count))
            * self._busy_count
            / instance_count
        )

    def add_pending(self, key: RequestKey, entry: PendingRequest) -> None:
        """Record that `entry` was sent; an earlier entry of `key` (a retried request) is replaced."""
        if key in self._entries:
            self.remove_pending(key, entry.sent_us)
        self.drop_expired(entry.sent_us)
        load = self._loads.get(entry.url)
        if load is None:
            # Those without entries that were sent nothing lately are removed. Here and not by a timer: only
            # new instances can make it grow.
            outdated_us = entry.sent_us - self.window_s * US_PER_SECOND
            for url, other in list(self._loads.items()):
                if not other.entries and other.last_sent_us < outdated_us:
                    del self._loads[url]
            load = self._loads[entry.url] = InstanceLoad()
        load.last_sent_us = entry.sent_us
        # Before the counts change: the time that has passed belongs to the old ones.
        self._update_averages(entry.sent_us)
        # With the decay below this is the mean rate over the window, without a list of arrivals.
        self._arrival_rate += 1 / self.window_s
        # Only if it was idle until now.
        self._busy_count += not load.entries
        load.recent_tokens += entry.work.tokens_to_compute
        load.busy_until = None
        # Of one object in two dicts: by age for expiry, by instance for its sums.
        self._entries[key] = load.entries[key] = entry
        load.tokens_to_compute += entry.work.tokens_to_compute
        load.pairs += entry.work.pairs
        if entry.block_keys:  # Counter's update() is slow also for nothing
            load.queued_blocks.update(entry.block_keys)

    def remove_pending(self, key: RequestKey, now_us: int) -> PendingRequest | None:
        """Remove the entry of `key`: it has its first token or will never have one. Idempotent.

        Returns the entry, None if there is none.
        """
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        load = self._loads[entry.url]
        # Entries are in the order of sending: when the first one leaves, the next is assumed to begin.
        if next(iter(load.entries)) == key:
            load.head_started_us = now_us
        self._update_averages(now_us)
        del load.entries[key]
        self._busy_count -= not load.entries
        load.busy_until = None
        load.tokens_to_compute -= entry.work.tokens_to_compute
        load.pairs -= entry.work.pairs
        # Counted and not a set: two pending prompts may share a prefix.
        queued = load.queued_blocks
        for block in entry.block_keys:
            copies = queued[block]
            if copies == 1:
                queued.pop(block)  # a Counter's own `del` costs more
            else:
                queued[block] = copies - 1
        if self.on_removed is not None:
            self.on_removed()
        return entry

    def drop_expired(self, now_us: int) -> None:
        """Remove entries older than `max_pending_us`, whose end was never recorded."""
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            # In the order of sending: all that follow are younger.
            if now_us - entry.sent_us < self.max_pending_us:
                return
            self.remove_pending(key, now_us)

    def _update_averages(self, now_us: int) -> None:
        """Decay the averages up to `now_us`, and halve `recent_tokens` once per window."""
        # Times of different callers may be out of order by microseconds.
        if now_us <= self._averaged_us:
            return
        window_us = self.window_s * US_PER_SECOND
        decay = math.exp((self._averaged_us - now_us) / window_us)
        self._arrival_rate *= decay
        self._mean_busy = self._mean_busy * decay + self._busy_count * (1 - decay)
        self._averaged_us = now_us
        if now_us >= self._halved_us + window_us:
            self._halved_us = now_us
            for load in self._loads.values():
                load.recent_tokens //= 2


# Weight of the latest sample in the moving average of overheads.
# About the last ten requests: overheads change with the network, not with prompts.
LATEST_WEIGHT: Final = 0.1


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Policy options that an operator can set."""

    session_key: str = ""  # header or body key with the session ID
    kv_aware_threshold: int = 2000  # tokens that may be missing from a cached prefix
    # Compare predicted seconds or attention pairs.
    ttft_model: Literal["trapezoid", "calibrated"] = "calibrated"
    shared_cache: bool = False  # a prefix cached at one instance counts as cached at all
    slo_s: float = 0.0  # TTFT objective in seconds, 0 for none
    max_queue_s: float = 0.0  # predicted queue from which on requests are held, 0 for none


class PrefillSample(NamedTuple):
    """One measured prefill."""

    model: str
    tokens_to_compute: int
    pairs: int
    seconds: float
    decodes: int = 0  # answers under way beside it


FirstTokenListener = Callable[[RequestKey, int, PrefillSample | None], None]


@dataclass(slots=True)
class PolicyState:
    """Pending requests, cached prefixes and prefill models of one leg."""

    index: BlockHolders
    options: PolicyOptions = field(default_factory=PolicyOptions)
    pending: PendingLoads = field(default_factory=PendingLoads)
    models: PrefillModels = field(default_factory=PrefillModels)
    # Accuracy of predicted TTFTs, by URL.
    outcomes: dict[str, PredictionQuality] = field(default_factory=dict)
    # Average seconds of a first token besides queue and prefill, by URL.
    overheads_s: dict[str, float] = field(default_factory=dict)
    urls: Set[str] | None = None  # instances to learn about, None for any
    tie_breaker: random.Random = field(default_factory=random.Random)  # seedable for simulations
    # Called with key, time in microseconds and what was measured; None without workers.
    first_token_listener: FirstTokenListener | None = None

    def estimate_cached(
        self,
        request: RoutingRequest,
        instances: Sequence[Instance],
        loads: Sequence[InstanceLoad] = (),
    ) -> list[int]:
        """Prompt tokens that each of `instances` has cached, in whole blocks.

        loads: if given, blocks of pending prompts count too, because those are prefilled first.
        """
        blocks, block_size = request.block_keys, self.index.block_size or 1
        urls = [each.url for each in instances]
        # Not looked up: the prompt could not be read, or nothing reads prompts (simulations).
        if request.cached_tokens_by_url is None:
            depths = self.index.match_blocks(blocks, urls)
        else:
            depths = [request.cached_tokens_by_url.get(url, 0) // block_size for url in urls]
        length = len(blocks)
        for position, load in enumerate(loads):
            depth, queued_blocks = depths[position], load.queued_blocks
            # From where the cache ends: a prefix that only begins later is of no use.
            while depth < length and blocks[depth] in queued_blocks:
                depth += 1
            depths[position] = depth
        if self.options.shared_cache:
            # After the pending ones, whose blocks will be in the shared cache as well.
            depths = [max(depths)] * len(depths)
        # vLLM always computes the last token, because it needs its logits.
        max_blocks = max(0, request.prompt_tokens - 1) // block_size
        if max(depths) > max_blocks:
            depths = [min(depth, max_blocks) for depth in depths]
        return [depth * block_size for depth in depths]

    def record_sent(
        self, request: RoutingRequest, decision: Decision, now_us: int
    ) -> PendingRequest:
        """Record that `request` is sent to the chosen instance at `now_us`; returns its entry.

        Its leg and request ID identify it in all further calls.
        """
        # By what was cached at the decision; later evictions are not known in time.
        instance = decision.instance
        entry = PendingRequest(
            instance.url,
            now_us,
            compute_work(request.prompt_tokens, decision.cached_tokens),
            request.block_keys,
            self.predict_ttft(decision),
            # What is in flight and has its first token.
            max(instance.all_in_flight - len(self.pending.get_load(instance.url).entries), 0),
            find_base_model([instance], request.model),
        )
        self.pending.add_pending((request.leg, request.request_id), entry)
        return entry

    def predict_ttft(self, decision: Decision) -> float | None:
        """Predicted TTFT in seconds: queue and prefill of `decision` plus the recent average overhead."""
        if decision.predicted_ttft_s is None:
            return None
        return decision.predicted_ttft_s + self.overheads_s.get(decision.instance.url, 0.0)

    def find_slo_s(self, request: RoutingRequest) -> float:
        """The stricter of the operator's and the client's limit of the TTFT, seconds; 0 without any."""
        # Encoders send no first token.
        limits_s = self.options.slo_s, request.slo_s * (request.leg != ENCODE)
        return min(filter(None, limits_s), default=0.0)

    def record_overhead(self, url: str, overhead_s: float) -> None:
        """Update the average time of a first token besides queue and prefill, such as network hops.

        overhead_s: seconds of one request at the instance at `url`.
        """
        # An answer can come after its instance was removed, and would bring its state back.
        if self._is_unknown(url):
            return
        # The first one counts fully: from 0 the average would take dozens of requests to get there.
        previous_s = self.overheads_s.get(url, overhead_s)
        self.overheads_s[url] = previous_s + LATEST_WEIGHT * (overhead_s - previous_s)

    def record_first_token(
        self,
        request: RoutingRequest,
        now_us: int,
        prefill_s: float | None,
        cached_tokens: int,
        prompt_tokens: int = 0,
        is_measured: bool = True,
    ) -> float | None:
        """Record the first token of `request`, and learn from its prefill.

        Returns seconds by which the token was later than predicted, None without a judged prediction.

        Args:
            prefill_s: measured seconds, None if unknown.
            cached_tokens: prompt tokens not computed.
            prompt_tokens: prompt length as the engine counted it, 0 to use the router's.
            is_measured: whether `now_us` is the time of the first token; if not, the prediction is not
                judged.
        """
        # None if it was ended before: a first token is recorded once.
        entry = self.record_left(request, now_us)
        if entry is None or self._is_unknown(entry.url):
            return None
        sample = None
        if prefill_s is not None:
            prompt_tokens = prompt_tokens or request.prompt_tokens
            # Engines may report more cached than the router's length of the prompt.
            prefill_work = compute_work(prompt_tokens, min(cached_tokens, prompt_tokens))
            sample = PrefillSample(entry.base_model, *prefill_work, prefill_s, entry.decodes)
        self._learn_prefill(entry, sample)
        if self.first_token_listener is not None:
            self.first_token_listener((request.leg, request.request_id), now_us, sample)
        if entry.predicted_s is None or not is_measured:
            return None
        ttft_s = (now_us - entry.sent_us) / US_PER_SECOND
        self.outcomes.setdefault(entry.url, PredictionQuality()).add_outcome(
            entry.predicted_s, ttft_s
        )
        # Positive if it was late, as in ttft.prediction_error_ms.
        return ttft_s - entry.predicted_s

    def _learn_prefill(self, entry: PendingRequest, sample: PrefillSample | None) -> None:
        # The blocks are cached from the first token on, also if the client disconnects later.
        self.index.record_served(entry.url, entry.block_keys)
        if sample is not None:
            model, tokens, pairs, seconds, decodes = sample
            self.models.add_sample(model, entry.url, PrefillWork(tokens, pairs), seconds, decodes)

    def record_first_token_elsewhere(
        self, key: RequestKey, now_us: int, sample: PrefillSample | None
    ) -> None:
        """Another worker had the first token of the request of `key`, which is pending here too.

        sample: what it measured. The accuracy of the prediction is judged where it was made.
        """
        entry = self.pending.remove_pending(key, now_us)
        if entry is not None and not self._is_unknown(entry.url):
            self._learn_prefill(entry, sample)

    def record_left(self, request: RoutingRequest, now_us: int) -> PendingRequest | None:
        """Remove `request` from the pending ones, however it ended; idempotent."""
        return self.pending.remove_pending((request.leg, request.request_id), now_us)

    def sync_instances(self, urls: Set[str]) -> None:
        """Learn only about the instances in `urls` from now on; drop the state of others."""
        # Pending entries stay, since their requests still run: each ends by itself.
        for url in (self.urls or frozenset()) - urls:
            self.outcomes.pop(url, None)
            self.overheads_s.pop(url, None)
            self.models.drop_instance(url)
        self.urls = urls

    def _is_unknown(self, url: str) -> bool:
        return self.urls is not None and url not in self.urls

    def choose_least(self, scores: Sequence[float]) -> int:
        """The position of the least of `scores`, a random one among equals."""
        lowest = min(scores)
        # The usual case costs no list and no random number.
        if scores.count(lowest) == 1:
            return scores.index(lowest)
        return self.tie_breaker.choice(
            [position for position, score in enumerate(scores) if score == lowest]
        )


class RoutingPolicy(abc.ABC):
    """Chooses instances of one leg over its `state`; called on the event loop, so it must not block.

    name: in --routing-logic. uses_predictions: whether it learns from the Server-Timing of instances, which
    then is requested.
    """

    name: ClassVar[str]
    uses_predictions = False
    # Whether it needs prompt lengths, cached prefixes and the work that is pending.
    reads_prompts: ClassVar[bool] = False

    def __init__(self, state: PolicyState) -> None:
        self.state = state

    @abc.abstractmethod
    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose one of `instances`, which is never empty.

        now_us: CLOCK_MONOTONIC in microseconds. is_retry: an earlier attempt of the request failed.
        """

    def predict_wait(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int
    ) -> tuple[float, float]:
        """Seconds of the shortest queue of `instances` and of the prefill; 0 where nothing is predicted."""
        return 0.0, 0.0
