# SPDX-License-Identifier: Apache-2.0
"""Which requests to send, and when: commands/bench.py builds a LoadPlan, bench_session.py runs it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ttft_otel.bench import multi_round, trace_replay
from ttft_otel.bench.load_driver import LoadDriver, run_closed_loop, run_open_loop
from ttft_otel.bench.request_factory import (
    BenchInputError,
    BenchRequest,
    RequestFactory,
    build_image_content,
    join_words,
)

DATASETS: Final = ("random", "shared-prefix", "multi-round", "images", "replay")
ARRIVALS: Final = ("poisson", "constant", "bursts")
BURST_SHAPE: Final = 0.25  # of gaps with a gamma distribution: they vary twice as much as Poisson's
DEFAULT_REMEDY: Final = "Make --input-len or --output-len smaller."
REMEDY_BY_DATASET: Final = {
    "replay": "--max-input and --max-output cut them, --shrink divides prompts.",
    "multi-round": "Make --num-rounds, --answer-len or the prompts smaller.",
}
TARGET_SEED_STRIDE: Final = 1_000_003  # far from the seeds of other rounds
# Datasets that only a chat can carry: completions know neither roles nor images.
CHAT_DATASETS: Final = ("multi-round", "images")
LoadFunction = Callable[[LoadDriver], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class DatasetShape:
    """Number and lengths of requests, in tokens."""

    request_count: int = 100
    input_tokens: int = 512
    output_tokens: int = 64
    length_spread: float = 0.0  #: 0.2 varies lengths by ±20 %
    prefix_tokens: int = 256
    prefix_count: int = 1
    images_per_request: int = 1
    image_edge_px: int = 224


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A dataset, its arrival process, and the number of rounds.

    With neither `rate` nor `concurrency` a trace's own times are kept.
    """

    dataset: str = "random"
    shape: DatasetShape = field(default_factory=DatasetShape)
    trace: trace_replay.ReplayTrace = field(
        default_factory=lambda: trace_replay.ReplayTrace(Path())
    )
    rounds: multi_round.MultiRoundOptions = field(default_factory=multi_round.MultiRoundOptions)
    rate: float | None = None  #: open loop: requests per second
    arrivals: str = "poisson"  #: one of ARRIVALS, for `rate`
    concurrency: int | None = None  #: closed loop: requests at once
    max_unfinished: int | None = None
    warmup: int = 0  #: uncounted requests before each run
    repeat: int = 1  #: rounds
    seed: int = 0
    timeout_s: float = 600.0  #: of each request
    apart: bool = False  #: with two targets each gets its own prompts

    def build_load(
        self, factory: RequestFactory, seed: int, requests: Sequence[BenchRequest]
    ) -> LoadFunction:
        """A function that sends one run's load: `requests`, or conversations drawn from `seed`."""
        if self.dataset == "multi-round":
            return lambda driver: multi_round.run_conversations(driver, factory, self.rounds, seed)
        # In a closed loop a trace's own times have no meaning: answers set the pace.
        if self.concurrency:
            concurrency = self.concurrency
            return lambda driver: run_closed_loop(driver, requests, concurrency)
        offsets_s = (
            self._generate_offsets_s(seed) if self.rate else (ask.send_offset_s for ask in requests)
        )
        # Not strict: the offsets of a rate never end.
        arrivals = list(zip(offsets_s, requests, strict=False))
        return lambda driver: run_open_loop(driver, arrivals)

    def build_warmup(self, factory: RequestFactory, seed: int) -> LoadFunction:
        """The load before a run: prompts like the run's, but different ones; not counted."""
        requests = list(
            itertools.islice(self._generate_warmup_requests(factory, seed), self.warmup)
        )
        # A closed loop whatever the plan is: the run begins when the last warm-up is answered.
        return lambda driver: run_closed_loop(driver, requests, min(4, self.warmup))

    def compute_seed(self, round_index: int, target_index: int) -> int:
        """The seed of a round on a target, both counted from 0."""
        # Other prompts in each round, since those of the round before are cached.
        return self.seed + round_index + (TARGET_SEED_STRIDE * target_index if self.apart else 0)

    def check_context(self, factory: RequestFactory, target_index: int) -> None:
        """Raise BenchInputError when requests are known to exceed the target's context."""
        # Without --spread all rounds and warm-ups have the lengths of the first.
        for round_index in range(self.repeat if self.shape.length_spread else 1):
            # Lengths are drawn from the seed, so every round has to be looked at.
            token_counts = self._count_request_tokens(
                factory, self.compute_seed(round_index, target_index)
            )
            context_tokens = factory.profile.context_tokens
            # 0: the server did not tell its context; then it refuses by itself.
            oversized = [
                count for count in token_counts if context_tokens and count > context_tokens
            ]
            if oversized:
                subject = f"{len(oversized)} of {len(token_counts)} requests need"
                if self.dataset == "multi-round":
                    subject = "a conversation's last round needs"
                raise BenchInputError(
                    f"{subject} up to {max(oversized)} tokens for prompt and answer; the server's context is "
                    f"{context_tokens}. {REMEDY_BY_DATASET.get(self.dataset, DEFAULT_REMEDY)}"
                )

    def _count_request_tokens(self, factory: RequestFactory, seed: int) -> list[int]:
        """Tokens of each request of a round; [] where only the server can count them."""
        if self.dataset == "multi-round":
            return [self.rounds.max_conversation_tokens]
        # A chat template adds tokens that are known to the server only.
        if factory.uses_chat and self.dataset != "replay":
            return []
        if self.dataset == "replay":
            return list(trace_replay.count_row_tokens(factory, self.trace))
        if self.shape.length_spread:
            # Warm-ups have lengths of their own, and one that is refused warms nothing up.
            warmup_requests = itertools.islice(
                self._generate_warmup_requests(factory, seed), self.warmup
            )
            return [
                ask.total_tokens
                for ask in itertools.chain(self.generate_requests(factory, seed), warmup_requests)
            ]
        prefix_tokens = self.shape.prefix_tokens if self.dataset == "shared-prefix" else 0
        return [
            prefix_tokens + self.shape.input_tokens + self.shape.output_tokens
        ] * self.shape.request_count

    def count_requests(self) -> int:
        """Number of requests that generate_requests() yields."""
        if self.dataset == "multi-round":
            return 0
        return (
            trace_replay.count_trace_requests(self.trace)
            if self.dataset == "replay"
            else self.shape.request_count
        )

    def _generate_warmup_requests(
        self, factory: RequestFactory, seed: int
    ) -> Iterator[BenchRequest]:
        warmup_seed = -1 - seed  # negative: no round has it
        if self.dataset == "multi-round":
            return multi_round.generate_first_questions(factory, self.rounds, warmup_seed)
        warmup_shape = replace(self.shape, request_count=self.warmup)
        return replace(self, shape=warmup_shape).generate_requests(factory, warmup_seed)

    def generate_requests(self, factory: RequestFactory, seed: int) -> Iterator[BenchRequest]:
        """A run's requests; none for multi-round, whose bodies depend on earlier answers."""
        if self.dataset == "multi-round":
            return iter(())
        if self.dataset == "images":
            return generate_image_requests(factory, self.shape, seed)
        if self.dataset == "replay":
            return trace_replay.generate_trace_requests(factory, self.trace, seed)
        return generate_text_requests(factory, self.shape, seed, self.dataset)

    def _generate_offsets_s(self, seed: int) -> Iterator[float]:
        """Send times for `rate`, in seconds from the start."""
        rate = self.rate or 1.0
        # A text as seed, which Python hashes: neighbouring seeds, and
        # other datasets, have unrelated streams.
        rng = random.Random(f"arrivals/{seed}")
        shape = BURST_SHAPE if self.arrivals == "bursts" else 1.0  # 1.0: a Poisson process
        gaps_s: Iterator[float] = itertools.repeat(1 / rate)
        if self.arrivals != "constant":
            gaps_s = (rng.gammavariate(shape, 1 / rate / shape) for _ in itertools.count())
        # From 0 on: else the first gap would be waiting time without any load.
        return itertools.accumulate(gaps_s, initial=0.0)


