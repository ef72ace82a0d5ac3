# SPDX-License-Identifier: Apache-2.0
"""The ZMQ sockets to one publisher of KV events; kvevents.py runs them, feed.py gets the messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from itertools import count
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ttft_otel.router.prefixes.endpoints import Endpoint
from ttft_otel.router.prefixes.feed import Feed, Lost

WAITING: Final = 10_000  # messages; as many as engines keep to be asked for again
LONGEST: Final = 64 << 20  # bytes of a message
PATIENCE: Final = 5.0  # seconds for the next part of an answer; an engine in a long step is late
FLOOD: Final = 16  # messages in a row until others may run
TRIES: Final = 3  # answers in a row that bring nothing new
END: Final = (1 << 64) - 1
HEARTBEAT: Final = {"IVL": 5_000, "TIMEOUT": 15_000}  # milliseconds: half-open connections end


async def listen(
    context: zmq.asyncio.Context,
    endpoint: Endpoint,
    feed: Feed,
    connected: Callable[[bool], None],
) -> None:
    """Tell the feed what is published, and whether the publisher is there, until cancelled."""
    with ExitStack() as stack:
        socket = stack.enter_context(_socket(context, zmq.SUB, WAITING))
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        stack.callback(socket.disable_monitor)
        for name, value in HEARTBEAT.items():
            socket.setsockopt(getattr(zmq, f"HEARTBEAT_{name}"), value)
        socket.setsockopt(zmq.SUBSCRIBE, endpoint.topic.encode())
        socket.connect(endpoint.events)
        turn = asyncio.Lock()
        tasks = [
            asyncio.ensure_future(_watch(monitor, feed, turn, connected)),
            asyncio.ensure_future(_hear(socket, feed, turn)),
        ]
        for task in tasks:
            stack.callback(task.cancel)
        await asyncio.gather(*tasks)


async def _hear(socket: zmq.asyncio.Socket, feed: Feed, turn: asyncio.Lock) -> None:
    for turns in count(1):
        parts = await socket.recv_multipart()
        async with turn:
            if len(parts) == 3 and len(parts[1]) == 8:
                await feed.hear(int.from_bytes(parts[1], "big"), parts[2])
            else:
                feed.counts["malformed"] += 1
        if turns % FLOOD == 0:  # messages that are there already are received without a pause
            await asyncio.sleep(0)


async def _watch(
    monitor: zmq.asyncio.Socket, feed: Feed, turn: asyncio.Lock, connected: Callable[[bool], None]
) -> None:
    while True:
        event = await recv_monitor_message(monitor)
        there = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        connected(there)
        if there:
            async with turn:
                await feed.meet()
        else:
            feed.part()


async def replay(
    context: zmq.asyncio.Context, address: str, start: int
) -> AsyncGenerator[tuple[int, bytes], None]:
    """All that the engine keeps from this number on, without a hole. Raises Lost.

    Engines send it faster than their socket may take it, and then drop some: those are asked for again.
    """
    following: int | None = None
    empty = 0
    while empty < TRIES:
        before, whole, ended = following, True, False
        async with aclosing(_answer(context, address, start)) as answer:
            async for number, payload in answer:
                if number == END:
                    ended = True
                elif whole and following in (None, number):
                    yield number, payload
                    start = following = number + 1
                else:
                    whole = False
        if whole and ended:
            return
        empty = 0 if following != before else empty + 1
    raise Lost(address)


async def _answer(
    context: zmq.asyncio.Context, address: str, start: int
) -> AsyncGenerator[tuple[int, bytes], None]:
    """One answer; it is whole if its last number is END."""
    with _socket(context, zmq.DEALER, 0) as socket:
        socket.connect(address)
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            try:
                parts: list[Any] = await asyncio.wait_for(socket.recv_multipart(), PATIENCE)
            except asyncio.TimeoutError:
                return
            if len(parts) < 3 or len(parts[-2]) != 8:
                return
            number = int.from_bytes(parts[-2], "big")
            yield number, parts[-1]
            if number == END:
                return


def _socket(context: zmq.asyncio.Context, kind: int, waiting: int) -> zmq.asyncio.Socket:
    socket: zmq.asyncio.Socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, waiting)
    socket.setsockopt(zmq.MAXMSGSIZE, LONGEST)
    socket.setsockopt(zmq.IPV6, 1)
    return socket
