# SPDX-License-Identifier: Apache-2.0
"""Scores that others have published, as policies over the same state; simulate.py runs them beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.choose import Asked, Choice, Instance, Policy
from ttft_otel.router.policies.pending import Load
from ttft_otel.router.policies.state import State


class Tokens(Policy):
    """Uncached tokens: those an instance has to compute, and the new ones (llm-d's token load)."""

    name = "tokens"

    def __init__(self, state: State) -> None:
        self.state = state

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """The fewest."""
        cached = self.state.cached(request, instances)
        scores = [
            self.score(each.url, self.state.pending.at(each.url), request.tokens - there, now)
            for each, there in zip(instances, cached, strict=True)
        ]
        at = self.state.least(scores)
        return Choice(instances[at], scores[at], self.name, cached[at])

    def score(self, url: str, load: Load, new: int, now: int) -> float:
        """What an instance with this load is worth, the less the better."""
        return load.fresh + new


class Batch(Tokens):
    """New tokens times requests there (LMetric)."""

    name = "batch"

    def score(self, url: str, load: Load, new: int, now: int) -> float:
        """Tokens of prefill that it would have, times the requests that it would have."""
        return (load.fresh + new) * (len(load.entries) + 1)


class Decay(Tokens):
    """Uncached tokens, those of the running prefill fewer as its predicted time passes (Dynamo)."""

    name = "decay"

    def score(self, url: str, load: Load, new: int, now: int) -> float:
        """Tokens left, by the same fitted times that ours has."""
        running, known = load.running(now), self.state.models.known("model")
        done = 0.0
        if running is not None and known is not None:
            (work, elapsed), (line, factors) = running, known
            whole = line.seconds(work) * factors.get(url, 1.0)
            done = work.fresh * min(1.0, elapsed / max(whole, 1e-9))
        return load.fresh + new - done


PEERS = {each.name: each for each in (Tokens, Batch, Decay)}
