# SPDX-License-Identifier: Apache-2.0
"""Policies that follow the longest cached prefix, whatever it costs in queueing: `prefix` and `kvaware`.

Both read the prefixes that policy_state.py estimates, and fall back to policies of load_policies.py and
session_ring.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ttft_otel.router.routing.policies.load_policies import LeastRequestsPolicy
from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.routing.policies.session_ring import SessionPolicy
from ttft_otel.router.types import Decision, Instance, RoutingPolicy, RoutingRequest

# Share of the prompt that must match: a system prompt common to all must not concentrate the load.
MIN_PREFIX_SHARE: Final = 0.3
# An instance is overloaded if its requests in flight exceed the minimum by more than both of these.
MAX_EXTRA_REQUESTS: Final = 8
MAX_REQUEST_RATIO: Final = 1.5


class PrefixPolicy(RoutingPolicy):
    """Prefers the longest prefix; load only limits how many requests a popular prefix attracts."""

    tracks_load = reads_prompts = True

    def __init__(self, state: PolicyState) -> None:
        self._state = state
        self._fallback = LeastRequestsPolicy(state)

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the longest cached prefix, ties by requests in flight; the score is uncached tokens."""
        loads = self._state.pending.list_loads(instances)
        # With pending prompts: a burst with one prefix should go where the first of it went.
        cached_tokens = self._state.estimate_cached(request, instances, loads)
        longest = max(cached_tokens)
        if longest <= MIN_PREFIX_SHARE * request.prompt_tokens:
            return self._fallback.choose_instance(request, instances, now_us, is_retry)
        in_flight = [each.all_in_flight for each in instances]
        positions = [position for position, there in enumerate(cached_tokens) if there == longest]
        position = positions[self._state.choose_least([in_flight[each] for each in positions])]
        lowest = min(in_flight)
        if (
            # Both: 8 more are little among hundreds, and half as many again is little among two.
            in_flight[position] > lowest + MAX_EXTRA_REQUESTS
            and in_flight[position] > MAX_REQUEST_RATIO * lowest
        ):
            return self._fallback.choose_instance(request, instances, now_us, is_retry)
        scores = [request.prompt_tokens - each for each in cached_tokens]
        return Decision(
            instances[position], scores[position], "prefix", longest, None, scores, cached_tokens
        )


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
