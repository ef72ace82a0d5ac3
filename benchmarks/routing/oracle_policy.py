# SPDX-License-Identifier: Apache-2.0
"""A policy that knows the instances' true speeds and caches, as an upper bound in simulate.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.routing.simulated_instance import SimulatedInstance
from ttft_otel.router.routing.policies.pending_load import US_PER_SECOND
from ttft_otel.router.routing.policies.policy_state import PolicyState, RoutingPolicy
from ttft_otel.router.types import Decision, Instance, RoutingRequest


class OraclePolicy(RoutingPolicy):
    """Chooses the soonest first token, exact except for noise; ignores the delay of other requests.

    by_url: the instances as they are. state: breaks ties.
    """

    def __init__(self, by_url: Mapping[str, SimulatedInstance], state: PolicyState) -> None:
        super().__init__(state)
        self._by_url = by_url

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """The instance with the least true time; a random one of equals."""
        scores = [predict_ttft_s(self._by_url[each.url], request, now_us) for each in instances]
        # Ties as the router breaks them, so that the oracle differs by what it knows only.
        position = self.state.choose_least(scores)
        return Decision(instances[position], scores[position], "oracle")


def predict_ttft_s(server: SimulatedInstance, request: RoutingRequest, now_us: int) -> float:
    """Seconds until the first token of a request that is sent there now, without noise of what waits."""
    wait_s, coming_blocks = 0.0, set[int]()
    # The true end of the running prefill, noise included: what no router can know.
    if server.running is not None and not server.free:
        wait_s = (server.prefill_ends_us - now_us) / US_PER_SECOND
        coming_blocks.update(server.running.block_keys)
    for each in server.waiting:
        wait_s += server.compute_prefill_s(each, server.count_cached_tokens(each, coming_blocks))
        # What waits there will be cached before this request's turn.
        coming_blocks.update(each.block_keys)
    return wait_s + server.compute_prefill_s(
        request, server.count_cached_tokens(request, coming_blocks)
    )
