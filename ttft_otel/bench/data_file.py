# SPDX-License-Identifier: Apache-2.0
"""Conversations of a file: the lengths, times and shared prefixes of a trace, or the texts of ShareGPT.

A trace is JSONL in Mooncake's form: timestamp (ms), input_length, output_length and hash_ids. Each hash ID
stands for one block of the prompt; equal IDs become equal tokens, so that the server's prefix cache has the
same hits. Rows with the same session_id are turns, each sent `delay` (ms) after the answer before, as in
AIPerf's traces. ShareGPT is a JSON array of {"conversations": [{"from": "human" or "gpt", "value": text}]}.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ttft_otel.bench.request_factory import BenchInputError, BenchRequest, RequestFactory, Turn

BLOCK_TOKENS: Final = 512  # of Mooncake's traces
MAX_CACHED_BLOCKS: Final = 10_000  # blocks kept in memory, 4 KB each
SALT_TOKENS: Final = 8  # before each text, so that a round's are not in the cache of the one before
HUMAN: Final = ("human", "user")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file's conversations, and how they are changed.

    A conversation of a trace is a list of its rows, one of ShareGPT a list of (question, answer).
    """

    conversations: Sequence[Sequence[Any]]
    is_trace: bool
    speed: float = 1.0  #: divides a trace's times
    #: Longer prompts of a trace are cut at their end, so that shared prefixes stay.
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None  #: longer answers are cut

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt with its answer; 0 where only the server can count them."""
        rows = (row for rows in self.conversations for row in rows if self.is_trace)
        return max((sum(self.limit_lengths(row)) for row in rows), default=0)

    def count_requests(self) -> int:
        """Turns of all conversations."""
        return sum(map(len, self.conversations))

    def limit_lengths(self, row: dict[str, Any]) -> tuple[int, int]:
        """Tokens of a row's prompt and of its answer."""
        limits = (self.max_input_tokens, self.max_output_tokens)
        lengths = (row["input_length"], row["output_length"])
        # At least 1: servers refuse an empty prompt, and an answer of none has no first token.
        kept, answer = (
            max(1, min(length, limit or length))
            for length, limit in zip(lengths, limits, strict=True)
        )
        return kept, answer

    def generate_requests(
        self,
        factory: RequestFactory,
        seed: int,
        count: int | None,
        draw_think_s: Callable[[random.Random], float],
    ) -> Iterator[BenchRequest]:
        """The first requests of conversations with `count` turns, None: of all.

        A trace's are in its order, ShareGPT's in one that `seed` draws; that is of the tokens of blocks, too.
        draw_think_s: seconds from an answer to the next text.
        """
        left = self.count_requests() if count is None else count
        order = list(self.conversations)
        if not self.is_trace:
            random.Random(f"order/{seed}").shuffle(order)
        words = random.Random(f"salt/{seed}/{factory.side}")

        # By number and not in order: a block dropped from the cache is drawn alike again.
        @lru_cache(maxsize=MAX_CACHED_BLOCKS)
        def draw_block(number: int) -> tuple[int, ...]:
            rng = random.Random(f"replay/{seed}/{factory.side}/{number}")
            return tuple(factory.draw_prompt(rng, BLOCK_TOKENS))

        for conversation in order:
            kept = conversation[:left]
            if not kept:
                return
            left -= len(kept)
            if self.is_trace:
                yield self._build_session(factory, kept, draw_block)
            else:
                salt = factory.write_content(factory.draw_prompt(words, SALT_TOKENS))
                turns = []
                for place, (question, answer) in enumerate(kept):
                    tokens = factory.count_text_tokens(answer)
                    tokens = min(tokens, self.max_output_tokens or tokens)
                    content = question if place else f"{salt} {question}"
                    turns.append(Turn(content, tokens, draw_think_s(words) if place else 0.0))
                yield factory.build_conversation(turns)

    def _build_session(
        self,
        factory: RequestFactory,
        rows: Sequence[dict[str, Any]],
        draw_block: Callable[[int], tuple[int, ...]],
    ) -> BenchRequest:
        """The request of the first of `rows`; a row has its whole prompt, whatever was answered before."""
        row, *later = rows
        prompt_tokens, answer_tokens = self.limit_lengths(row)
        # The last block may be partial: draw it whole, so that equal IDs give equal tokens, and cut.
        blocks = row["hash_ids"][: math.ceil(prompt_tokens / BLOCK_TOKENS)]
        units = [unit for number in blocks for unit in draw_block(number)]
        content = factory.write_content(units[: factory.count_units(prompt_tokens)])
        wait_s = row["wait_ms"] / 1000 / self.speed
        request = factory.build_conversation([Turn(content, answer_tokens, wait_s)])
        if not later:
            return request
        return replace(request, next_turn=lambda _: self._build_session(factory, later, draw_block))


