# SPDX-License-Identifier: Apache-2.0
"""`multi-round`: users who ask, read the answer, and ask again with the whole history.

So many users are in a conversation at any time: each asks every num_users/qps seconds, or when its
answer is there, whichever is later; one leaves after its rounds and another one comes. The first
ones are met in the middle of their conversations, so that not all of them end at once.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

from ttft_otel.bench import data
from ttft_otel.bench.ask import Form, text
from ttft_otel.bench.drive import LEAD_NS, Driver, Result, drop
from ttft_otel.bench.wire import until


@dataclass(frozen=True, slots=True)
class Rounds:
    """Users, their rounds, requests per second of all, lengths in tokens, seconds."""

    users: int = 5
    rounds: int = 10
    qps: float = 1.0
    system: int = 100
    history: int = 200
    question: int = 20
    answer: int = 100
    seconds: float = 60.0

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
    """Have all users' conversations until the time is over and the last answer is there."""
    start = monotonic_ns() + 2 * LEAD_NS
    system = text(data.ids(random.Random(f"rounds/{seed}"), rounds.system, form.vocab))
    tasks = {
        asyncio.create_task(_user(driver, form, rounds, start, birth, f"{seed}/{place}", system))
        for place, birth in enumerate(rounds.births())
    }
    try:
        await asyncio.gather(*tasks)
    finally:
        await drop(tasks)


async def _user(
    driver: Driver, form: Form, rounds: Rounds, start: int, birth: float, name: str, system: str
) -> None:
    """One user's conversation; rounds before the run's start are passed over."""
    chance = random.Random(f"user/{name}")
    own = text(data.ids(chance, rounds.history, form.vocab))
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"{system} {own}"}]
    free = 0
    for turn in range(max(0, math.ceil(-birth / rounds.gap)), rounds.rounds):
        offset = birth + turn * rounds.gap
        if offset >= rounds.seconds:
            return
        due = max(start + int(offset * 1e9), free)
        await until(due - LEAD_NS)
        asked = text(data.ids(chance, rounds.question, form.vocab))
        messages.append({"role": "user", "content": asked})
        result = await _turn(driver, form, rounds, messages, due)
        messages.append({"role": "assistant", "content": "".join(result.story.text)})
        free = result.reply.end_ns


async def _turn(
    driver: Driver, form: Form, rounds: Rounds, messages: list[dict[str, Any]], due: int
) -> Result:
    ask = form.talk(messages, rounds.answer)
    return await driver.fire(ask, await driver.enter(due))
