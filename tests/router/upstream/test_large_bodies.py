# SPDX-License-Identifier: Apache-2.0
"""Bodies that are sent in pieces: whole over TCP and TLS, and ended by an answer that comes too early."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from lab.certificates import make_certificate
from ttft_otel.model.stages import MONO
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import parse_instance_url
from ttft_otel.router.upstream.client_tls import ClientTls
from ttft_otel.router.upstream.connection_pool import ConnectionPool
from ttft_otel.router.upstream.instance_connection import PIECE_BYTES

BODY = (b"[", b"z" * (5 * PIECE_BYTES + 17), b"]")
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
REFUSED = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@contextlib.asynccontextmanager
async def run_pool(
    handler: Handler, certificate: tuple[Path, Path] | None = None, total_timeout_s: float = 0.0
) -> AsyncIterator[tuple[ConnectionPool, Callable[[], Attempt]]]:
    """A pool, and a function that makes attempts at a server that `handler` serves."""
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
    url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    instance = parse_instance_url(url, MONO)
    pool = ConnectionPool(1024, total_timeout_s, tls=tls)
    try:
        yield pool, lambda: Attempt(MONO, "/v1/x", instance, "0" * 16, 0)
    finally:
        await pool.close()
    server.close()
    # TLS says goodbye: a connection whose end nobody waits for is left open when the loop closes.
    if serving:
        await asyncio.wait(serving, timeout=10)


async def serve_bodies(
    received: list[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Note each body and answer it, until the connection ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            received.append(await reader.readexactly(length))
            writer.write(CHUNKED)
            await writer.drain()
    writer.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_whole(is_encrypted: bool, certificate: tuple[Path, Path]) -> None:
    """Small and large bodies, one after the other on one connection, arrive as they were."""
    received: list[bytes] = []
    bodies = ((b"a", b"bc"), BODY, (b"d",))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await serve_bodies(received, reader, writer)

    connections: list[asyncio.StreamWriter] = []

    async with run_pool(handle, certificate if is_encrypted else None) as (pool, attempt):
        for body in bodies:
            answer = await pool.send_request(attempt(), "/v1/x", {"x-own": "1"}, body)
            assert (answer.status, await answer.read()) == (200, b"hello")
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

    async with run_pool(refuse) as (pool, attempt):
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

    async with run_pool(read_late) as (pool, attempt):
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

    async with run_pool(read_head, total_timeout_s=0.3) as (pool, attempt):
        with pytest.raises(asyncio.TimeoutError):
            await pool.send_request(attempt(), "/v1/x", {}, (bytes(48 * PIECE_BYTES),))
        ended.set()
