# SPDX-License-Identifier: Apache-2.0
"""Synthetic datasets: random prompts of given lengths from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ttft_otel.bench import noise_images
from ttft_otel.bench.request_factory import BenchRequest, RequestFactory, join_words


@dataclass(frozen=True, slots=True)
class DatasetShape:
    """Number and lengths of requests, in tokens; length_spread 0.2 varies lengths by ±20 %."""

    request_count: int = 100
    input_tokens: int = 512
    output_tokens: int = 64
    length_spread: float = 0.0
    prefix_tokens: int = 256
    prefix_count: int = 1
    images_per_request: int = 1
    image_edge_px: int = 224


def vary_length(rng: random.Random, length: int, spread: float) -> int:
    """A random length within `length` * (1 ± `spread`), at least 1."""
    return max(1, round(length * (1 + spread * rng.uniform(-1, 1))))


def generate_random_requests(
    factory: RequestFactory, shape: DatasetShape, seed: int
) -> Iterator[BenchRequest]:
    """The dataset `random`: prompts without common prefixes, from `seed`."""
    # One empty prefix: `random` is `shared-prefix` without anything shared.
    return _generate_requests(factory, shape, random.Random(f"random/{seed}"), [[]])


def generate_shared_prefix_requests(
    factory: RequestFactory, shape: DatasetShape, seed: int
) -> Iterator[BenchRequest]:
    """The dataset `shared-prefix`: prompts of one of `shape.prefix_count` prefixes and a random tail."""
    rng = random.Random(f"shared-prefix/{seed}")  # the dataset's name keeps random streams apart
    prefixes = [factory.draw_prompt(rng, shape.prefix_tokens) for _ in range(shape.prefix_count)]
    return _generate_requests(factory, shape, rng, prefixes)


def generate_image_requests(
    factory: RequestFactory, shape: DatasetShape, seed: int
) -> Iterator[BenchRequest]:
    """The dataset `images`: images that differ in all requests, followed by a text."""
    rng = random.Random(f"images/{seed}")
    for _ in range(shape.request_count):
        words = factory.draw_prompt(rng, vary_length(rng, shape.input_tokens, shape.length_spread))
        # 32 bits: among ten thousand images two are equal in one of a hundred runs.
        image_seeds = [rng.getrandbits(32) for _ in range(shape.images_per_request)]
        answer_tokens = vary_length(rng, shape.output_tokens, shape.length_spread)
        yield factory.build_chat_request(
            [
                {
                    "role": "user",
                    "content": _build_image_content(image_seeds, shape.image_edge_px, words),
                }
            ],
            answer_tokens,
        )


def _generate_requests(
    factory: RequestFactory, shape: DatasetShape, rng: random.Random, prefixes: list[list[int]]
) -> Iterator[BenchRequest]:
    for _ in range(shape.request_count):
        tail = factory.draw_prompt(rng, vary_length(rng, shape.input_tokens, shape.length_spread))
        # At random and not in turn, which round_robin would always send to the same instance.
        yield factory.build_request(
            rng.choice(prefixes) + tail, vary_length(rng, shape.output_tokens, shape.length_spread)
        )


def _build_image_content(
    seeds: Sequence[int], edge_px: int, words: Sequence[int]
) -> list[dict[str, object]]:
    parts: list[dict[str, object]] = [
        {
            "type": "image_url",
            "image_url": {"url": noise_images.draw_data_url(seed, edge_px, edge_px)},
        }
        for seed in seeds
    ]
    # Images first, so that prompts differ from their first block on.
    return [*parts, {"type": "text", "text": join_words(words)}]
