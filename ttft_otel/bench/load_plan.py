# SPDX-License-Identifier: Apache-2.0
"""Which requests to send, and when: commands/bench.py builds a LoadPlan, bench_session.py runs it.

Every load is a list of conversations; most have one turn. They arrive at times of a file, at a rate, or
as soon as one of so many has ended.

A file has the lengths, times and shared prefixes of a trace, or the texts of ShareGPT.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from ttft_otel.bench.http_exchange import BenchTarget
from ttft_otel.bench.load_driver import LoadRun, run_closed_loop, run_open_loop
from ttft_otel.bench.request_factory import (
    BenchInputError,
    BenchRequest,
    RequestFactory,
    Turn,
    build_image_content,
    join_words,
)

BLOCK_TOKENS: Final = 512  # of Mooncake's traces
MAX_CACHED_BLOCKS: Final = 10_000  # blocks kept in memory, 4 KB each
SALT_TOKENS: Final = 8  # before each text, so that a round's are not in the cache of the one before
HUMAN: Final = ("human", "user")
NOT_NEGATIVE: Final = msgspec.Meta(ge=0)
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


@dataclass(slots=True)
class BenchSide:
    """A target, its load, how to build requests for it, and its finished and current runs."""

    target: BenchTarget
    factory: RequestFactory
    plan: LoadPlan
    runs: list[LoadRun] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Requests per second, or conversations at once; 0 for a trace's own times."""
        return self.plan.rate or self.plan.concurrency or 0.0

    @property
    def unit(self) -> str:
        """Of the rate."""
        return "concurrent requests" if self.plan.concurrency else "requests/s"
