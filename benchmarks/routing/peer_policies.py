# SPDX-License-Identifier: Apache-2.0
"""Rules of other routers as policies, for comparison in simulate.py: algorithms only, as published.

production-stack's `session`, `prefixaware` and `kvaware`, and join-shortest-queue, are policies of ours.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Final

from benchmarks.routing.mooncake_traces import PREFILL_COST
from ttft_otel.router.routing.policies.block_index import SentHistory
from ttft_otel.router.routing.policies.policy_registry import HashRing, LeastRequestsPolicy
from ttft_otel.router.routing.policies.policy_state import InstanceLoad, PolicyState, RoutingPolicy
from ttft_otel.router.routing.policies.prefill_model import compute_work
from ttft_otel.router.types import Decision, Instance, RoutingRequest, find_base_model

MAX_LOAD_FACTOR: Final = 1.25  # of an instance's requests to the mean, as KubeAI has it by default
# Defaults of vllm-router's and SGLang's cache_aware.
MIN_MATCH_SHARE: Final = 0.3
MIN_IMBALANCE: Final = 64  # requests
MIN_IMBALANCE_RATIO: Final = 1.5
TREE_BLOCKS: Final = 32_768  # of an instance's tree: 2^26 characters at 4 a token
# llm-d's prefix-cache-affinity-filter: its defaults, and what its calibration finds, tokens a second.
STICKY_SHARE: Final = 0.8
MAX_PENALTY_S: Final = 18.0
CHUNK_TOKENS: Final = 8192
PEAK_THROUGHPUT: Final = CHUNK_TOKENS / PREFILL_COST.predict_seconds(compute_work(CHUNK_TOKENS, 0))


class TokenLoadPolicy(RoutingPolicy):
    """Uncached tokens: those an instance has to compute, and the new ones (llm-d's token load)."""

    name = "tokens"

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """The fewest."""
        # Without `loads`: blocks that pending prompts will add are not counted.
        cached = self.state.estimate_cached(request, instances)
        scores = [
            self.score_instance(
                each.url,
                self.state.pending.get_load(each.url),
                request.prompt_tokens - cached_tokens,
                now_us,
            )
            for each, cached_tokens in zip(instances, cached, strict=True)
        ]
        # Random among equals: the first of the list would get all requests of an idle fleet.
        position = self.state.choose_least(scores)
        return Decision(instances[position], scores[position], self.name, cached[position])

    def score_instance(self, url: str, load: InstanceLoad, new_tokens: int, now_us: int) -> float:
        """Score of an instance with this load; the lowest one is chosen."""
        return load.tokens_to_compute + new_tokens


class StickyPolicy(TokenLoadPolicy):
    """llm-d's default: who has 80 % of the prompt, unless they are too busy; among these the token load."""

    name = "llmd"

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """The filter, then the score."""
        cached = self.state.estimate_cached(request, instances)
        queues_s = [
            self.state.pending.get_load(each.url).tokens_to_compute / PEAK_THROUGHPUT
            for each in instances
        ]
        sticky = [
            at for at, each in enumerate(cached) if each >= STICKY_SHARE * request.prompt_tokens
        ]
        if sticky and min(queues_s[at] for at in sticky) - min(queues_s) <= MAX_PENALTY_S:
            instances = [instances[at] for at in sticky]
        return super().choose_instance(request, instances, now_us, is_retry)


class BatchPolicy(TokenLoadPolicy):
    """New tokens times requests there (LMetric)."""

    name = "batch"

    def score_instance(self, url: str, load: InstanceLoad, new_tokens: int, now_us: int) -> float:
        """Tokens of prefill that it would have, times the requests that it would have."""
        return (load.tokens_to_compute + new_tokens) * (len(load.entries) + 1)


class DynamoPolicy(TokenLoadPolicy):
    """Dynamo's KV router: blocks to prefill plus blocks of all requests there, at its temperature of 0."""

    name = "dynamo"

    def __init__(self, state: PolicyState) -> None:
        super().__init__(state)
        self._active_tokens: Counter[str] = Counter()
        self._owned: dict[str, tuple[str, int]] = {}

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """The least cost; its blocks are active until its answer has ended."""
        decision = super().choose_instance(request, instances, now_us, is_retry)
        url = decision.instance.url
        self._owned[request.request_id] = url, request.prompt_tokens
        self._active_tokens[url] += request.prompt_tokens
        return decision

    def score_instance(self, url: str, load: InstanceLoad, new_tokens: int, now_us: int) -> float:
        """In tokens: both terms have blocks of one size."""
        return load.tokens_to_compute + new_tokens + self._active_tokens[url]

    def record_end(self, request_id: str, tpot_s: float = 0.0) -> None:
        """An answer has ended."""
        url, tokens = self._owned.pop(request_id)
        self._active_tokens[url] -= tokens


class DecayPolicy(TokenLoadPolicy):
    """Uncached tokens, those of the running prefill fewer as its predicted time passes (Dynamo's `aic`)."""

    name = "decay"

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """The fewest, by the times of the request's base model."""
        self._model = find_base_model(instances, request.model)
        return super().choose_instance(request, instances, now_us, is_retry)

    def score_instance(self, url: str, load: InstanceLoad, new_tokens: int, now_us: int) -> float:
        """Tokens left, by the same fitted times that ours has."""
        known, done = self.state.models.get_line(self._model), 0.0
        if load.entries and known is not None:
            (work, elapsed), (line, factors) = load.estimate_running(now_us), known
            whole = line.predict_seconds(work) * factors.get(url, 1.0)
            # Not more than all: a prefill that takes longer than predicted is done, not negative.
            done = work.tokens_to_compute * min(1.0, elapsed / max(whole, 1e-9))
        return load.tokens_to_compute + new_tokens - done


class CacheAwarePolicy(RoutingPolicy):
    """vllm-router's and SGLang's: the longest match in a tree of what was sent, or the smallest tree.

    Where requests are spread unevenly, the fewest requests.
    """

    name = "cache_aware"

    def __init__(self, state: PolicyState) -> None:
        super().__init__(state)
        self._tree = SentHistory(state.index.block_size, TREE_BLOCKS)

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """The tree learns of the request when it is sent."""
        loads = [each.all_in_flight for each in instances]
        low, high = min(loads), max(loads)
        if high - low > MIN_IMBALANCE and high > low * MIN_IMBALANCE_RATIO:
            position = loads.index(low)
        else:
            urls = [each.url for each in instances]
            depths = self._tree.match_blocks(request.block_keys, urls)
            if max(depths) * self._tree.block_size > MIN_MATCH_SHARE * request.prompt_tokens:
                position = depths.index(max(depths))
            else:
                position = self.state.choose_least([self._tree.count_blocks(url) for url in urls])
        self._tree.record_served(instances[position].url, request.block_keys)
        return Decision(instances[position], 0.0, self.name)


class PowerOfTwoPolicy(LeastRequestsPolicy):
    """The one with fewer requests of two that are drawn (vllm-router, SGLang)."""

    name = "power_of_two"

    def __init__(self, state: PolicyState) -> None:
        super().__init__(state)
        self._chance = random.Random("power of two")

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Two at random."""
        drawn = self._chance.sample(instances, min(2, len(instances)))
        return super().choose_instance(request, drawn, now_us, is_retry)


class HashedPrefixPolicy(RoutingPolicy):
    """Consistent hashing of the prompt's beginning with bounded load (KubeAI's PrefixHash)."""

    name = "hashed_prefix"
    reads_prompts = True

    def __init__(self, state: PolicyState) -> None:
        super().__init__(state)
        self._ring = HashRing()

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """The first clockwise from the hash of what the prompt begins with that is not overloaded."""
        # Two blocks: the first one alone is the same in nearly all conversations of the trace.
        key = str(request.block_keys[:2][-1:])
        mean = (sum(each.all_in_flight for each in instances) + 1) / len(instances)
        offered = {
            each.url: each
            for each in instances
            if each.all_in_flight + 1 <= math.ceil(MAX_LOAD_FACTOR * mean)
        }
        self._ring.add_urls({each.url for each in instances})
        return Decision(offered[self._ring.find_owner(key, offered)], 0.0, self.name)


PEER_POLICIES = {
    each.name: each
    for each in (
        TokenLoadPolicy,
        StickyPolicy,
        BatchPolicy,
        DynamoPolicy,
        DecayPolicy,
        CacheAwarePolicy,
        PowerOfTwoPolicy,
        HashedPrefixPolicy,
    )
}
