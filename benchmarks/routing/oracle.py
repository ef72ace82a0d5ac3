# SPDX-License-Identifier: Apache-2.0
"""A policy that knows the instances' true speeds and caches: simulate.py's head-room for better knowledge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ttft_otel.router.choose import Asked, Choice, Instance, Policy
from ttft_otel.router.policies.pending import SECOND

if TYPE_CHECKING:
    from simulate import Server, World


class Oracle(Policy):
    """The soonest first token, wrong by no more than the noise; what it costs others it does not ask."""

    def __init__(self, world: World) -> None:
        self._world = world

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """The least true time; any among equals."""
        world = self._world
        scores = [self._time(world.by_url[each.url], request, now) for each in instances]
        at = world.state.least(scores)
        return Choice(instances[at], scores[at], "oracle")

    def _time(self, server: Server, request: Asked, now: int) -> float:
        world, wait, coming = self._world, 0.0, set[int]()
        if server.running is not None and not server.free:
            wait = (server.ends - now) / SECOND
            coming.update(server.running.blocks)
        for each in server.waiting:
            wait += world.seconds(server, each, world.cached(server, each, coming))
            coming.update(each.blocks)
        return wait + world.seconds(server, request, world.cached(server, request, coming))
