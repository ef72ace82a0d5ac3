# SPDX-License-Identifier: Apache-2.0
"""The instance with the least expected time to first token: what it has to do, and this request's prefill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ttft_otel.router.choose import Asked, Choice, Instance, Policy
from ttft_otel.router.policies.model import Line
from ttft_otel.router.policies.pending import SECOND, Load, Until
from ttft_otel.router.policies.state import State
from ttft_otel.router.policies.work import Work, trapezoid

NEAR: Final = 0.05  # scores that differ by less are equal: times are not predicted any better
LATE: Final = 0.1  # of a prefill is still to come when it lasts longer than predicted


class Late(Exception):
    """No instance can make it in time; `after` so many seconds one might."""

    def __init__(self, after: float) -> None:
        super().__init__(f"No instance can answer in time; try again in {after:.1f} s.")
        self.after = after


class Ttft(Policy):
    """By seconds where models know them, else by pairs (the trapezoid formula)."""

    books = prompts = True

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def learns(self) -> bool:
        """Pairs need no model."""
        return self._state.options.score == "calibrated"

    def choose(
        self, request: Asked, instances: Sequence[Instance], now: int, again: bool
    ) -> Choice:
        """The least score; any among equals. Raises Late."""
        state = self._state
        if self.learns:
            known = state.models.known(request.model)
            if known is not None:
                return self._soonest(request, instances, *known, now)
        cached = state.cached(request, instances)
        scores = [
            load.pairs + trapezoid(request.tokens, there)
            for load, there in zip(state.pending.of(instances), cached, strict=True)
        ]
        at = state.least(scores)
        return Choice(instances[at], scores[at], "trapezoid", cached[at], None, scores, cached)

    def _soonest(
        self,
        request: Asked,
        instances: Sequence[Instance],
        line: Line,
        factors: Mapping[str, float],
        now: int,
    ) -> Choice:
        """The least sum of this request's time and the time that it costs those who come next.

        Its prefill lasts `own` seconds after `wait`: whoever comes before the end of the wait is delayed
        by all of `own`, whoever comes during the prefill by half of it on average.
        """
        pending = self._state.pending
        loads = pending.of(instances)
        cached = self._state.cached(request, instances, loads)
        owns = _prefills(request.tokens, cached, line)
        if factors:
            owns = [
                own * factors.get(each.url, 1.0) for own, each in zip(owns, instances, strict=True)
            ]
        waits = _waits(instances, loads, line, factors, now)
        crowd = pending.crowd(now, len(instances))
        scores = [
            wait + own + crowd * own * (wait + 0.5 * own)
            for wait, own in zip(waits, owns, strict=True)
        ]
        at = self._freshest(loads, scores)
        if self._state.options.slo and request.tokens:
            spent = (now - request.arrived) / SECOND if request.arrived else 0.0
            times = [
                spent + max(wait, request.ahead) + own + self._state.besides.get(each.url, 0.0)
                for wait, own, each in zip(waits, owns, instances, strict=True)
            ]
            at = self._in_time(request, loads, waits, times, at)
        predicted = waits[at] + owns[at]
        return Choice(
            instances[at], scores[at], "calibrated", cached[at], predicted, scores, cached
        )

    def _in_time(
        self,
        request: Asked,
        loads: Sequence[Load],
        waits: Sequence[float],
        times: Sequence[float],
        at: int,
    ) -> int:
        """This one if it makes it in time, else the soonest that does, else the soonest idle one.

        Waiting makes nobody better who is idle, and only who is asked can show that it became fast;
        but where the request has to queue before, waiting does.
        """
        slo, queue = self._state.options.slo, request.ahead if request.queued else 0.0
        if times[at] <= slo:
            return at
        at = self._state.least(times)
        if times[at] <= slo:
            return at
        idle = [place for place, load in enumerate(loads) if not load.entries]
        if queue or not idle:
            ends = zip(times, waits, strict=True)
            raise Late(min(min(time - slo, max(wait, queue)) for time, wait in ends))
        return min(idle, key=times.__getitem__)

    def _freshest(self, loads: Sequence[Load], scores: Sequence[float]) -> int:
        """Of those about as good as the least the one that had the least to compute lately.

        Predictions are no better than that, and what it has to evict for this prompt is the oldest.
        """
        most = min(scores) * (1 + NEAR)
        near = [at for at, score in enumerate(scores) if score <= most]
        if len(near) == 1:
            return near[0]
        return near[self._state.least([loads[at].lately for at in near])]


def _prefills(tokens: int, cached: Iterable[int], line: Line) -> list[float]:
    """Seconds of a prompt's prefill with so many tokens cached; written out: calls are what this costs.

    It is the whole prompt's without that of its cached part alone.
    """
    a, b, d = line
    half = 0.5 * d
    once = b + half
    whole = a + tokens * (once + half * tokens)
    return [whole - there * (once + half * there) for there in cached]


def _waits(
    instances: Sequence[Instance],
    loads: Sequence[Load],
    line: Line,
    factors: Mapping[str, float],
    now: int,
) -> list[float]:
    """Seconds until each instance has done what it has; what is running is partly done."""
    waits, clock = [], now / SECOND
    for each, load in zip(instances, loads, strict=True):
        if not load.entries:
            waits.append(0.0)
            continue
        until = load.until
        if until is None or until.line is not line:
            until = load.until = _until(load, line, factors.get(each.url, 1.0), now)
        wait = until.end - clock
        waits.append(wait if wait > until.least else until.least)
    return waits


def _until(load: Load, line: Line, factor: float, now: int) -> Until:
    every = factor * line.seconds(Work(load.fresh, load.pairs), len(load.entries))
    running = load.running(now)
    if running is None:
        return Until(line, 0.0, 0.0)
    one, elapsed = running
    least = every - (1 - LATE) * factor * line.seconds(one)
    return Until(line, now / SECOND - elapsed + every, least)
