# SPDX-License-Identifier: Apache-2.0
"""Fifty honest streams through a router, and the instance that feeds them, for test_stalls.py.

All run in a thread of their own; the instance throws away what hostile requests send it. Each stream
counts its events, so that one that is lost, twice or out of order is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

HONEST_STREAMS = 50
GAP_S = 0.1  # between two events of a stream
END_EVENT = b"data: [DONE]\n\n"
EVENT = re.compile(rb'data: \{"n": (\d+)\}\n\n')
HONEST_BODY = b'{"model": "tiny", "stream": true, "max_tokens": 9, "messages": []}'
MODELS = b'{"object": "list", "data": [{"id": "tiny"}]}'
PLAIN = b'{"id": "a", "choices": []}'
PEEK_BYTES = 4096  # of a body, to see whether it is an honest one


class StreamBench:
    """The instance and the clients; `gaps_s`: seconds between two events that a client got."""

    def __init__(self) -> None:
        self.url = ""
        self.gaps_s: list[float] = []
        self.event_counts: list[int] = []
        self._is_over = asyncio.Event()

    def end_streams(self) -> None:
        """Let every stream end with its last event."""
        self._is_over.set()

    async def accept_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """The instance: honest requests get a stream, others a plain answer."""
        try:
            while True:
                await self._serve_request(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _serve_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int((*re.findall(rb"content-length: (\d+)", head), b"0")[0])
        peek = await reader.readexactly(min(length, PEEK_BYTES))
        length -= len(peek)
        while length:
            piece = await reader.read(min(length, 1 << 20))
            if not piece:
                raise ConnectionResetError
            length -= len(piece)
        if peek == HONEST_BODY:
            await self._send_stream(writer)
            return
        body = MODELS if head.startswith(b"get") else PLAIN
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )

    async def _send_stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        number = 0
        while not self._is_over.is_set():
            data = b'data: {"n": %d}\n\n' % number
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            number += 1
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), GAP_S)
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(END_EVENT), END_EVENT))

    async def read_stream(self, router_url: str) -> None:
        """One client: reads its stream to the end and counts its events."""
        host, port = router_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(HONEST_BODY), HONEST_BODY)
        )
        rest, number, before_s = b"", 0, 0.0
        while END_EVENT not in rest:
            piece = await reader.read(1 << 16)
            assert piece, f"a stream ended after {number} events: {rest!r}"
            rest += piece
            end = 0
            for found in EVENT.finditer(rest):
                assert int(found[1]) == number
                number, end, now_s = number + 1, found.end(), time.monotonic()
                if before_s:
                    self.gaps_s.append(now_s - before_s)
                before_s = now_s
            rest = rest[end:]
        self.event_counts.append(number)
        writer.close()


class RunningStreams:
    """The bench in its thread, seen from the test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._bench = self._run(self._start_instance())
        self.instance_url = self._bench.url
        self._clients: asyncio.Future[list[None]] | None = None

    async def _start_instance(self) -> StreamBench:
        bench = StreamBench()
        server = await asyncio.start_server(
            bench.accept_connection, "127.0.0.1", 0, limit=1 << 20, backlog=256
        )
        self._server = server
        bench.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return bench

    def start_clients(self, router_url: str) -> None:
        """Begin all streams through this router."""

        async def start() -> None:
            streams = (self._bench.read_stream(router_url) for _ in range(HONEST_STREAMS))
            self._clients = asyncio.gather(*streams)

        self._run(start())

    def take_gaps_s(self) -> list[float]:
        """Seconds between events since the last call."""
        gaps_s, self._bench.gaps_s = self._bench.gaps_s, []
        return gaps_s

    def end_clients(self) -> list[int]:
        """End all streams; how many events each had."""

        async def wait_for_clients() -> list[int]:
            self._bench.end_streams()
            assert self._clients is not None
            await asyncio.wait_for(self._clients, 60)
            return self._bench.event_counts

        return self._run(wait_for_clients())

    def close(self) -> None:
        """End the thread, and with it what still waits in it."""

        async def end_tasks() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.05)  # transports close in a turn of their own

        self._server.close()
        self._run(end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(90)


@contextlib.contextmanager
def run_streams() -> Iterator[RunningStreams]:
    """A bench whose instance runs; clients begin with start_clients()."""
    streams = RunningStreams()
    try:
        yield streams
    finally:
        streams.close()
