# SPDX-License-Identifier: Apache-2.0
"""The instance that was sent the longest beginning of this prompt; without any, by rate."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.choose import Asked, Choice, Instance
from ttft_otel.router.policies.qps import Qps
from ttft_otel.router.policies.state import State


class Prefix:
    """Looks at prefixes alone, not at load."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._otherwise = Qps(state)

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """The longest; any among equals. The score is tokens left to compute."""
        cached = self._state.cached(request, instances, queued=True)
        if not any(cached):
            return self._otherwise.choose(request, instances, now, again)
        scores = [request.tokens - each for each in cached]
        at = self._state.least(scores)
        return Choice(instances[at], scores[at], "prefix", cached[at], None, scores, cached)
