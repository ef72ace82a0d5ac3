# SPDX-License-Identifier: Apache-2.0
"""Policy `kvaware`: the longest cached prefix if it covers nearly the whole prompt, else the session."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.routing.policies.session_ring import SessionPolicy
from ttft_otel.router.types import Decision, Instance, RoutingPolicy, RoutingRequest


class KvAwarePolicy(RoutingPolicy):
    """The rule of production-stack's kvaware router: at most `kv_aware_threshold` tokens uncached.

    Other requests follow their session, or without one the lowest request rate.
    """

    tracks_load = reads_prompts = True

    def __init__(self, state: PolicyState) -> None:
        self._state = state
        self._fallback = SessionPolicy(state)

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the longest cached prefix, ties by session or rate; the score is uncached tokens."""
        # Without loads: what is cached now counts, not what is queued.
        cached_tokens = self._state.estimate_cached(request, instances)
        longest = max(cached_tokens)
        if not longest or longest < request.prompt_tokens - self._state.options.kv_aware_threshold:
            return self._fallback.choose_instance(request, instances, now_us, is_retry)
        tied = [
            each for each, tokens in zip(instances, cached_tokens, strict=True) if tokens == longest
        ]
        chosen = tied[0]
        # A prefix that all have (a system prompt, a shared cache) must not draw all requests to one.
        if len(tied) > 1:
            chosen = self._fallback.choose_instance(request, tied, now_us, is_retry).instance
        tokens_left = [request.prompt_tokens - each for each in cached_tokens]
        return Decision(
            chosen,
            request.prompt_tokens - longest,
            "kvaware",
            longest,
            None,
            tokens_left,
            cached_tokens,
        )
