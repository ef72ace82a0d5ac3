# SPDX-License-Identifier: Apache-2.0
"""Published scores of other routers as policies, for comparison in simulate.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ttft_otel.router.routing.policies.pending_load import InstanceLoad
from ttft_otel.router.routing.policies.policy_registry import HashRing
from ttft_otel.router.routing.policies.policy_state import PolicyState, RoutingPolicy
from ttft_otel.router.types import Decision, Instance, RoutingRequest

MAX_LOAD_FACTOR: Final = 1.25  # of an instance's requests to the mean, as KubeAI has it by default


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


class BatchPolicy(TokenLoadPolicy):
    """New tokens times requests there (LMetric)."""

    name = "batch"

    def score_instance(self, url: str, load: InstanceLoad, new_tokens: int, now_us: int) -> float:
        """Tokens of prefill that it would have, times the requests that it would have."""
        return (load.tokens_to_compute + new_tokens) * (len(load.entries) + 1)


class DecayPolicy(TokenLoadPolicy):
    """Uncached tokens, those of the running prefill fewer as its predicted time passes (Dynamo)."""

    name = "decay"

    def score_instance(self, url: str, load: InstanceLoad, new_tokens: int, now_us: int) -> float:
        """Tokens left, by the same fitted times that ours has."""
        # "model" is the name under which the simulation's requests teach the fit.
        running, known = load.estimate_running(now_us), self.state.models.get_line("model")
        done = 0.0
        if running is not None and known is not None:
            (work, elapsed), (line, factors) = running, known
            whole = line.predict_seconds(work) * factors.get(url, 1.0)
            # Not more than all: a prefill that takes longer than predicted is done, not negative.
            done = work.tokens_to_compute * min(1.0, elapsed / max(whole, 1e-9))
        return load.tokens_to_compute + new_tokens - done


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
    each.name: each for each in (TokenLoadPolicy, BatchPolicy, DecayPolicy, HashedPrefixPolicy)
}
