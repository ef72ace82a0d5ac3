# SPDX-License-Identifier: Apache-2.0
"""What is to be done: command.py fills a Plan from the flags, session.py asks it for a run's load."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ttft_otel.bench import data, replay, rounds
from ttft_otel.bench.ask import Ask, Form
from ttft_otel.bench.drive import Driver, closed_loop, open_loop

DATASETS: Final = ("random", "shared-prefix", "multi-round", "images", "replay")
REMEDY: Final = "Make --input-len or --output-len smaller."
REMEDIES: Final = {
    "replay": "--max-input and --max-output cut them, --shrink divides prompts.",
    "multi-round": "Make --num-rounds, --answer-len or the prompts smaller.",
}
ELSEWHERE: Final = 1_000_003  # far from the seeds of other rounds
TALKS: Final = ("multi-round", "images")  # datasets that only a chat can carry


class Unfit(ValueError):
    """Requests that the server cannot take; the message says how many and the remedy."""


Load = Callable[[Driver], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The dataset, how it arrives, and how often all of it is repeated.

    rate: open loop, requests per second. concurrency: closed loop. Neither: a trace's own times.
    apart: of two targets each gets prompts of its own.
    """

    dataset: str = "random"
    shape: data.Shape = field(default_factory=data.Shape)
    trace: replay.Trace = field(default_factory=lambda: replay.Trace(Path()))
    rounds: rounds.Rounds = field(default_factory=rounds.Rounds)
    rate: float | None = None
    arrivals: str = "poisson"
    concurrency: int | None = None
    most: int | None = None
    warmup: int = 0
    repeat: int = 1
    seed: int = 0
    timeout: float = 600.0
    apart: bool = False

    def load(self, form: Form, seed: int, asks: Sequence[Ask]) -> Load:
        """One run's load, of the bodies that were made of `asks`."""
        if self.dataset == "multi-round":
            return lambda driver: rounds.conversations(driver, form, self.rounds, seed)
        if self.concurrency:
            count = self.concurrency
            return lambda driver: closed_loop(driver, asks, count)
        offsets = self._offsets(seed) if self.rate else (ask.at for ask in asks)
        times = list(zip(offsets, asks, strict=False))
        return lambda driver: open_loop(driver, times)

    def warm(self, form: Form, seed: int) -> Load:
        """Requests before the run that nothing counts: prompts of its kind, none of its own."""
        asks = list(itertools.islice(self._warming(form, seed), self.warmup))
        return lambda driver: closed_loop(driver, asks, min(4, self.warmup))

    def seed_of(self, number: int, place: int) -> int:
        """The seed of a round (from 0) on the target at this place."""
        return self.seed + number + (ELSEWHERE * place if self.apart else 0)

    def check(self, form: Form, place: int) -> None:
        """Raises Unfit when requests of a target's rounds are longer than its context, as far as known."""
        # Without --spread all rounds and warm-ups have the lengths of the first.
        for number in range(self.repeat if self.shape.spread else 1):
            self._fit(form, self._rooms(form, self.seed_of(number, place)))

    def _rooms(self, form: Form, seed: int) -> list[int]:
        """Tokens of each request of a round, as far as they can be counted here."""
        if self.dataset == "multi-round":
            return [self.rounds.longest]
        if form.chat and self.dataset != "replay":
            return []
        if self.dataset == "replay":
            return list(replay.rooms(form, self.trace))
        if self.shape.spread:
            warm = itertools.islice(self._warming(form, seed), self.warmup)
            return [ask.room for ask in itertools.chain(self.asks(form, seed), warm)]
        prefix = self.shape.prefix if self.dataset == "shared-prefix" else 0
        return [prefix + self.shape.input + self.shape.output] * self.shape.requests

    def _fit(self, form: Form, rooms: Sequence[int]) -> None:
        context = form.known.context
        long = [room for room in rooms if context and room > context]
        if long:
            whose = f"{len(long)} of {len(rooms)} requests need"
            if self.dataset == "multi-round":
                whose = "a conversation's last round needs"
            raise Unfit(
                f"{whose} up to {max(long)} tokens for prompt and answer; the server's context is "
                f"{context}. {REMEDIES.get(self.dataset, REMEDY)}"
            )

    def count(self) -> int:
        """How many requests `asks` has."""
        if self.dataset == "multi-round":
            return 0
        return replay.count(self.trace) if self.dataset == "replay" else self.shape.requests

    def _warming(self, form: Form, seed: int) -> Iterator[Ask]:
        other = -1 - seed
        if self.dataset == "multi-round":
            return rounds.openings(form, self.rounds, other)
        own = replace(self.shape, requests=self.warmup)
        return replace(self, shape=own).asks(form, other)

    def asks(self, form: Form, seed: int) -> Iterator[Ask]:
        """A run's requests; none where bodies are made as it goes, as a conversation's are."""
        if self.dataset == "multi-round":
            return iter(())
        if self.dataset == "shared-prefix":
            return data.related(form, self.shape, seed)
        if self.dataset == "images":
            return data.pictured(form, self.shape, seed)
        if self.dataset == "replay":
            return replay.replayed(form, self.trace, seed)
        return data.unrelated(form, self.shape, seed)

    def _offsets(self, seed: int) -> Iterator[float]:
        """When requests are sent at a rate: evenly, or as a Poisson process."""
        rate = self.rate or 1.0
        chance = random.Random(f"arrivals/{seed}")
        even = self.arrivals == "constant"
        gaps = (1 / rate if even else chance.expovariate(rate) for _ in itertools.count())
        return itertools.accumulate(gaps, initial=0.0)
