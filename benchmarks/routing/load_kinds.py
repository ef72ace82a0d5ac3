# SPDX-License-Identifier: Apache-2.0
"""Arrivals of simulated cases, by kind: Mooncake's traces, and made ones; fleet_simulation.py has them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.routing.mooncake_traces import TRACE_BLOCK_TOKENS, TraceRow, read_trace

BURST_SHAPE: Final = 1 / 9  # of the gamma distribution of pauses: a coefficient of variation of 3
SYSTEM_PROMPTS: Final = 20  # of kind "shared_prefixes"
ADAPTERS: Final = 32  # of kind "adapters"
IMAGE_TOKENS: Final = 1024
MAX_TOKENS: Final = 120_000


def read_rows(kind: str, folder: Path, seed: int, count: int) -> tuple[TraceRow, ...]:
    """The first `count` arrivals of a kind. folder: has Mooncake's traces; seed 1: as they are."""
    chance = random.Random(f"{kind} {seed}")
    if kind in MADE_KINDS:
        return tuple(itertools.accumulate(MADE_KINDS[kind](chance, count), _follow))
    name = "synthetic" if kind == "synthetic" else "conversation"
    rows = read_trace(folder / f"{name}_trace.jsonl", seed)[:count]
    if kind == "bursts":
        return _make_bursts(rows, chance)
    return rows if kind == "recorded" else spread_arrivals(rows, seed)


def spread_arrivals(rows: tuple[TraceRow, ...], seed: int) -> tuple[TraceRow, ...]:
    """Spread arrivals over the time to which the trace rounded them.

    As they are, some ten requests arrive in the same microsecond every 3 s, which is the clock of whoever
    recorded the trace, not what a router sees.
    """
    chance = random.Random(f"arrivals {seed}")
    times = sorted({row.arrival_s for row in rows})
    rounded_to_s = min((b - a for a, b in itertools.pairwise(times)), default=0.0)
    spread = (
        replace(row, arrival_s=row.arrival_s + chance.uniform(0, rounded_to_s)) for row in rows
    )
    return tuple(sorted(spread, key=lambda row: row.arrival_s))


def _follow(before: TraceRow, row: TraceRow) -> TraceRow:
    """Rows are made with the pause before each in place of its arrival."""
    return replace(row, arrival_s=before.arrival_s + row.arrival_s)


def _make_bursts(rows: tuple[TraceRow, ...], chance: random.Random) -> tuple[TraceRow, ...]:
    """The same requests, whose pauses are of a gamma distribution; sessions keep their order."""
    pauses = itertools.accumulate(chance.gammavariate(BURST_SHAPE, 1 / BURST_SHAPE) for _ in rows)
    return tuple(replace(row, arrival_s=at) for row, at in zip(rows, pauses, strict=True))


def _make_row(
    chance: random.Random,
    number: int,
    tokens: int,
    output_tokens: int,
    prefix: tuple[int, ...] = (),
) -> TraceRow:
    """A request with this prefix of blocks, and the rest its own."""
    own = range(len(prefix), min(tokens, MAX_TOKENS) // TRACE_BLOCK_TOKENS)
    blocks = (*prefix, *(1_000_000 + number * 1000 + at for at in own))
    pause = chance.expovariate(1.0)
    return TraceRow(pause, min(tokens, MAX_TOKENS), blocks, str(number), output_tokens)


def _make_shared_prefixes(chance: random.Random, count: int) -> list[TraceRow]:
    """System prompts of 4 000 to 16 000 tokens, some far more popular than others, and short questions."""
    prompts = [
        tuple(range(1000 * number, 1000 * number + chance.randint(8, 32)))
        for number in range(SYSTEM_PROMPTS)
    ]
    weights = [1 / (1 + number) for number in range(SYSTEM_PROMPTS)]
    return [
        _make_row(
            chance,
            number,
            len(prefix) * TRACE_BLOCK_TOKENS + chance.randint(50, 2000),
            chance.randint(20, 300),
            prefix,
        )
        for number, prefix in enumerate(chance.choices(prompts, weights, k=count))
    ]


def _make_heavy_tails(chance: random.Random, count: int) -> list[TraceRow]:
    """Prompts by a Pareto distribution, from 200 tokens to MAX_TOKENS, with nothing in common."""
    return [
        _make_row(chance, number, int(200 * chance.paretovariate(0.9)), chance.randint(20, 300))
        for number in range(count)
    ]


def _make_long_decodes(chance: random.Random, count: int) -> list[TraceRow]:
    """Short prompts, most with a short answer, one in five with one of thousands of tokens."""
    return [
        _make_row(
            chance,
            number,
            chance.randint(100, 2000),
            chance.randint(1000, 4000) if chance.random() < 0.2 else chance.randint(20, 200),
        )
        for number in range(count)
    ]


def _make_adapters(chance: random.Random, count: int) -> list[TraceRow]:
    """Requests of LoRA adapters, some far more popular than others; each has a system prompt of its own."""
    weights = [1 / number for number in range(1, ADAPTERS + 1)]
    rows = []
    for number, adapter in enumerate(chance.choices(range(1, ADAPTERS + 1), weights, k=count)):
        prefix = tuple(range(1000 * adapter, 1000 * adapter + 1 + adapter % 8))
        tokens = len(prefix) * TRACE_BLOCK_TOKENS + int(chance.lognormvariate(6.5, 1))
        row = _make_row(chance, number, tokens, chance.randint(20, 300), prefix)
        rows.append(replace(row, adapter=adapter))
    return rows


def _make_images(chance: random.Random, count: int) -> list[TraceRow]:
    """Prompts of up to 2 000 tokens, two of three with one to six images."""
    rows = []
    for number in range(count):
        images = chance.choice((0, 0, 0, 1, 1, 2, 3, 4, 6))
        tokens = chance.randint(50, 2000) + images * IMAGE_TOKENS
        row = _make_row(chance, number, tokens, chance.randint(20, 300))
        rows.append(replace(row, images=images))
    return rows


MADE_KINDS: Final[dict[str, Callable[[random.Random, int], list[TraceRow]]]] = {
    "shared_prefixes": _make_shared_prefixes,
    "heavy_tails": _make_heavy_tails,
    "long_decodes": _make_long_decodes,
    "adapters": _make_adapters,
    "images": _make_images,
}
