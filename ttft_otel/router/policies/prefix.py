# SPDX-License-Identifier: Apache-2.0
"""The instance that was sent the longest beginning of a prompt; the least busy where that is short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ttft_otel.router.choose import Asked, Choice, Instance, Policy
from ttft_otel.router.policies.least import Least
from ttft_otel.router.policies.state import State

ENOUGH: Final = 0.3  # of a prompt: what all prompts begin with draws nobody
MORE: Final = 8  # requests under way, more than where the fewest are, and
TIMES: Final = 1.5  # times as many: then a prefix is not worth it


class Prefix(Policy):
    """Looks at prefixes first and at load only so far that a popular one does not draw all requests."""

    books = prompts = True

    def __init__(self, state: State) -> None:
        self._state = state
        self._otherwise = Least(state)

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """The longest; the least busy among equals. The score is tokens left to compute."""
        loads = self._state.pending.of(instances)
        cached = self._state.cached(request, instances, loads)
        longest = max(cached)
        if longest <= ENOUGH * request.tokens:
            return self._otherwise.choose(request, instances, now, again)
        busy = [each.in_flight for each in instances]
        among = [at for at, there in enumerate(cached) if there == longest]
        at = among[self._state.least([busy[each] for each in among])]
        least = min(busy)
        if busy[at] > least + MORE and busy[at] > TIMES * least:
            return self._otherwise.choose(request, instances, now, again)
        scores = [request.tokens - each for each in cached]
        return Choice(instances[at], scores[at], "prefix", longest, None, scores, cached)
