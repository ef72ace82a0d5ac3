# SPDX-License-Identifier: Apache-2.0
"""`replay`: a Mooncake trace (JSONL: timestamp, lengths, hash ids) becomes prompts with its prefixes.

A hash id stands for one block of the prompt; equal ids become equal token ids, so the server's
prefix cache sees what the trace's did.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ttft_otel.bench.ask import Ask, Form

BLOCK: Final = 512
KEPT: Final = 10_000  # blocks that need not be drawn again; 4 KB each


class Unreadable(ValueError):
    """A line of the trace is not as it should be; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A file, how many of its requests, how much faster, by what its prompts are divided, and cuts.

    shrink: a power of two up to BLOCK, so that blocks stay whole. most_input, most_output: longer
    prompts and answers are cut; a prompt keeps its beginning, so that shared prefixes stay.
    """

    path: Path
    requests: int | None = None
    speed: float = 1.0
    shrink: int = 1
    most_input: int | None = None
    most_output: int | None = None


def rooms(form: Form, trace: Trace) -> Iterator[int]:
    """Tokens of each prompt and its answer, as `replayed` makes them; 0 where only the server knows."""
    for row in _rows(trace):
        prompt, answer = _lengths(row, trace)
        yield 0 if form.chat else prompt + answer


def count(trace: Trace) -> int:
    """How many requests there are."""
    with trace.path.open("rb") as lines:
        return sum(1 for _ in itertools.islice(lines, trace.requests))


def replayed(form: Form, trace: Trace, seed: int) -> Iterator[Ask]:
    """The trace's requests in its order; `at` counts from its first one."""
    size = BLOCK // trace.shrink

    @lru_cache(maxsize=KEPT)
    def block(number: int) -> tuple[int, ...]:
        return tuple(form.draw(random.Random(f"replay/{seed}/{number}"), size))

    start: float | None = None
    for row in _rows(trace):
        start = row["timestamp"] if start is None else start
        length, answer = _lengths(row, trace)
        blocks = row["hash_ids"][: math.ceil(length / size)]
        prompt = [each for number in blocks for each in block(number)][: form.units(length)]
        at = (row["timestamp"] - start) / 1000 / trace.speed
        yield form.ask(prompt, answer, at)


def _lengths(row: dict[str, Any], trace: Trace) -> tuple[int, int]:
    """Tokens of the prompt and of the answer."""
    prompt = _cut(row["input_length"] // trace.shrink, trace.most_input)
    return prompt, _cut(row["output_length"], trace.most_output)


def _cut(length: int, most: int | None) -> int:
    return max(1, length if most is None else min(length, most))


def _rows(trace: Trace) -> Iterator[dict[str, Any]]:
    last = number = 0
    with trace.path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if trace.requests is not None and number > trace.requests:
                return
            row = _checked(line, f"{trace.path}:{number}")
            if row["timestamp"] < last:
                raise Unreadable(f"{trace.path}:{number}: earlier than the line before; sort it")
            last = row["timestamp"]
            yield row
    if not number:
        raise Unreadable(f"{trace.path} is empty")


def _checked(line: str, where: str) -> dict[str, Any]:
    """One line's object. Raises Unreadable."""
    try:
        row: dict[str, Any] = json.loads(line)
        at, length, answer = row["timestamp"], row["input_length"], row["output_length"]
        blocks = row["hash_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"{where}: not a line of a Mooncake trace ({error!r})") from error
    whole = all(type(each) is int and each >= 0 for each in (length, answer))
    if not whole or type(at) not in (int, float) or not 0 <= at < math.inf:
        raise Unreadable(
            f"{where}: timestamp and lengths must be numbers from 0, lengths whole ones"
        )
    if not isinstance(blocks, list) or length > BLOCK * len(blocks):
        raise Unreadable(f"{where}: input_length is beyond the blocks of {BLOCK} in hash_ids")
    return row
