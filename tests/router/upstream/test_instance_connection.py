# SPDX-License-Identifier: Apache-2.0
"""Connections to instances: what ends an answer, what is kept, and what is refused; bodies in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import pytest

from lab.certificates import make_certificate
from ttft_otel.model.stages import MONO
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.connection_pool import ClientTls, ConnectionPool
from ttft_otel.router.upstream.instance_connection import (
    MAX_UNREAD_BYTES,
    PIECE_BYTES,
    InstanceAnswer,
)

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
MAX_HEADER_BYTES = 1024
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
EARLY = b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"
HEAVY = b"HTTP/1.1 103 Early Hints\r\nlink: " + b"a" * 1000 + b"\r\n\r\n"


class RawServer:
    """Answers the requests of each connection with `answers`, bytes in one write each, then closes it."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self.answers, self.heads, self.connection_count = answers, list[bytes](), 0
        self.written_bytes = 0

    async def handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection."""
        self.connection_count += 1
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            for answer in self.answers:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                await reader.readexactly(4)
                for at in range(0, len(answer), 1 << 16):
                    writer.write(answer[at : at + (1 << 16)])
                    await writer.drain()
                    self.written_bytes += len(answer[at : at + (1 << 16)])
        writer.close()


@contextlib.asynccontextmanager
async def open_pool(
    handler: Handler, certificate: tuple[Path, Path] | None = None, total_timeout_s: float = 0.0
) -> AsyncIterator[tuple[ConnectionPool, Callable[[], Attempt]]]:
    """A pool, and a function that makes attempts at a server that `handler` serves below /prefix."""
    accepting = tls = None
    if certificate:
        accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        accepting.load_cert_chain(*certificate)
        tls = ClientTls(str(certificate[0]))
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        await handler(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=accepting)
    scheme = "https" if certificate else "http"
    url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix"
    instance = parse_instance_url(url, MONO)
    pool = ConnectionPool(MAX_HEADER_BYTES, total_timeout_s, tls=tls)
    try:
        yield pool, lambda: Attempt(MONO, "/v1/x", instance, "0" * 16, 0)
    finally:
        await pool.close()
    server.close()
    # TLS says goodbye: a connection whose end nobody waits for is left open when the loop closes.
    if serving:
        await asyncio.wait(serving, timeout=10)


@contextlib.asynccontextmanager
async def run_pool(
    *answers: bytes,
) -> AsyncIterator[tuple[RawServer, Callable[[], Attempt], ConnectionPool]]:
    """A raw server, a function that makes attempts at it, and a pool."""
    raw = RawServer(answers)
    async with open_pool(raw.handle_connection) as (pool, make_attempt):
        yield raw, make_attempt, pool


async def ask(pool: ConnectionPool, attempt: Attempt) -> InstanceAnswer:
    """POST four bytes, in two parts."""
    return await pool.send_request(attempt, "/v1/x?a=%20b", {"x-own": "1"}, (b"bo", b"dy"))


async def test_a_connection_is_kept() -> None:
    """Two requests, one connection; the second attempt knows. The head is what HTTP wants."""

    async with run_pool(PLAIN, PLAIN) as (raw, make_attempt, pool):
        attempts = [make_attempt(), make_attempt()]
        for attempt in attempts:
            answer = await ask(pool, attempt)
            assert (answer.status, await answer.read(), answer.at_eof()) == (200, b"hi", True)
        assert [each.is_new_connection for each in attempts] == [True, False]
        assert raw.connection_count == 1
        host = attempts[0].instance.url.split("/")[2].encode()
        assert raw.heads[0] == (
            b"POST /prefix/v1/x?a=%20b HTTP/1.1\r\nHost: " + host + b"\r\n"
            b"x-own: 1\r\nContent-Length: 4\r\n\r\n"
        )


@pytest.mark.parametrize(
    ("answer_bytes", "body"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 X\r\nLink: a\r\n\r\n" + PLAIN, b"hi"),
        (EARLY * 16 + PLAIN, b"hi"),
        (HEAVY * 2 + PLAIN, b"hi"),
        (b"HTTP/1.1 599 X\r\nContent-Length: 2\r\n\r\nhi", b"hi"),
        (b"HTTP/1.1 304 X\r\n\r\n", b""),
        (b"HTTP/1.1 204 X\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nzip", b"zip"),
        (b"HTTP/1.1 204 No\r\nConnection: close\r\n\r\n", b""),
        (CHUNKED_HEAD + b"2;a=b\r\nhi\r\n0\r\nTrailer: dropped\r\n\r\n", b"hi"),
    ],
)
async def test_answers_end(answer_bytes: bytes, body: bytes) -> None:
    """By length, by the last chunk, with the connection, without a body; interim ones are dropped."""
    async with run_pool(answer_bytes) as (_, make_attempt, pool):
        answer = await ask(pool, make_attempt())
        assert (await answer.read(), answer.is_complete) == (body, True)
        assert answer.list_values(b"link") == answer.list_values(b"trailer") == []


# Of what no client can provoke the error counts against the instance (failures.py).
PAYLOAD_FAULTS = [
    b"HTTP/1.1 101 X\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
    *(
        b"HTTP/1.1 " + status + b" X\r\nContent-Length: 2\r\n\r\n{}"
        for status in (b"000", b"099", b"600", b"304", b"204")
    ),
    EARLY * 17 + PLAIN,
    b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000,
    HEAVY * 70 + PLAIN,
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi",
    CHUNKED_HEAD + b"2\r\nhi\r\n",
    CHUNKED_HEAD + b"0\r\nT: " + b"b" * MAX_HEADER_BYTES,
]
RESPONSE_FAULTS = [
    PLAIN + PLAIN,
    PLAIN + b"surplus",
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 129 + b"\r\n",
    b"HTTP/1.1 200 OK\r\nA: " + b"b" * MAX_HEADER_BYTES,
    b"HTTP/1.1 200 OK\r\nA: b\0c\r\n\r\n",
]
FAULTS = [
    *((each, aiohttp.ClientPayloadError) for each in PAYLOAD_FAULTS),
    *((each, aiohttp.ClientResponseError) for each in RESPONSE_FAULTS),
    (b"HTTP/1.1 200 OK\r\nA", aiohttp.ServerDisconnectedError),
]


@pytest.mark.parametrize(("answer_bytes", "error"), FAULTS)
async def test_what_is_no_answer(answer_bytes: bytes, error: type[Exception]) -> None:
    """Each fault is an error, and the connection is not used again."""
    async with run_pool(answer_bytes) as (raw, make_attempt, pool):
        for _ in range(2):
            with pytest.raises((error, aiohttp.ClientResponseError)):
                await (await ask(pool, make_attempt())).read()
        assert raw.connection_count == 2


async def test_a_slow_reader_slows_the_instance() -> None:
    """Little is held of an answer that nobody reads; read, all of it comes."""
    size = 32 << 20

    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    async with run_pool(head + bytes(size)) as (raw, make_attempt, pool):
        answer = await ask(pool, make_attempt())
        before = -1
        while before != raw.written_bytes:
            before = raw.written_bytes
            await asyncio.sleep(0.2)
        assert before < size  # what sockets hold, and:
        assert len(answer.read_nowait()) <= MAX_UNREAD_BYTES + (1 << 18)
        got = 0
        while part := await answer.readany():
            got += len(part)
        assert got > size // 2 and answer.at_eof()


async def test_what_comes_with_the_end_is_returned() -> None:
    """Parts are pushed as they come, but the last one leaves with the end."""
    chunk, end = b"2\r\nhi\r\n", b"0\r\n\r\n"
    async with run_pool(CHUNKED_HEAD + chunk, chunk + end) as (_, make_attempt, pool):
        answer = await ask(pool, make_attempt())
        assert await answer.readany() == b"hi"
        pushed: list[bytes] = []
        task = asyncio.create_task(answer.push_to(pushed.append))
        await asyncio.sleep(0)
        task.cancel()
        answer.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pushed == []

    async with run_pool(CHUNKED_HEAD + chunk + end) as (_, make_attempt, pool):
        answer = await ask(pool, make_attempt())
        pushed = []
        assert b"".join(pushed) + await answer.push_to(pushed.append) == b"hi"


async def test_no_header_is_smuggled() -> None:
    """A line break in a value is refused here too, whatever was checked before."""
    async with run_pool(PLAIN) as (raw, make_attempt, pool):
        for headers in ({"a": "b\r\nc: d"}, {"a\n": "b"}):
            with pytest.raises(ValueError):
                await pool.send_request(make_attempt(), "/v1/x", headers, (b"body",))
        assert raw.heads == []


# Bodies that are sent in pieces.

BODY = (b"[", b"z" * (5 * PIECE_BYTES + 17), b"]")
REFUSED = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_whole(is_encrypted: bool, certificate: tuple[Path, Path]) -> None:
    """Small and large bodies, one after the other on one connection, arrive as they were."""
    received, connections = list[bytes](), list[asyncio.StreamWriter]()
    bodies = ((b"a", b"bc"), BODY, (b"d",))

    async def serve_bodies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                received.append(await reader.readexactly(length))
                writer.write(PLAIN)
                await writer.drain()

    async with open_pool(serve_bodies, certificate if is_encrypted else None) as (pool, attempt):
        for body in bodies:
            answer = await pool.send_request(attempt(), "/v1/x", {"x-own": "1"}, body)
            assert (answer.status, await answer.read()) == (200, b"hi")
    assert received == [b"".join(body) for body in bodies]
    assert len(connections) == 1


async def test_refused_before_it_was_read() -> None:
    """An instance that answers without reading: its answer counts, and the connection is not used again."""
    connections: list[asyncio.StreamWriter] = []
    ended = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(REFUSED)
        await ended.wait()
        writer.transport.abort()

    async with open_pool(refuse) as (pool, attempt):
        for _ in range(2):
            answer = await pool.send_request(attempt(), "/v1/x", {}, BODY)
            assert (answer.status, await answer.read()) == (413, b"no")
        ended.set()
    assert len(connections) == 2


async def test_a_client_that_leaves_meanwhile() -> None:
    """A request that is cancelled while its body is sent closes its connection."""
    left, closed = asyncio.Event(), asyncio.Event()

    async def read_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await left.wait()
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                pass
        closed.set()
        writer.close()

    async with open_pool(read_late) as (pool, attempt):
        sending = asyncio.create_task(pool.send_request(attempt(), "/v1/x", {}, BODY))
        await asyncio.sleep(0.3)
        assert not sending.done()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        left.set()
        await closed.wait()


async def test_an_instance_that_does_not_read_times_out() -> None:
    """The total time-out also ends a request whose body fills every buffer on its way."""
    ended = asyncio.Event()

    async def read_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await ended.wait()
        writer.transport.abort()

    async with open_pool(read_head, total_timeout_s=0.3) as (pool, attempt):
        with pytest.raises(asyncio.TimeoutError):
            await pool.send_request(attempt(), "/v1/x", {}, (bytes(48 * PIECE_BYTES),))
        ended.set()
