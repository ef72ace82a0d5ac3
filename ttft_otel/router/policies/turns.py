# SPDX-License-Identifier: Apache-2.0
"""Each leg's instances in turn: the router's default, round_robin."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.choose import Asked, Choice, Instance, Policy
from ttft_otel.router.policies.state import State


class Turns(Policy):
    """Alike for every request and fleet."""

    def __init__(self, _: State) -> None:
        self._next: dict[str, int] = {}

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """Pick the next one; a request that is tried again takes no turn of its own."""
        turn = self._next.get(request.leg, 0)
        if not again:
            self._next[request.leg] = turn + 1
        return Choice(instances[turn % len(instances)], 0.0, "round_robin")
