# SPDX-License-Identifier: Apache-2.0
"""Which requests to send, and when: commands/bench.py builds a LoadPlan, bench_session.py runs it.

Every load is a list of conversations; most have one turn. They arrive at times of a file, at a rate, or
as soon as one of so many has ended.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ttft_otel.bench.data_file import DataFile
from ttft_otel.bench.load_driver import LoadRun, run_closed_loop, run_open_loop
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
# What says how prompts are made up.
SHAPE_FLAGS: Final = (
    *("input_len", "output_len", "spread", "prefix_len", "prefixes"),
    *("images", "image_size", "turns", "think"),
)
USER_HEADER: Final = "x-user-id"  # for a router's session affinity
WARMUP_CONCURRENCY: Final = 4


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Conversations, their arrivals, and the number of rounds, by the flags of those names.

    Of prompts made up there are lengths in tokens, and what else is in them. With neither `rate` nor
    `concurrency` a trace's own times are kept.
    """

    input_len: int = 512
    output_len: int = 64
    spread: float = 0.0  #: 0.2 varies lengths by ±20 %
    prefix_len: int = 0  #: before the first question
    prefixes: int = 1
    images: int = 0  #: of each question
    image_size: int = 224  #: width and height in pixels
    turns: int = 1  #: questions of each conversation
    think: float = 0.0  #: mean seconds from an answer to the next question
    file: DataFile | None = None  #: instead of prompts made up
    request_count: int | None = None  #: None: all of a file, else DEFAULT_REQUESTS
    rate: float | None = None  #: open loop: requests per second
    last_rate: float | None = None  #: the rate grows to this one, in proportion to the time
    arrivals: str = "poisson"  #: one of ARRIVALS, for `rate` and for the time to think
    concurrency: int | None = None  #: closed loop: conversations at once
    warmup: int = 0  #: uncounted requests before each run
    repeat: int = 1  #: rounds
    seed: int = 0
    timeout_s: float = 600.0  #: of each request

    async def send_load(self, run: LoadRun, seed: int, requests: Iterable[BenchRequest]) -> None:
        """Send one run's load, the conversations that begin with `requests`."""
        # In a closed loop a trace's own times have no meaning: answers set the pace.
        if self.concurrency:
            await run_closed_loop(run, requests, self.concurrency)
        elif self.rate:
            # Not strict: the offsets of a rate never end.
            await run_open_loop(run, zip(self._generate_offsets_s(seed), requests, strict=False))
        else:
            await run_open_loop(run, ((each.wait_s, each) for each in requests))

    async def send_warmup(self, run: LoadRun, seed: int, factory: RequestFactory) -> None:
        """Send the load before a run: first questions like the run's, but different ones; not counted."""
        plan = replace(self, request_count=self.warmup, turns=1)
        # A negative seed: no round has it.
        requests = [
            replace(each, next_turn=None) for each in plan.generate_requests(factory, -1 - seed)
        ]
        # A closed loop whatever the plan is: the run begins when the last warm-up is answered.
        await run_closed_loop(run, requests, WARMUP_CONCURRENCY)

    def check_context(self, factory: RequestFactory) -> None:
        """Raise BenchInputError when requests may exceed the server's context."""
        if self.file:
            most = self.file.most_tokens
        else:
            lengths = (self.input_len, self.output_len)
            longest = sum(math.ceil(each * (1 + self.spread)) for each in lengths)
            most = self.prefix_len + self.turns * longest
        # 0: the server did not tell its context; then it refuses by itself.
        context_tokens = factory.context_tokens
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
            think = partial(self._draw_gap, mean=self.think)
            conversations = self.file.draw_turns(factory, seed, think)
        else:
            conversations = self._draw_turns(factory, seed)
        left = self.count_requests()
        for number, turns in enumerate(conversations):
            kept = turns[:left]
            is_made_chat = factory.uses_chat and not self.file
            headers = {USER_HEADER: f"{seed}-{number}"} if is_made_chat else {}
            yield factory.build_conversation(kept, headers)
            left -= len(kept)
            if not left:
                return

    def _draw_turns(self, factory: RequestFactory, seed: int) -> Iterator[list[Turn]]:
        """Endless conversations: questions of random units, the first one after one of the prefixes."""
        # Two streams: both sides of --ab have the same lengths, and no prompt that the other's cache knows.
        rng = random.Random(f"lengths/{seed}")
        words = random.Random(f"words/{seed}/{factory.side}")
        prefixes = [factory.draw_prompt(words, self.prefix_len) for _ in range(self.prefixes)]
        while True:
            turns = []
            for place in range(self.turns):
                tail = factory.draw_prompt(words, self._vary_length(rng, self.input_len))
                # At random and not in turn, which round_robin would always send to the same instance.
                units = tail if place else rng.choice(prefixes) + tail
                answer_tokens = self._vary_length(rng, self.output_len)
                think_s = self._draw_gap(rng, self.think) if place else 0.0
                content = self._write_content(factory, words, units)
                turns.append(Turn(content, answer_tokens, think_s))
            yield turns

    def _write_content(
        self, factory: RequestFactory, rng: random.Random, units: Sequence[int]
    ) -> object:
        if not self.images:
            return factory.write_content(units)
        # 32 bits: among ten thousand images two are equal in one of a hundred runs.
        seeds = [rng.getrandbits(32) for _ in range(self.images)]
        return build_image_content(seeds, self.image_size, join_words(units))

    def _vary_length(self, rng: random.Random, length: int) -> int:
        """A random length within the spread, at least 1."""
        return max(1, round(length * (1 + self.spread * rng.uniform(-1, 1))))

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
        turns: float = self.turns
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
