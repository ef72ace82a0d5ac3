# SPDX-License-Identifier: Apache-2.0
"""A policy that knows the instances' true speeds and caches, as an upper bound in simulate.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ttft_otel.router.routing.policies.pending_load import US_PER_SECOND
from ttft_otel.router.types import Decision, Instance, RoutingPolicy, RoutingRequest

# At run time this would be a circle: the simulation imports this module.
if TYPE_CHECKING:
    from benchmarks.routing.fleet_simulation import SimulatedInstance, Simulation


class OraclePolicy(RoutingPolicy):
    """Chooses the soonest first token, exact except for noise; ignores the delay of other requests."""

    def __init__(self, world: Simulation) -> None:
        self._simulation = world

    def choose_instance(
        self, request: RoutingRequest, instances: Sequence[Instance], now_us: int, is_retry: bool
    ) -> Decision:
        """The instance with the least true time; a random one of equals."""
        world = self._simulation
        scores = [
            self._predict_ttft_s(world.by_url[each.url], request, now_us) for each in instances
        ]
        # Ties as the router breaks them, so that the oracle differs by what it knows only.
        position = world.state.choose_least(scores)
        return Decision(instances[position], scores[position], "oracle")

    def _predict_ttft_s(
        self, server: SimulatedInstance, request: RoutingRequest, now_us: int
    ) -> float:
        simulation, wait_s, coming_blocks = self._simulation, 0.0, set[int]()
        # The true end of the running prefill, noise included: what no router can know.
        if server.running is not None and not server.free:
            wait_s = (server.prefill_ends_us - now_us) / US_PER_SECOND
            coming_blocks.update(server.running.block_keys)
        for each in server.waiting:
            wait_s += simulation.compute_prefill_s(
                server, each, simulation.count_cached_tokens(server, each, coming_blocks)
            )
            # What waits there will be cached before this request's turn.
            coming_blocks.update(each.block_keys)
        return wait_s + simulation.compute_prefill_s(
            server, request, simulation.count_cached_tokens(server, request, coming_blocks)
        )