def read_data_file(path: Path) -> DataFile:
    """Read a trace, or a file of ShareGPT. Raises BenchInputError, where it is a trace's with the line."""
    # No UnicodeDecodeError, which would not name the line.
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
        if not first:
            raise BenchInputError(f"{path} is empty")
        file.seek(0)
        if first.lstrip().startswith("["):
            return DataFile(_read_texts(file.read(), path), is_trace=False)
        return DataFile(_read_sessions(file, path), is_trace=True)


def _read_texts(text: str, path: Path) -> list[list[tuple[str, str]]]:
    """Pairs of a question and its answer, of each conversation that has one."""
    try:
        said = [
            [(str(each["from"]), str(each["value"])) for each in entry["conversations"]]
            for entry in json.loads(text)
        ]
    except (ValueError, LookupError, TypeError) as error:
        raise BenchInputError(f"{path}: not in the form of ShareGPT ({error!r})") from error
    pairs = (
        [
            (question, answer)
            for (speaker, question), (answerer, answer) in itertools.pairwise(each)
            if speaker in HUMAN and answerer not in HUMAN and question and answer
        ]
        for each in said
    )
    if found := [each for each in pairs if each]:
        return found
    raise BenchInputError(f"{path}: no question with an answer in it")


def _read_sessions(lines: Iterator[str], path: Path) -> list[list[dict[str, Any]]]:
    """The rows of each session, with `wait_ms`: of the first from the trace's start, else its delay."""
    sessions: dict[object, list[dict[str, Any]]] = {}
    # Traces may begin at any time; waiting for their first request would be no load.
    start_ms = last_ms = -math.inf
    for number, line in enumerate(lines, 1):
        row = _parse_row(line, f"{path}:{number}")
        turns = sessions.setdefault(row.get("session_id", number), [])
        if turns:
            turns.append(row | {"wait_ms": row.get("delay", 0)})
            continue
        start_ms = row["timestamp"] if math.isinf(start_ms) else start_ms
        # The open loop sends in the order of the lines; an earlier one would be sent late.
        if row["timestamp"] < last_ms:
            raise BenchInputError(f"{path}:{number}: earlier than the line before; sort it")
        last_ms = row["timestamp"]
        turns.append(row | {"wait_ms": last_ms - start_ms})
    return list(sessions.values())


def _parse_row(line: str, location: str) -> dict[str, Any]:
    """Parse and check one line. Raises BenchInputError with `location`."""
    try:
        row: dict[str, Any] = json.loads(line)
        if "delay" in row:  # a later turn: it has no time of its own
            row.setdefault("timestamp", 0)
        lengths = (row["input_length"], row["output_length"])
        times_ms, blocks = (row["timestamp"], row.get("delay", 0)), row["hash_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise BenchInputError(f"{location}: not a line of a Mooncake trace ({error!r})") from error
    # type() and not isinstance(): true is an int to Python.
    are_counts = all(type(each) is int and each >= 0 for each in lengths)
    are_times = all(type(each) in (int, float) and 0 <= each < math.inf for each in times_ms)
    if not are_counts or not are_times:
        raise BenchInputError(
            f"{location}: timestamp, delay and lengths must be numbers from 0, lengths whole ones"
        )
    # Without enough blocks the prompt would silently be shorter than the trace says.
    if not isinstance(blocks, list) or lengths[0] > BLOCK_TOKENS * len(blocks):
        raise BenchInputError(
            f"{location}: input_length is beyond the blocks of {BLOCK_TOKENS} in hash_ids"
        )
    return row
