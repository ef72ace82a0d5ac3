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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from ttft_otel.bench.request_factory import BenchInputError, RequestFactory, Turn

BLOCK_TOKENS: Final = 512  # of Mooncake's traces
MAX_CACHED_BLOCKS: Final = 10_000  # blocks kept in memory, 4 KB each
SALT_TOKENS: Final = 8  # before each text, so that a round's are not in the cache of the one before
HUMAN: Final = ("human", "user")
NOT_NEGATIVE: Final = msgspec.Meta(ge=0)


class MooncakeRow(msgspec.Struct):
    """One line of a trace."""

    input_length: Annotated[int, NOT_NEGATIVE]
    output_length: Annotated[int, NOT_NEGATIVE]
    hash_ids: list[Any]
    timestamp: Annotated[float, NOT_NEGATIVE] | None = None  #: a later turn needs none
    delay: Annotated[float, NOT_NEGATIVE] | None = None
    session_id: int | str | None = None
    wait_ms: float = 0.0  #: from both, by _read_sessions()


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file's conversations, and how the flags of those names change them.

    A conversation of a trace is a list of MooncakeRows, one of ShareGPT a list of (question, answer).
    """

    conversations: Sequence[Sequence[Any]]
    is_trace: bool
    speed: float = 1.0  #: divides a trace's times
    #: Longer prompts of a trace are cut at their end, so that shared prefixes stay.
    max_input: int | None = None
    max_output: int | None = None  #: longer answers are cut

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt with its answer; 0 where only the server can count them."""
        rows = (row for rows in self.conversations for row in rows if self.is_trace)
        return max((sum(self.limit_lengths(row)) for row in rows), default=0)

    def count_requests(self) -> int:
        """Turns of all conversations."""
        return sum(map(len, self.conversations))

    def limit_lengths(self, row: MooncakeRow) -> tuple[int, int]:
        """Tokens of a row's prompt and of its answer."""
        prompt = min(row.input_length, self.max_input or row.input_length)
        answer = min(row.output_length, self.max_output or row.output_length)
        # Servers refuse an empty prompt, and an answer of none has no first token.
        return max(1, prompt), max(1, answer)

    def draw_turns(
        self, factory: RequestFactory, seed: int, draw_think_s: Callable[[random.Random], float]
    ) -> Iterator[list[Turn]]:
        """The turns of each conversation.

        A trace's are in its order, ShareGPT's in one that `seed` draws; that is of the tokens of blocks, too.
        draw_think_s: seconds from an answer to the next text.
        """
        if self.is_trace:
            yield from self._draw_sessions(factory, seed)
            return
        order, words = list(self.conversations), random.Random(f"salt/{seed}/{factory.side}")
        random.Random(f"order/{seed}").shuffle(order)
        for conversation in order:
            salt = factory.write_content(factory.draw_prompt(words, SALT_TOKENS))
            turns = []
            for place, (question, answer) in enumerate(conversation):
                tokens = factory.count_text_tokens(answer)
                tokens = min(tokens, self.max_output or tokens)
                content = question if place else f"{salt} {question}"
                turns.append(Turn(content, tokens, draw_think_s(words) if place else 0.0))
            yield turns

    def _draw_sessions(self, factory: RequestFactory, seed: int) -> Iterator[list[Turn]]:
        # By number and not in order: a block dropped from the cache is drawn alike again.
        @lru_cache(maxsize=MAX_CACHED_BLOCKS)
        def draw_block(number: int) -> tuple[int, ...]:
            rng = random.Random(f"replay/{seed}/{factory.side}/{number}")
            return tuple(factory.draw_prompt(rng, BLOCK_TOKENS))

        for rows in self.conversations:
            turns = []
            for row in rows:
                prompt_tokens, answer_tokens = self.limit_lengths(row)
                # The last block may be partial: draw it whole, so that equal IDs give equal tokens, and cut.
                blocks = row.hash_ids[: math.ceil(prompt_tokens / BLOCK_TOKENS)]
                units = [unit for number in blocks for unit in draw_block(number)]
                content = factory.write_content(units[: factory.count_units(prompt_tokens)])
                wait_s = row.wait_ms / 1000 / self.speed
                turns.append(Turn(content, answer_tokens, wait_s, is_whole=True))
            yield turns


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


def _read_sessions(lines: Iterator[str], path: Path) -> list[list[MooncakeRow]]:
    """The rows of each session, with `wait_ms`: of the first from the trace's start, else its delay."""
    sessions: dict[int | str, list[MooncakeRow]] = {}
    # Traces may begin at any time; waiting for their first request would be no load.
    start_ms = last_ms = -math.inf
    for number, line in enumerate(lines, 1):
        row = _parse_row(line, f"{path}:{number}")
        turns = sessions.setdefault(number if row.session_id is None else row.session_id, [])
        row.wait_ms = row.delay or 0.0
        if not turns:
            timestamp = row.timestamp or 0.0
            start_ms = timestamp if math.isinf(start_ms) else start_ms
            # The open loop sends in the order of the lines; an earlier one would be sent late.
            if timestamp < last_ms:
                raise BenchInputError(f"{path}:{number}: earlier than the line before; sort it")
            last_ms, row.wait_ms = timestamp, timestamp - start_ms
        turns.append(row)
    return list(sessions.values())


def _parse_row(line: str, location: str) -> MooncakeRow:
    """Parse and check one line. Raises BenchInputError with `location`."""
    try:
        row = msgspec.json.decode(line, type=MooncakeRow)
    except msgspec.DecodeError as error:
        raise BenchInputError(f"{location}: not a line of a Mooncake trace ({error})") from error
    if row.timestamp is None and row.delay is None:
        raise BenchInputError(f"{location}: neither a timestamp nor a delay")
    # Without enough blocks the prompt would silently be shorter than the trace says.
    if row.input_length > BLOCK_TOKENS * len(row.hash_ids):
        raise BenchInputError(
            f"{location}: input_length is beyond the blocks of {BLOCK_TOKENS} in hash_ids"
        )
    return row
