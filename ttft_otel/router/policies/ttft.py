# SPDX-License-Identifier: Apache-2.0
"""The instance with the least expected time to first token: what it has to do, and this request's prefill."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.choose import Asked, Choice, Instance
from ttft_otel.router.policies.model import Line
from ttft_otel.router.policies.pending import Load
from ttft_otel.router.policies.state import State
from ttft_otel.router.policies.work import trapezoid


class Late(Exception):
    """No instance can make it in time; `after` so many seconds one might."""

    def __init__(self, after: float) -> None:
        super().__init__(f"No instance can answer in time; try again in {after:.1f} s.")
        self.after = after


class Ttft:
    """By seconds where models know them of every instance, else by pairs (the trapezoid formula)."""

    def __init__(self, state: State) -> None:
        self._state = state

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """The least score; any among equals. Raises Late."""
        state = self._state
        if state.options.score == "calibrated":
            lines = state.models.lines(request.model, [each.url for each in instances])
            if lines is not None:
                return self._soonest(request, instances, lines, now)
        cached = state.cached(request, instances)
        scores = [
            state.pending.at(each.url).pairs + trapezoid(request.tokens, there)
            for each, there in zip(instances, cached, strict=True)
        ]
        at = state.least(scores)
        return Choice(instances[at], scores[at], "trapezoid", cached[at], None, scores, cached)

    def _soonest(
        self, request: Asked, instances: Sequence[Instance], lines: Sequence[Line], now: int
    ) -> Choice:
        cached = self._state.cached(request, instances, queued=True)
        load_of, tokens, scores = self._state.pending.at, request.tokens, []
        for each, line, there in zip(instances, lines, cached, strict=True):
            a, b, d = line  # written out: with 128 instances calls are what this costs
            fresh = tokens - there
            score = a + b * fresh + d * ((there + 1 + tokens) * fresh // 2)
            load = load_of(each.url)
            if load.entries:
                score += _wait(load, line, now)
            scores.append(score)
        at = self._state.least(scores)
        slo = self._state.options.slo
        if slo and scores[at] > slo:
            raise Late(scores[at] - slo)
        return Choice(
            instances[at], scores[at], "calibrated", cached[at], scores[at], scores, cached
        )


def _wait(load: Load, line: Line, now: int) -> float:
    """Seconds until the instance has done what it has; what is running is partly done."""
    a, b, d = line
    every = a * len(load.entries) + b * load.fresh + d * load.pairs
    running = load.running(now)
    if running is None:
        return every
    (fresh, pairs), elapsed = running
    one = a + b * fresh + d * pairs
    return every - (elapsed if elapsed < one else one)
