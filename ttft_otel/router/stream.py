# SPDX-License-Identifier: Apache-2.0
"""The client's side of one request: its head, its first token and the rest, each as it comes.

forward.py and pair.py give it what the legs answer; nothing is held back, and a client that reads
slowly slows the leg down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp

from ttft_otel import clock, names, timing
from ttft_otel.guard import Guard
from ttft_otel.router import answer, headers
from ttft_otel.router.account import Account
from ttft_otel.router.answer import Headers, Send
from ttft_otel.router.legs import learn
from ttft_otel.router.path import Attempt, Trip, partition
from ttft_otel.router.report import Exchange


class Client:
    """One request's client. `asked`: it wants Server-Timing. `tell` takes the ttft half."""

    def __init__(
        self, exchange: Exchange, send: Send, asked: bool, tell: Callable[[Exchange], None]
    ) -> None:
        self.exchange, self.send, self.asked, self.tell = exchange, send, asked, tell

    async def first(self, status: int, down: Headers, data: bytes, more: bool) -> None:
        """The head and the first chunk; a stream tells its ttft half now, after the client has it."""
        exchange = self.exchange
        if self.asked:
            down.append((names.TIMING.encode(), _timing(exchange)))
        await answer.start(status, down, exchange, self.send)
        exchange.done = not more
        await self.send({"type": "http.response.body", "body": data, "more_body": more})
        exchange.given = True
        if exchange.streaming:
            exchange.trip.end = clock.now()
            if more and exchange.operation:
                with Guard("router.first"):
                    self.tell(exchange)

    async def give(self, data: bytes) -> None:
        """The next chunk."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Nothing more comes."""
        self.exchange.done = True
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


async def hand_on(response: aiohttp.ClientResponse, attempt: Attempt, client: Client) -> None:
    """Hand an answer on chunk by chunk; stop the leg if that is cut short."""
    exchange = client.exchange
    with reading(response, attempt):
        content = response.content
        first = await content.readany()
        attempt.first = clock.now()
        account = attempt.account
        if exchange.context.trace_id or account is not None:
            learn(attempt, response)
        exchange.streaming = response.content_type == "text/event-stream"
        exchange.error = attempt.error
        more = not content.at_eof()
        ours = bool(exchange.context.trace_id) or (account is not None and account.asks)
        kept = headers.down(response.raw_headers, ours)
        await client.first(response.status, kept, first, more)
        _hear(account, first)
        while more and (chunk := await content.readany()):
            await client.give(chunk)
            _hear(account, chunk)
        attempt.ended = clock.now()
        if more:
            await client.end()


def _hear(account: Account | None, data: bytes) -> None:
    if account is not None and account.early:
        account.heard(data)


@contextmanager
def reading(response: aiohttp.ClientResponse, attempt: Attempt) -> Iterator[None]:
    """An answer is being read: however that ends, the attempt says so and the leg is over."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        attempt.error = type(error).__name__
        raise
    except asyncio.CancelledError:
        attempt.cut()
        raise
    finally:
        finish(response, attempt)


def finish(response: aiohttp.ClientResponse, attempt: Attempt) -> None:
    """A leg is over; one that has more to say is cut off."""
    attempt.ended = attempt.ended or clock.now()
    if not response.content.at_eof():
        response.close()


def _timing(exchange: Exchange) -> bytes:
    """Our own Server-Timing, written just before the client's first byte."""
    moment = clock.now()
    trip = Trip(exchange.trip.arrive, exchange.trip.parsed, exchange.trip.path)
    trip.look, trip.end = exchange.trip.look, moment if exchange.streaming else 0
    cut = partition(trip)
    rest = None if exchange.streaming else moment - cut.end
    return timing.write(cut.stages, cut.unattributed, cut.end - cut.start, rest).encode()
