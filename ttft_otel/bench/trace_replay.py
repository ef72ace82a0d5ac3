# SPDX-License-Identifier: Apache-2.0
"""The dataset `replay`: prompts with the lengths, times and shared prefixes of a Mooncake trace.

The trace is JSONL with timestamp (ms), input_length, output_length and hash_ids. Each hash ID stands for
one block of the prompt; equal IDs become equal tokens, so that the server's prefix cache has the same hits.
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

from ttft_otel.bench.request_factory import BenchInputError, BenchRequest, RequestFactory

BLOCK_TOKENS: Final = 512  # of Mooncake's traces
MAX_CACHED_BLOCKS: Final = 10_000  # blocks kept in memory, 4 KB each


@dataclass(frozen=True, slots=True)
class ReplayTrace:
    """A trace file, and how it is changed."""

    path: Path
    max_requests: int | None = None  #: None for all
    speed: float = 1.0  #: divides the trace's times
    #: Divides prompt lengths; a power of two up to BLOCK_TOKENS, so that blocks stay whole.
    shrink: int = 1
    #: Longer prompts are cut at their end, so that shared prefixes stay.
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None  #: longer answers are cut


def count_row_tokens(factory: RequestFactory, trace: ReplayTrace) -> Iterator[int]:
    """Tokens of each prompt and answer of `trace`; 0 where only the server can count them (chat)."""
    for row in _read_rows(trace):
        prompt_tokens, answer_tokens = _compute_lengths(row, trace)
        # The row is still read: a malformed one must show before the load.
        yield 0 if factory.uses_chat else prompt_tokens + answer_tokens


def count_trace_requests(trace: ReplayTrace) -> int:
    """Number of requests that `trace` gives."""
    with trace.path.open("rb") as lines:
        # Lines only: check_context() has parsed and checked all of them before.
        return sum(1 for _ in itertools.islice(lines, trace.max_requests))


def generate_trace_requests(
    factory: RequestFactory, trace: ReplayTrace, seed: int
) -> Iterator[BenchRequest]:
    """The trace's requests in order; their `send_offset_s` is relative to the first.

    seed: of the tokens of all blocks.
    """
    block_tokens = BLOCK_TOKENS // trace.shrink

    @lru_cache(maxsize=MAX_CACHED_BLOCKS)
    # By number and not in order: a block dropped from the cache is drawn alike again.
    def draw_block(number: int) -> tuple[int, ...]:
        return tuple(factory.draw_prompt(random.Random(f"replay/{seed}/{number}"), block_tokens))

    start_ms: float | None = None
    for row in _read_rows(trace):
        # Traces may begin at any time; waiting for their first request would be no load.
        start_ms = row["timestamp"] if start_ms is None else start_ms
        prompt_tokens, answer_tokens = _compute_lengths(row, trace)
        # The last block may be partial: draw it whole, so that equal IDs give equal tokens, and cut.
        blocks = row["hash_ids"][: math.ceil(prompt_tokens / block_tokens)]
        prompt = [token for number in blocks for token in draw_block(number)][
            : factory.count_units(prompt_tokens)
        ]
        send_offset_s = (row["timestamp"] - start_ms) / 1000 / trace.speed
        yield factory.build_request(prompt, answer_tokens, send_offset_s)


def _compute_lengths(row: dict[str, Any], trace: ReplayTrace) -> tuple[int, int]:
    """Tokens of a row's prompt and of its answer."""
    # First divided, then cut: --max-input counts tokens that are sent.
    prompt_tokens = _limit_length(row["input_length"] // trace.shrink, trace.max_input_tokens)
    return prompt_tokens, _limit_length(row["output_length"], trace.max_output_tokens)


def _limit_length(length: int, max_length: int | None) -> int:
    # At least 1: servers refuse an empty prompt, and an answer of none has no first token.
    return max(1, length if max_length is None else min(length, max_length))


def _read_rows(trace: ReplayTrace) -> Iterator[dict[str, Any]]:
    last_ms = number = 0
    # No UnicodeDecodeError, which would not name the line.
    with trace.path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if trace.max_requests is not None and number > trace.max_requests:
                return
            row = _parse_row(line, f"{trace.path}:{number}")
            # The open loop sends in the order of the lines; an earlier one would be sent late.
            if row["timestamp"] < last_ms:
                raise BenchInputError(
                    f"{trace.path}:{number}: earlier than the line before; sort it"
                )
            last_ms = row["timestamp"]
            yield row
    if not number:
        raise BenchInputError(f"{trace.path} is empty")


def _parse_row(line: str, location: str) -> dict[str, Any]:
    """Parse and check one line. Raises BenchInputError with `location`."""
    try:
        row: dict[str, Any] = json.loads(line)
        timestamp_ms, input_tokens, output_tokens = (
            row["timestamp"],
            row["input_length"],
            row["output_length"],
        )
        blocks = row["hash_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise BenchInputError(f"{location}: not a line of a Mooncake trace ({error!r})") from error
    # type() and not isinstance(): true is an int to Python.
    are_counts = all(type(each) is int and each >= 0 for each in (input_tokens, output_tokens))
    if not are_counts or type(timestamp_ms) not in (int, float) or not 0 <= timestamp_ms < math.inf:
        raise BenchInputError(
            f"{location}: timestamp and lengths must be numbers from 0, lengths whole ones"
        )
    # Without enough blocks the prompt would silently be shorter than the trace says.
    if not isinstance(blocks, list) or input_tokens > BLOCK_TOKENS * len(blocks):
        raise BenchInputError(
            f"{location}: input_length is beyond the blocks of {BLOCK_TOKENS} in hash_ids"
        )
    return row
