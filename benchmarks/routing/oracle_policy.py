# SPDX-License-Identifier: Apache-2.0
"""A policy that knows the instances' true speeds and caches, as an upper bound in simulate.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.routing.simulated_instance import SimulatedInstance
from ttft_otel.router.routing.policies.policy_state import PolicyState, RoutingPolicy
from ttft_otel.router.types import Decision, Instance, RoutingRequest


class OraclePolicy(RoutingPolicy):
    """Chooses the soonest first token, exact except for noise; ignores the delay of other requests.

    by_url: the instances as they are. state: breaks ties.
    """

    name = "oracle"

    def __init__(self, by_url: Mapping[str, SimulatedInstance], state: PolicyState) -> None:
        super().__init__(state)
        self._by_url = by_url

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """The instance with the least true time; a random one of equals."""
        scores = [self._by_url[each.url].predict_ttft_s(request, now_us) for each in instances]
        # Ties as the router breaks them, so that the oracle differs by what it knows only.
        position = self.state.choose_least(scores)
        return Decision(instances[position], scores[position], "oracle")
