# SPDX-License-Identifier: Apache-2.0
"""Holds requests that would only wait in every instance's queue (--max-queue-ms); endpoint.py asks.

An engine serves its queue in the order of arrival. What waits here goes on by vLLM's `priority`, lower values
first, and short prompts before long ones within a bound, to the instance that is best when it goes. Queues
and prefills are as the policy predicts them.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from ttft_otel.model.stages import HELD_BY_PRIORITY
from ttft_otel.router.errors import FirstByteTimeout, RequestRejected, RouterError
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.routing.policies.policy_state import US_PER_SECOND, RoutingPolicy
from ttft_otel.router.timeline import Hold, RequestTimeline
from ttft_otel.router.types import Instance, RoutingRequest
from ttft_otel.router.upstream.failures import build_unavailable_error
from ttft_otel.tracing import clock

# A prompt goes before those that come later than so many times its own prefill after it, however short they
# are. In the simulation the mean TTFT hardly falls beyond 4; by arrival alone, 0, it is above that without.
PATIENCE: Final = 4.0
# Seconds between two looks. The longest without an event: instances come back, and lines are learnt anew.
MIN_PAUSE_S: Final = 0.001
MAX_PAUSE_S: Final = 0.25

FindCandidates = Callable[[str, str], Sequence[Instance]]
Schedule = Callable[[float, Callable[[], None]], object]  # after so many seconds


def schedule_on_loop(delay_s: float, action: Callable[[], None]) -> object:
    """Call `action` after `delay_s` seconds."""
    return asyncio.get_running_loop().call_later(delay_s, action)


class HeldPrompt(msgspec.Struct, eq=False):
    """A request that waits; on_end is called once: without an error when it may go on.

    rank: its priority, until when it has patience (microseconds), and the order of arrival. judge_us: when
    its time limit is to be judged again, 0 for none.
    """

    request: RoutingRequest
    rank: tuple[int, int, int]
    hold: Hold
    on_end: Callable[[RouterError | None], None]
    judge_us: int = 0


class HoldQueue:
    """The requests that wait. All times are arguments or come from `now_us`, so that simulations can use it.

    find_candidates: instances by leg and model. schedule: calls something later. counts: how holds ended.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        find_candidates: FindCandidates,
        limits: RouterLimits,
        schedule: Schedule = schedule_on_loop,
        now_us: Callable[[], int] = clock.now_us,
    ) -> None:
        self.policy, self.limits = policy, limits
        self.counts: Counter[str] = Counter()
        self.max_queue_s = policy.state.options.max_queue_s
        self._find_candidates, self._schedule, self._now_us = find_candidates, schedule, now_us
        self._held: list[HeldPrompt] = []  # by rank
        self._numbers = itertools.count()
        self._due_us = 0  # of the next look, 0 for none
        policy.state.pending.on_removed = self._look_soon

    def __len__(self) -> int:
        return len(self._held)

    async def wait_turn(
        self, request: RoutingRequest, priority: int, timeline: RequestTimeline
    ) -> None:
        """Wait until `request` may go to an instance. Raises RouterError.

        The caller sends it before it awaits anything else: the next one is judged with its load.
        """
        if self.is_free(request):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        hold = Hold(self._now_us())
        held = self.add_request(request, priority, hold, partial(_end_turn, turn))
        timeline.record_hold(hold)
        try:
            await turn
            hold.released_us = self._now_us()
        finally:
            if held in self._held:  # its client has left
                self._end(held, "left")

    def is_free(self, request: RoutingRequest) -> bool:
        """Whether `request` may go on at once."""
        return not self._held and self._predict_wait(request, self._now_us())[0] <= 0

    def add_request(
        self,
        request: RoutingRequest,
        priority: int,
        hold: Hold,
        on_end: Callable[[RouterError | None], None],
    ) -> HeldPrompt:
        """Let `request` wait. Raises SloUnreachable if it would be too late by now.

        Of more than --max-held the last one is refused, which may be another one.
        """
        now_us = self._now_us()
        prefill_s = self._predict_wait(request, now_us)[1]
        patient_until_us = now_us + round(PATIENCE * prefill_s * US_PER_SECOND)
        rank = priority, patient_until_us, next(self._numbers)
        held = HeldPrompt(request, rank, hold, on_end)
        self._judge_limit(held, now_us)
        insort(self._held, held, key=lambda each: each.rank)
        if len(self._held) > self.limits.max_held:
            message = "The router holds too many requests until an instance can take them."
            self._end(self._held[-1], "full", RequestRejected(429, message, reason="max_held"))
        self._look_soon()
        return held

    def _predict_wait(self, request: RoutingRequest, now_us: int) -> tuple[float, float]:
        """Seconds by which the shortest queue exceeds the limit, 0 or less if it does not; of the prefill."""
        candidates = self._find_candidates(request.leg, request.model)
        # Without an instance it is refused where instances are chosen.
        queue_s, prefill_s = (
            self.policy.predict_wait(request, candidates, now_us) if candidates else (0.0, 0.0)
        )
        return queue_s - self.max_queue_s, prefill_s

    def _judge_limit(self, held: HeldPrompt, now_us: int) -> None:
        """Raise SloUnreachable if the time that it may take cannot be kept; else note when it may be so."""
        request, policy = held.request, self.policy
        slo_s = policy.state.find_slo_s(request)
        candidates = self._find_candidates(request.leg, request.model)
        if not slo_s or not candidates:
            return
        choice = policy.choose_instance(request, candidates, now_us, True)
        end_us = now_us + round((policy.state.predict_ttft(choice) or 0.0) * US_PER_SECOND)
        slack_us = request.arrived_us + round(slo_s * US_PER_SECOND) - end_us
        held.judge_us = now_us + max(slack_us, round(MIN_PAUSE_S * US_PER_SECOND))

    def _look_soon(self) -> None:
        """Something has changed: who can go on is judged again, once for all that happens now."""
        if self._held:
            self._look_after(0.0)

    def _look_after(self, delay_s: float) -> None:
        due_us = self._now_us() + round(delay_s * US_PER_SECOND)
        if not self._due_us or due_us < self._due_us:
            self._due_us = due_us
            self._schedule(delay_s, partial(self._look, due_us))

    def _look(self, due_us: int) -> None:
        """Let the first one go on that can, and end those that are too late."""
        if due_us != self._due_us:  # a later look has taken its place
            return
        self._due_us = 0
        now_us, pause_s = self._now_us(), MAX_PAUSE_S
        excess_s: dict[str, float] = {}  # by model
        for held in tuple(self._held):
            model = held.request.model
            if model not in excess_s:
                excess_s[model] = self._predict_wait(held.request, now_us)[0]
            if excess_s[model] <= 0:
                self._release(held)
                # Its load is there at the next look.
                pause_s = 0.0
                break
            try:
                self._check_time(held, now_us)
            except RouterError as error:
                self._end(held, "late", error)
            else:
                until_judged_s = (held.judge_us - now_us) / US_PER_SECOND
                waits = (pause_s, excess_s[model], until_judged_s if held.judge_us else pause_s)
                pause_s = max(min(waits), MIN_PAUSE_S)
        if self._held:
            self._look_after(pause_s)

    def _check_time(self, held: HeldPrompt, now_us: int) -> None:
        """Raise RouterError if `held` has waited too long."""
        timeout_s = self.limits.first_byte_timeout
        if timeout_s and now_us - held.hold.began_us >= timeout_s * US_PER_SECOND:
            reason = FirstByteTimeout(f"none could take the request within {timeout_s:g} s")
            raise build_unavailable_error(held.request.leg, reason)
        if held.judge_us and now_us >= held.judge_us:
            self._judge_limit(held, now_us)

    def _release(self, held: HeldPrompt) -> None:
        for other in self._held:
            # Those that came before it.
            is_urgent = held.rank[0] < other.rank[0] and held.rank[2] > other.rank[2]
            if is_urgent and other.request.model == held.request.model:
                other.hold.reason = HELD_BY_PRIORITY
        self._end(held, "sent")

    def _end(self, held: HeldPrompt, result: str, error: RouterError | None = None) -> None:
        self._held.remove(held)
        self.counts[result] += 1
        held.on_end(error)


def _end_turn(turn: asyncio.Future[None], error: RouterError | None) -> None:
    if turn.done():  # cancelled
        return
    if error is None:
        turn.set_result(None)
    else:
        turn.set_exception(error)
