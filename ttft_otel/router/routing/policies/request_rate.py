# SPDX-License-Identifier: Apache-2.0
"""Policy `qps`: the fewest requests sent recently; session and kvaware fall back to it."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.types import Decision, Instance, RoutingPolicy, RoutingRequest


class RequestRatePolicy(RoutingPolicy):
    """Counts arrivals within the window of --request-stats-window (pending_load.py)."""

    tracks_load = True

    def __init__(self, state: PolicyState) -> None:
        self._pending = state.pending

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the fewest arrivals, ties in the order of `instances`; the score is that number."""
        window_s = self._pending.window_s
        # Arrivals, and not requests in flight, which least_requests compares.
        arrivals = [
            self._pending.get_load(each.url).count_arrivals(now_us, window_s) for each in instances
        ]
        # The first of equals, which the next request then finds one ahead: they take turns.
        position = arrivals.index(min(arrivals))
        return Decision(instances[position], arrivals[position], "qps", candidate_scores=arrivals)
