# SPDX-License-Identifier: Apache-2.0
"""The instance with the longest cached prefix, if little of the prompt is left; else by session or rate."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.choose import Asked, Choice, Instance, Policy
from ttft_otel.router.policies.session import Session
from ttft_otel.router.policies.state import State


class Kvaware(Policy):
    """As users of other routers know it: `threshold` tokens at most may be missing."""

    books = prompts = True

    def __init__(self, state: State) -> None:
        self._state = state
        self._otherwise = Session(state)

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """The longest; among equals by session or rate. The score is tokens left to compute."""
        cached = self._state.cached(request, instances)
        most = max(cached)
        if not most or most < request.tokens - self._state.options.threshold:
            return self._otherwise.choose(request, instances, now, again)
        tied = [each for each, held in zip(instances, cached, strict=True) if held == most]
        to = tied[0]
        if len(tied) > 1:  # else the first would get what all have: a system prompt, a shared cache
            to = self._otherwise.choose(request, tied, now, again).instance
        left = [request.tokens - each for each in cached]
        return Choice(to, request.tokens - most, "kvaware", most, None, left, cached)
