# SPDX-License-Identifier: Apache-2.0
"""Connections to instances: what ends an answer, what is kept, and what is refused; raw bytes on sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import aiohttp
import pytest

from ttft_otel.model.stages import MONO
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import Instance, parse_instance_url
from ttft_otel.router.upstream.connection_pool import ConnectionPool
from ttft_otel.router.upstream.instance_answer import MAX_UNREAD_BYTES, InstanceAnswer

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
MAX_HEADER_BYTES = 1024


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
async def run_pool(
    *answers: bytes,
) -> AsyncIterator[tuple[RawServer, Callable[[], Attempt], ConnectionPool]]:
    """A raw server, a function that makes attempts at it, and a pool."""
    raw = RawServer(answers)
    server = await asyncio.start_server(raw.handle_connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    instance: Instance = parse_instance_url(f"http://127.0.0.1:{port}/prefix", MONO)
    pool = ConnectionPool(MAX_HEADER_BYTES)
    try:
        yield raw, lambda: Attempt(MONO, "/v1/x", instance, "0" * 16, 0), pool
    finally:
        await pool.close()
    server.close()


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


@pytest.mark.parametrize(
    ("answer_bytes", "error"),
    [
        (
            b"HTTP/1.1 101 X\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
            aiohttp.ClientPayloadError,
        ),
        (PLAIN + PLAIN, aiohttp.ClientResponseError),
        (PLAIN + b"surplus", aiohttp.ClientResponseError),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 129 + b"\r\n", aiohttp.ClientResponseError),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * MAX_HEADER_BYTES, aiohttp.ClientResponseError),
        (b"HTTP/1.1 200 OK\r\nA: b\0c\r\n\r\n", aiohttp.ClientResponseError),
        (b"HTTP/1.1 200 OK\r\nA", aiohttp.ServerDisconnectedError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", aiohttp.ClientPayloadError),
        (CHUNKED_HEAD + b"2\r\nhi\r\n", aiohttp.ClientPayloadError),
        (CHUNKED_HEAD + b"0\r\nT: " + b"b" * MAX_HEADER_BYTES, aiohttp.ClientPayloadError),
    ],
)
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
    chunks = b"2\r\nhi\r\n"
    async with run_pool(CHUNKED_HEAD + chunks, chunks + b"0\r\n\r\n") as (
        _,
        make_attempt,
        pool,
    ):
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

    async with run_pool(CHUNKED_HEAD + chunks + b"0\r\n\r\n") as (_, make_attempt, pool):
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
