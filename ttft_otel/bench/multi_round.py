# SPDX-License-Identifier: Apache-2.0
"""The dataset `multi-round`: simulated users who ask again with the history of their conversation.

As in production-stack's multi-round-qa.py, a constant number of users is in a conversation. Each asks
num_users / qps seconds after its previous question, or when that is answered, whichever is later. A
user leaves after its last round, and a new one arrives. The first users start in the middle of their
conversations, so that they do not all end at once; the rounds before that are not sent.
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

from ttft_otel.bench.load_driver import CONNECT_LEAD_NS, LoadDriver, cancel_tasks
from ttft_otel.bench.request_factory import BenchRequest, RequestFactory, join_words

USER_HEADER: Final = "x-user-id"  # for a router's session affinity


@dataclass(frozen=True, slots=True)
class MultiRoundOptions:
    """Parameters of the conversations; lengths in tokens."""

    user_count: int = 5
    rounds_per_user: int = 10
    qps: float = 1.0  #: questions per second of all users together
    system_tokens: int = 100
    history_tokens: int = 200
    question_tokens: int = 20
    answer_tokens: int = 100
    duration_s: float = 60.0  #: this or max_requests, whichever is reached first, ends the run
    max_requests: int | None = None

    @property
    def max_conversation_tokens(self) -> int:
        """About the number of tokens of the last question and its answer, with the whole history."""
        return (
            # Answers are part of later prompts, so they count in each round.
            self.system_tokens
            + self.history_tokens
            + self.rounds_per_user * (self.question_tokens + self.answer_tokens)
        )

    @property
    def question_interval_s(self) -> float:
        """Seconds between two questions of one user."""
        return self.user_count / self.qps

    @property
    def arrival_interval_s(self) -> float:
        """Seconds between the arrivals of two users."""
        # Little's law: users stay for (rounds - 1) intervals, so this many are there at any time.
        return self.question_interval_s * max(1, self.rounds_per_user - 1) / self.user_count

    def list_start_offsets_s(self) -> list[float]:
        """When each user asks its first question, in seconds; negative for those who began before."""
        # As if the load had been running for long: no wave of first questions at the start.
        before = [-place * self.arrival_interval_s for place in range(self.user_count)]
        after = math.ceil(self.duration_s / self.arrival_interval_s)
        return before + [place * self.arrival_interval_s for place in range(1, after)]


async def run_conversations(
    driver: LoadDriver, factory: RequestFactory, options: MultiRoundOptions, seed: int
) -> None:
    """Run all users' conversations until time or requests are used up, and the last answer is there.

    seed: of all prompts.
    """
    start_ns = monotonic_ns() + 2 * CONNECT_LEAD_NS
    # Drawn once and shared, so that prefix caches can find it in every conversation.
    system_prompt = factory.draw_prompt(random.Random(f"rounds/{seed}"), options.system_tokens)
    budget = _RequestBudget(options.max_requests)
    users = [
        _SimulatedUser(
            driver,
            factory,
            options,
            join_words(system_prompt),
            place,
            # A stream for each user: what it says must not depend on when others get their answers.
            random.Random(f"user/{seed}/{place}"),
        )
        for place in range(len(options.list_start_offsets_s()))
    ]
    tasks = {
        asyncio.create_task(user.hold_conversation(start_ns, birth, budget))
        for user, birth in zip(users, options.list_start_offsets_s(), strict=True)
    }
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_tasks(tasks)


def generate_first_questions(
    factory: RequestFactory, options: MultiRoundOptions, seed: int
) -> Iterator[BenchRequest]:
    """Endless first questions of users that do not occur in the run; for the warm-up."""
    system_prompt = join_words(
        factory.draw_prompt(random.Random(f"rounds/{seed}"), options.system_tokens)
    )
    for number in itertools.count(1):
        question = _compose_question(
            factory, options, random.Random(f"user/{seed}/{number}"), system_prompt
        )
        # Names that no user of the run has: sessions of the warm-up must not bind those of the run.
        headers = {USER_HEADER: f"warmup-{number}"}
        yield factory.build_chat_request(
            [{"role": "user", "content": question}], options.answer_tokens, headers=headers
        )


def _compose_question(
    factory: RequestFactory,
    options: MultiRoundOptions,
    rng: random.Random,
    system_prompt: str | None,
) -> str:
    """A user's question; the first one is preceded by `system_prompt` and the user's history."""
    question = join_words(factory.draw_prompt(rng, options.question_tokens))
    if system_prompt is None:
        return question
    history = join_words(factory.draw_prompt(rng, options.history_tokens))
    return f"{system_prompt} {history} {question}"


class _RequestBudget:
    """Number of requests that may still be sent; `exhausted` wakes users who wait for their time."""

    def __init__(self, limit: int | None) -> None:
        """`limit` None: as many as there is time for."""
        self.remaining = math.inf if limit is None else limit
        self.exhausted = asyncio.Event()

    def take_request(self) -> bool:
        """Take one request; False when none is left."""
        # Nothing is awaited between this and the answer: no two users take the same request.
        self.remaining -= 1
        # At once, and not when the next one asks: that may be minutes later.
        if self.remaining <= 0:
            self.exhausted.set()
        return self.remaining >= 0

    async def wait_until(self, due_ns: int) -> bool:
        """Sleep until `due_ns` of CLOCK_MONOTONIC; returns False as soon as no request is left."""
        with suppress(asyncio.TimeoutError):
            timeout_s = max(0.0, (due_ns - monotonic_ns()) / 1e9)
            # One wait for both, time and budget; its time-out is the usual end.
            await asyncio.wait_for(self.exhausted.wait(), timeout_s)
        return not self.exhausted.is_set()


@dataclass(slots=True)
class _SimulatedUser:
    """One user, and the messages of its conversation so far."""

    driver: LoadDriver
    factory: RequestFactory
    options: MultiRoundOptions
    system_prompt: str
    number: int
    rng: random.Random
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def hold_conversation(
        self, start_ns: int, start_offset_s: float, budget: _RequestBudget
    ) -> None:
        """Ask all questions of the conversation that are due after `start_ns`, the run's start."""
        # Rounds before the run are skipped with their history: such a user starts with a short prompt.
        first_round = max(0, math.ceil(-start_offset_s / self.options.question_interval_s))
        due_ns = start_ns + int(
            (start_offset_s + first_round * self.options.question_interval_s) * 1e9
        )
        end_ns = start_ns + int(self.options.duration_s * 1e9)
        for _ in range(first_round, self.options.rounds_per_user):
            # Questions are not asked after the end, answers are awaited.
            if due_ns >= end_ns or not await budget.wait_until(due_ns - CONNECT_LEAD_NS):
                return
            due_ns = await self.driver.acquire_slot(due_ns)
            # Only now: the budget may have run out while the user waited for a slot.
            if not budget.take_request():
                self.driver.release_slot()
                return
            # Also after a failed first question, which has left no messages.
            system_prompt = None if self.messages else self.system_prompt
            question = _compose_question(self.factory, self.options, self.rng, system_prompt)
            messages = [*self.messages, {"role": "user", "content": question}]
            headers = {USER_HEADER: str(self.number)}
            result = await self.driver.send_request(
                self.factory.build_chat_request(
                    messages, self.options.answer_tokens, headers=headers
                ),
                due_ns,
            )
            # A failed question stays out of the history.
            if not result.error:
                self.messages = [
                    *messages,
                    {"role": "assistant", "content": "".join(result.content.text_parts)},
                ]
            # From the due time, not from the send: lateness of this process must not slow the users down.
            due_ns = max(
                due_ns + int(self.options.question_interval_s * 1e9), result.response.end_ns
            )
