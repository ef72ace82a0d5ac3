# SPDX-License-Identifier: Apache-2.0
"""The instance that was sent the fewest requests lately; kvaware.py and others fall back to it."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.choose import Asked, Choice, Instance, Policy
from ttft_otel.router.policies.state import State


class Qps(Policy):
    """Arrivals within the window of pending.py; the first among equals."""

    books = True

    def __init__(self, state: State) -> None:
        self._pending = state.pending

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """The least rate; the score is requests within the window."""
        window = self._pending.window
        sent = [self._pending.at(each.url).arrivals(now, window) for each in instances]
        at = sent.index(min(sent))
        return Choice(instances[at], sent[at], "qps", scores=sent)
