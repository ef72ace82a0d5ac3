# SPDX-License-Identifier: Apache-2.0
"""Policy `round_robin`: the instances of each leg in turn; the router's default."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.types import Decision, Instance, RoutingPolicy, RoutingRequest


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
