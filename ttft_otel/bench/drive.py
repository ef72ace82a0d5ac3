# SPDX-License-Identifier: Apache-2.0
"""Send Asks in time: open loop, closed loop, and what every loop needs; figures.py gets Results.

An answer is parsed after its last byte, in slices, so that parsing one hardly delays the readings of
the others; how late this process itself is, is measured all the while.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Final

from ttft_otel import context, names, timing
from ttft_otel.bench.ask import Ask
from ttft_otel.bench.stream import Reader, Story
from ttft_otel.bench.wire import Reply, Target, exchange, until

LEAD_NS: Final = 20_000_000  # connections are opened so much before their request is due
APART_NS: Final = 1_000_000
BEAT: Final = 0.01
OK: Final = 200
TOO_LONG: Final = ("maximum context length", "maximum model length")  # vLLM's words
SLICE: Final = 32  # pieces parsed in one turn of the event loop


@dataclass(slots=True)
class Result:
    """One request: its readings, what its stream said, and the server's breakdown if it sent one.

    error: "" when it succeeded, else the kind of failure. says: the server's words on it.
    """

    request_id: str
    trace_id: str
    reply: Reply
    story: Story
    timing: timing.Timing | None
    error: str
    says: str = ""

    @property
    def ttft_us(self) -> float:
        """From the write to the first token's event."""
        return (self.story.tokens_ns[0] - self.reply.sent_ns) / 1000

    @property
    def latency_us(self) -> float:
        """From the write to the end of the answer."""
        return (self.reply.end_ns - self.reply.sent_ns) / 1000


@dataclass(slots=True)
class Run:
    """One run's results, its own lateness (ns), and how much was held or cut short."""

    results: list[Result] = field(default_factory=list)
    beats_ns: list[int] = field(default_factory=list)
    started: int = 0
    held: int = 0
    stopped: bool = False

    @property
    def unfinished(self) -> int:
        """Requests that were sent and whose end was not waited for."""
        return self.started - len(self.results)


class Driver:
    """Send one request after another to a target; at most `most` are under way at once."""

    def __init__(self, target: Target, timeout: float = 600.0, most: int | None = None) -> None:
        """An empty run."""
        self.target, self.timeout = target, timeout
        self.room = asyncio.Semaphore(most) if most else None
        self.run = Run()
        self.freed_ns = 0

    async def enter(self, due_ns: int) -> int:
        """Wait for room; the time when the request is due now, later for those held in the meantime."""
        if self.room is None:
            return due_ns
        full = self.room.locked()
        await self.room.acquire()
        if full:
            self.freed_ns = monotonic_ns()
        self.run.held += due_ns < self.freed_ns
        return max(due_ns, self.freed_ns)

    def leave(self) -> None:
        """Give the room back."""
        if self.room is not None:
            self.room.release()

    async def fire(self, ask: Ask, due_ns: int) -> Result:
        """Send one request at its time; call `enter` before."""
        trace, name = context.new_trace(), uuid.uuid4().hex
        headers = {
            **ask.headers,
            names.TRACEPARENT: f"00-{trace}-{context.new_id()}-01",
            names.REQUEST_HEADER: name,
            names.ASK: "1",
        }
        self.run.started += 1
        try:
            message = self.target.message(ask.path, ask.body, headers)
            reply = await exchange(self.target, message, due_ns, self.timeout)
        finally:
            self.leave()
        story = await _told(reply)
        found = timing.read(reply.headers.get(names.TIMING, ""))
        error = _failure(reply, story)
        result = Result(name, trace, reply, story, found, error, story.says if error else "")
        self.run.results.append(result)
        return result

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Measure how late this process's event loop is, for as long as the block runs."""
        task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            task.cancel()

    async def _beat(self) -> None:
        while True:
            due = monotonic_ns() + int(BEAT * 1e9)
            await asyncio.sleep(BEAT)
            late = max(0, monotonic_ns() - due)
            # Beats that fell into a stall were late as well: without them a long one counts as one.
            self.run.beats_ns += [late, *range(late - int(BEAT * 1e9), 0, -int(BEAT * 1e9))]


async def open_loop(driver: Driver, arrivals: Iterable[tuple[float, Ask]]) -> None:
    """Send each Ask so many seconds after the start, whatever the answers do."""
    start = monotonic_ns() + 2 * LEAD_NS
    under_way: set[asyncio.Task[Result]] = set()
    try:
        for offset, ask in arrivals:
            due = start + int(offset * 1e9)
            await until(due - LEAD_NS)
            task = asyncio.create_task(driver.fire(ask, await driver.enter(due)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)
    finally:
        await drop(under_way)


async def closed_loop(driver: Driver, asks: Iterable[Ask], concurrency: int) -> None:
    """Keep so many requests under way until there are no more Asks.

    The first ones leave 1 ms apart: all at once, this process would be late with most of them.
    """
    queue, start = iter(asks), monotonic_ns() + 2 * LEAD_NS
    tasks = {
        asyncio.create_task(_worker(driver, queue, start + place * APART_NS))
        for place in range(concurrency)
    }
    try:
        await asyncio.gather(*tasks)
    finally:
        await drop(tasks)


async def drop(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Cancel what is still under way, and wait until it is gone."""
    left = list(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _worker(driver: Driver, asks: Iterator[Ask], due: int) -> None:
    await until(due - LEAD_NS)
    for ask in asks:
        result = await driver.fire(ask, await driver.enter(due))
        due = result.reply.end_ns


async def _told(reply: Reply) -> Story:
    """Parse an answer's pieces, a slice at a time."""
    reader = Reader()
    if reply.status != OK:
        reader.refused(b"".join(piece for _, piece in reply.pieces))
    for place, (at, piece) in enumerate(reply.pieces):
        if place % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        reader.feed(at, piece)
    reply.pieces.clear()
    return reader.story


def _failure(reply: Reply, story: Story) -> str:
    """The kind of a failure; "" for a success."""
    if reply.error:
        return reply.error
    if any(word in story.says for word in TOO_LONG):
        return "longer than the context"
    if reply.status != OK:
        return f"HTTP {reply.status}"
    if story.trouble or not story.tokens_ns:
        return story.trouble or "no token"
    return "" if story.done else "cut off"