def vary_length(rng: random.Random, length: int, spread: float) -> int:
    """A random length within `length` * (1 ± `spread`), at least 1."""
    return max(1, round(length * (1 + spread * rng.uniform(-1, 1))))


def generate_text_requests(
    factory: RequestFactory, shape: DatasetShape, seed: int, dataset: str
) -> Iterator[BenchRequest]:
    """The datasets `random`, and `shared-prefix`: one of `shape.prefix_count` prefixes and a random tail."""
    rng = random.Random(f"{dataset}/{seed}")  # the dataset's name keeps random streams apart
    prefixes: list[list[int]] = [[]]
    if dataset == "shared-prefix":
        prefixes = [
            factory.draw_prompt(rng, shape.prefix_tokens) for _ in range(shape.prefix_count)
        ]
    for _ in range(shape.request_count):
        tail = factory.draw_prompt(rng, vary_length(rng, shape.input_tokens, shape.length_spread))
        # At random and not in turn, which round_robin would always send to the same instance.
        prompt = rng.choice(prefixes) + tail
        yield factory.build_request(
            prompt, vary_length(rng, shape.output_tokens, shape.length_spread)
        )


def generate_image_requests(
    factory: RequestFactory, shape: DatasetShape, seed: int
) -> Iterator[BenchRequest]:
    """The dataset `images`: images that differ in all requests, followed by a text."""
    rng = random.Random(f"images/{seed}")
    edge_px = shape.image_edge_px
    for _ in range(shape.request_count):
        words = factory.draw_prompt(rng, vary_length(rng, shape.input_tokens, shape.length_spread))
        # 32 bits: among ten thousand images two are equal in one of a hundred runs.
        image_seeds = [rng.getrandbits(32) for _ in range(shape.images_per_request)]
        answer_tokens = vary_length(rng, shape.output_tokens, shape.length_spread)
        yield factory.build_chat_request(
            [
                {
                    "role": "user",
                    "content": build_image_content(image_seeds, edge_px, join_words(words)),
                }
            ],
            answer_tokens,
        )
