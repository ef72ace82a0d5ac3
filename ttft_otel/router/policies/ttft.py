# SPDX-License-Identifier: Apache-2.0
"""The instance with the least expected time to first token: what it has to do, and this request's prefill."""

from __future__ import annotations

from collections.abc import Sequence

from ttft_otel.router.choose import Asked, Choice, Instance
from ttft_otel.router.policies.model import Line
from ttft_otel.router.policies.state import State
from ttft_otel.router.policies.work import Work, trapezoid, work


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
        lines = [state.models.line(request.model, each.url) for each in instances]
        known = [line for line in lines if line is not None]
        if state.options.score == "calibrated" and len(known) == len(instances):
            return self._soonest(request, instances, known, now)
        cached = state.cached(request, instances)
        scores = [
            state.pending.at(each.url).pairs + trapezoid(request.tokens, there)
            for each, there in zip(instances, cached, strict=True)
        ]
        at = state.least(scores)
        return Choice(instances[at], scores[at], "trapezoid", cached[at])

    def _soonest(
        self, request: Asked, instances: Sequence[Instance], lines: Sequence[Line], now: int
    ) -> Choice:
        cached = self._state.cached(request, instances, queued=True)
        scores = [
            self._wait(each.url, line, now) + line.seconds(work(request.tokens, there))
            for each, line, there in zip(instances, lines, cached, strict=True)
        ]
        at = self._state.least(scores)
        slo = self._state.options.slo
        if slo and scores[at] > slo:
            raise Late(scores[at] - slo)
        return Choice(instances[at], scores[at], "calibrated", cached[at], scores[at])

    def _wait(self, url: str, line: Line, now: int) -> float:
        """Seconds until the instance has done what it has; what is running is partly done."""
        load = self._state.pending.at(url)
        running = load.running(now)
        if running is None:
            return 0.0
        todo, elapsed = running
        every = line.seconds(Work(load.fresh, load.pairs), len(load.entries))
        return every - min(elapsed, line.seconds(todo))
