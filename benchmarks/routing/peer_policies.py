# SPDX-License-Identifier: Apache-2.0
"""Published scores of other routers as policies, for comparison in simulate.py."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.routing.policies.pending_load import InstanceLoad
from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.types import Decision, Instance, RoutingPolicy, RoutingRequest


class TokenLoadPolicy(RoutingPolicy):
    """Uncached tokens: those an instance has to compute, and the new ones (llm-d's token load)."""

    name = "tokens"

    def __init__(self, state: PolicyState) -> None:
        self.state = state

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


PEER_POLICIES = {each.name: each for each in (TokenLoadPolicy, BatchPolicy, DecayPolicy)}
