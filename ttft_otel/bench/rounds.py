# SPDX-License-Identifier: Apache-2.0
"""`multi-round`: users who ask, read the answer, and ask again with the whole history.

As in production-stack's multi-round-qa.py: so many users are in a conversation at any time. Each asks
num_users/qps seconds after its question before, or when the answer to that is there, whichever is
later; one leaves after its rounds, and another one has come. The first ones are met in the middle of
their conversations, so that not all of them end at once; what they said before is not sent.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Final

from ttft_otel.bench.ask import Ask, Form, text
from ttft_otel.bench.drive import LEAD_NS, Driver, drop

USER: Final = "x-user-id"  # what a router's session affinity may go by


@dataclass(frozen=True, slots=True)
class Rounds:
    """Users, their rounds, requests per second of all, lengths in tokens; seconds and requests end it."""

    users: int = 5
    rounds: int = 10
    qps: float = 1.0
    system: int = 100
    history: int = 200
    question: int = 20
    answer: int = 100
    seconds: float = 60.0
    requests: int | None = None

    @property
    def longest(self) -> int:
        """About how many tokens a last question and its answer take, with all before them."""
        return self.system + self.history + self.rounds * (self.question + self.answer)

    @property
    def gap(self) -> float:
        """Seconds between two questions of one user."""
        return self.users / self.qps

    @property
    def between(self) -> float:
        """Seconds between the arrivals of two users."""
        return self.gap * max(1, self.rounds - 1) / self.users

    def births(self) -> list[float]:
        """When each user asked, or would have asked, its first question."""
        before = [-place * self.between for place in range(self.users)]
        after = math.ceil(self.seconds / self.between)
        return before + [place * self.between for place in range(1, after)]


async def conversations(driver: Driver, form: Form, rounds: Rounds, seed: int) -> None:
    """Have all users' conversations until time or requests are used up and the last answer is there."""
    start = monotonic_ns() + 2 * LEAD_NS
    system = form.draw(random.Random(f"rounds/{seed}"), rounds.system)
    left = _Left(rounds.requests)
    users = [
        _User(driver, form, rounds, text(system), place, random.Random(f"user/{seed}/{place}"))
        for place in range(len(rounds.births()))
    ]
    tasks = {
        asyncio.create_task(user.talk(start, birth, left))
        for user, birth in zip(users, rounds.births(), strict=True)
    }
    try:
        await asyncio.gather(*tasks)
    finally:
        await drop(tasks)


def openings(form: Form, rounds: Rounds, seed: int) -> Iterator[Ask]:
    """First questions, without end, of users that no conversation has; for a warm-up."""
    system = text(form.draw(random.Random(f"rounds/{seed}"), rounds.system))
    for number in itertools.count(1):
        asked = _question(form, rounds, random.Random(f"user/{seed}/{number}"), system)
        headers = {USER: f"warmup-{number}"}
        yield form.talk([{"role": "user", "content": asked}], rounds.answer, headers=headers)


def _question(form: Form, rounds: Rounds, chance: random.Random, system: str | None) -> str:
    """What a user asks; the first time after the system prompt and the user's history."""
    asked = text(form.draw(chance, rounds.question))
    if system is None:
        return asked
    own = text(form.draw(chance, rounds.history))
    return f"{system} {own} {asked}"


class _Left:
    """How many requests may still be sent; nobody waits for a time once there is none."""

    def __init__(self, count: int | None) -> None:
        """So many, or as many as there is time for."""
        self.count = math.inf if count is None else count
        self.spent = asyncio.Event()

    def take(self) -> bool:
        """Use up one; False where there is none."""
        self.count -= 1
        if self.count <= 0:
            self.spent.set()
        return self.count >= 0

    async def until(self, due_ns: int) -> bool:
        """Sleep until a time of the monotonic clock; False as soon as no request is left."""
        with suppress(asyncio.TimeoutError):
            seconds = max(0.0, (due_ns - monotonic_ns()) / 1e9)
            await asyncio.wait_for(self.spent.wait(), seconds)
        return not self.spent.is_set()


@dataclass(slots=True)
class _User:
    """One user and what was said so far; the system prompt opens its first question."""

    driver: Driver
    form: Form
    rounds: Rounds
    system: str
    number: int
    chance: random.Random
    said: list[dict[str, Any]] = field(default_factory=list)

    async def talk(self, start: int, birth: float, left: _Left) -> None:
        """Have the conversation; rounds before the run's start are passed over."""
        first = max(0, math.ceil(-birth / self.rounds.gap))
        due = start + int((birth + first * self.rounds.gap) * 1e9)
        end = start + int(self.rounds.seconds * 1e9)
        for _ in range(first, self.rounds.rounds):
            if due >= end or not await left.until(due - LEAD_NS):
                return
            due = await self.driver.enter(due)
            if not left.take():
                self.driver.leave()
                return
            ended = await self._ask(due)
            due = max(due + int(self.rounds.gap * 1e9), ended)

    async def _ask(self, due: int) -> int:
        """One round; when it ended. A question that failed is forgotten."""
        system = None if self.said else self.system
        asked = _question(self.form, self.rounds, self.chance, system)
        turn = [*self.said, {"role": "user", "content": asked}]
        headers = {USER: str(self.number)}
        result = await self.driver.fire(
            self.form.talk(turn, self.rounds.answer, headers=headers), due
        )
        if not result.error:
            self.said = [*turn, {"role": "assistant", "content": "".join(result.story.text)}]
        return result.reply.end_ns
