# SPDX-License-Identifier: Apache-2.0
"""Synthetic datasets: prompts of given lengths from a seed; command.py chooses, drive.py sends them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ttft_otel.bench import images
from ttft_otel.bench.ask import Ask, Form, text


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens, and how far the random ones stray (0.2: ±20 %)."""

    requests: int = 100
    input: int = 512
    output: int = 64
    spread: float = 0.0
    prefix: int = 256
    prefixes: int = 1
    pictures: int = 1
    edge: int = 224


def stray(chance: random.Random, length: int, spread: float) -> int:
    """A length around `length`, at least 1."""
    return max(1, round(length * (1 + spread * chance.uniform(-1, 1))))


def unrelated(form: Form, shape: Shape, seed: int) -> Iterator[Ask]:
    """`random`: prompts that share nothing."""
    return _prompts(form, shape, random.Random(f"random/{seed}"), [[]])


def related(form: Form, shape: Shape, seed: int) -> Iterator[Ask]:
    """`shared-prefix`: each prompt is one of some prefixes, and then a tail of its own."""
    chance = random.Random(f"shared-prefix/{seed}")
    heads = [form.draw(chance, shape.prefix) for _ in range(shape.prefixes)]
    return _prompts(form, shape, chance, heads)


def pictured(form: Form, shape: Shape, seed: int) -> Iterator[Ask]:
    """`images`: pictures that no request repeats, and then a text."""
    chance = random.Random(f"images/{seed}")
    for _ in range(shape.requests):
        words = form.draw(chance, stray(chance, shape.input, shape.spread))
        seen = [chance.getrandbits(32) for _ in range(shape.pictures)]
        answer = stray(chance, shape.output, shape.spread)
        yield form.talk([{"role": "user", "content": _content(seen, shape.edge, words)}], answer)


def _prompts(
    form: Form, shape: Shape, chance: random.Random, heads: list[list[int]]
) -> Iterator[Ask]:
    for _ in range(shape.requests):
        tail = form.draw(chance, stray(chance, shape.input, shape.spread))
        yield form.ask(chance.choice(heads) + tail, stray(chance, shape.output, shape.spread))


def _content(seeds: Sequence[int], edge: int, words: Sequence[int]) -> list[dict[str, object]]:
    parts: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": images.data_url(seed, edge, edge)}}
        for seed in seeds
    ]
    return [*parts, {"type": "text", "text": text(words)}]
