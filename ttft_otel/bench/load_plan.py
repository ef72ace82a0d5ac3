# SPDX-License-Identifier: Apache-2.0
"""Which requests to send, and when: commands/bench.py builds a LoadPlan, bench_session.py runs it.

Every load is a list of conversations; most have one turn. They arrive at times of a file, at a rate, or
as soon as one of so many has ended.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from ttft_otel.bench.data_file import DataFile
from ttft_otel.bench.load_driver import LoadFunction, run_closed_loop, run_open_loop
from ttft_otel.bench.request_factory import (
    BenchInputError,
    BenchRequest,
    RequestFactory,
    Turn,
    build_image_content,
    join_words,
)

ARRIVALS: Final = ("poisson", "constant", "bursts")
BURST_SHAPE: Final = 0.25  # of gaps with a gamma distribution: they vary twice as much as Poisson's
DEFAULT_REQUESTS: Final = 100
USER_HEADER: Final = "x-user-id"  # for a router's session affinity
WARMUP_CONCURRENCY: Final = 4


@dataclass(frozen=True, slots=True)
class DatasetShape:
    """Lengths of prompts made up, in tokens, and what else is in them."""

    input_tokens: int = 512
    output_tokens: int = 64
    length_spread: float = 0.0  #: 0.2 varies lengths by ±20 %
    prefix_tokens: int = 0  #: before the first question
    prefix_count: int = 1
    images_per_request: int = 0
    image_edge_px: int = 224
    turns: int = 1  #: questions of each conversation
    think_s: float = 0.0  #: mean time from an answer to the next question

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt with its answer."""
        longest = [
            math.ceil(length * (1 + self.length_spread))
            for length in (self.input_tokens, self.output_tokens)
        ]
        return self.prefix_tokens + self.turns * sum(longest)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Conversations, their arrivals, and the number of rounds.

    With neither `rate` nor `concurrency` a trace's own times are kept.
    """

    shape: DatasetShape = field(default_factory=DatasetShape)
    file: DataFile | None = None  #: instead of `shape`
    request_count: int | None = None  #: None: all of a file, else DEFAULT_REQUESTS
    rate: float | None = None  #: open loop: requests per second
    last_rate: float | None = None  #: the rate grows to this one, in proportion to the time
    arrivals: str = "poisson"  #: one of ARRIVALS, for `rate` and for the time to think
    concurrency: int | None = None  #: closed loop: conversations at once
    warmup: int = 0  #: uncounted requests before each run
    repeat: int = 1  #: rounds
    seed: int = 0
    timeout_s: float = 600.0  #: of each request

    def build_load(self, seed: int, requests: Sequence[BenchRequest]) -> LoadFunction:
        """A function that sends one run's load, the conversations that begin with `requests`."""
        # In a closed loop a trace's own times have no meaning: answers set the pace.
        if self.concurrency:
            concurrency = self.concurrency
            return lambda driver: run_closed_loop(driver, requests, concurrency)
        offsets_s = (
            self._generate_offsets_s(seed) if self.rate else (ask.wait_s for ask in requests)
        )
        # Not strict: the offsets of a rate never end.
        arrivals = list(zip(offsets_s, requests, strict=False))
        return lambda driver: run_open_loop(driver, arrivals)

    def build_warmup(self, factory: RequestFactory, seed: int) -> LoadFunction:
        """The load before a run: first questions like the run's, but different ones; not counted."""
        plan = replace(self, request_count=self.warmup, shape=replace(self.shape, turns=1))
        # A negative seed: no round has it.
        requests = list(itertools.islice(plan.generate_requests(factory, -1 - seed), self.warmup))
        # A closed loop whatever the plan is: the run begins when the last warm-up is answered.
        return lambda driver: run_closed_loop(
            driver, [replace(each, next_turn=None) for each in requests], WARMUP_CONCURRENCY
        )

    def check_context(self, factory: RequestFactory) -> None:
        """Raise BenchInputError when requests may exceed the server's context."""
        most = self.file.most_tokens if self.file else self.shape.most_tokens
        # 0: the server did not tell its context; then it refuses by itself.
        context_tokens = factory.profile.context_tokens
        if context_tokens and most > context_tokens:
            remedy = "--max-input and --max-output cut them" if self.file else "give shorter ones"
            raise BenchInputError(
                f"prompts with answers have up to {most} tokens; the context is {context_tokens}: {remedy}"
            )

    def count_requests(self) -> int:
        """Number of requests of a run."""
        count = self.file.count_requests() if self.file else DEFAULT_REQUESTS
        return count if self.request_count is None else self.request_count

    def generate_requests(self, factory: RequestFactory, seed: int) -> Iterator[BenchRequest]:
        """The first request of each conversation of a run."""
        if self.file:
            think = partial(self._draw_gap, mean=self.shape.think_s)
            return self.file.generate_requests(factory, seed, self.request_count, think)
        return self._draw_conversations(factory, seed)

    def _draw_conversations(self, factory: RequestFactory, seed: int) -> Iterator[BenchRequest]:
        """Questions of random units; the first one after one of the prefixes."""
        shape = self.shape
        # Two streams: both sides of --ab have the same lengths, and no prompt that the other's cache knows.
        rng = random.Random(f"lengths/{seed}")
        words = random.Random(f"words/{seed}/{factory.side}")
        prefixes = [
            factory.draw_prompt(words, shape.prefix_tokens) for _ in range(shape.prefix_count)
        ]
        left = self.count_requests()
        for number in itertools.count():
            if not left:
                return
            turns = []
            for place in range(min(shape.turns, left)):
                tail = factory.draw_prompt(words, self._vary_length(rng, shape.input_tokens))
                # At random and not in turn, which round_robin would always send to the same instance.
                units = tail if place else rng.choice(prefixes) + tail
                answer_tokens = self._vary_length(rng, shape.output_tokens)
                think_s = self._draw_gap(rng, shape.think_s) if place else 0.0
                turns.append(
                    Turn(self._write_content(factory, words, units), answer_tokens, think_s)
                )
            left -= len(turns)
            yield factory.build_conversation(turns, {USER_HEADER: f"{seed}-{number}"})

    def _write_content(
        self, factory: RequestFactory, rng: random.Random, units: Sequence[int]
    ) -> object:
        if not self.shape.images_per_request:
            return factory.write_content(units)
        # 32 bits: among ten thousand images two are equal in one of a hundred runs.
        seeds = [rng.getrandbits(32) for _ in range(self.shape.images_per_request)]
        return build_image_content(seeds, self.shape.image_edge_px, join_words(units))

    def _vary_length(self, rng: random.Random, length: int) -> int:
        """A random length within the spread, at least 1."""
        return max(1, round(length * (1 + self.shape.length_spread * rng.uniform(-1, 1))))

    def _draw_gap(self, rng: random.Random, mean: float) -> float:
        """A time from one event of the arrival process to the next."""
        if self.arrivals == "constant" or not mean:
            return mean
        shape = BURST_SHAPE if self.arrivals == "bursts" else 1.0  # 1.0: a Poisson process
        return rng.gammavariate(shape, mean / shape)

    def _generate_offsets_s(self, seed: int) -> Iterator[float]:
        """Times at which conversations begin, in seconds from the start."""
        # A text as seed, which Python hashes: neighbouring seeds, and other data, have unrelated streams.
        rng = random.Random(f"arrivals/{seed}")
        turns: float = self.shape.turns
        if self.file:
            turns = self.file.count_requests() / len(self.file.conversations)
        gaps = (self._draw_gap(rng, 1.0) for _ in itertools.count())
        # From 0 on: else the first gap would be waiting time without any load.
        counts = itertools.accumulate(gaps, initial=0.0)
        return (self._find_offset_s(turns * count) for count in counts)

    def _find_offset_s(self, count: float) -> float:
        """Seconds until so many requests are due."""
        rate, last_rate = self.rate or 1.0, self.last_rate or self.rate or 1.0
        # The integral of a rate that grows by `growth` a second: count = rate t + growth t² / 2.
        growth = (last_rate**2 - rate**2) / 2 / self.count_requests()
        return 2 * count / (rate + math.sqrt(max(0.0, rate**2 + 2 * growth * count)))
