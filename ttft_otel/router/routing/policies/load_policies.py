# SPDX-License-Identifier: Apache-2.0
"""Policies that compare instances by their requests alone: round robin, request rate, fewest requests.

policy_registry.py offers them as `round_robin` (the router's default), `qps`, and `least_requests` (the
default of encode and decode legs); other policies fall back to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.types import Decision, Instance, RoutingPolicy, RoutingRequest

SECONDS_PER_REQUEST: Final = 5.0  # of overdue answers that weigh as much as one more request


class RoundRobinPolicy(RoutingPolicy):
    """Needs no state of requests or instances, only one counter per leg."""

    def __init__(self, _: PolicyState) -> None:
        self._next_turn: dict[str, int] = {}

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the next of `instances`; a retry (`is_retry`) does not advance the turn."""
        turn = self._next_turn.get(request.leg, 0)
        # A retry's candidates lack the instance that failed:
        # advancing would skip another one's turn.
        if not is_retry:
            self._next_turn[request.leg] = turn + 1
        # Modulo here and not in the counter: the number of candidates changes.
        return Decision(instances[turn % len(instances)], 0.0, "round_robin")


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


class LeastRequestsPolicy(RoutingPolicy):
    """Compares `Instance.all_in_flight`, which counts a request until its response has ended.

    An instance that owes answers for long, and has begun none meanwhile, counts as if it had more: one
    that hangs would keep its share for as long as its clients leave and others come.
    """

    def __init__(self, state: PolicyState) -> None:
        self._state = state

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """Choose the fewest requests in flight, ties at random; the score is that number."""
        counts = [
            # A request counts until its answer has ended: for decoding this is the load that
            # matters.
            each.all_in_flight + each.owed_answers.measure_overdue_s(now_us) / SECONDS_PER_REQUEST
            for each in instances
        ]
        position = self._state.choose_least(counts)
        return Decision(
            instances[position], counts[position], "least_requests", candidate_scores=counts
        )
