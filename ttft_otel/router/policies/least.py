# SPDX-License-Identifier: Apache-2.0
"""The instance with the fewest requests under way; the default of encoder and decode legs."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.choose import Asked, Choice, Instance, Policy
from ttft_otel.router.policies.state import State


class Least(Policy):
    """Requests under way as the fleet counts them, decodes too."""

    def __init__(self, state: State) -> None:
        self._state = state

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """The fewest; any among equals."""
        counts = [each.in_flight for each in instances]
        at = self._state.least(counts)
        return Choice(instances[at], counts[at], "least_requests", scores=counts)
