# SPDX-License-Identifier: Apache-2.0
"""A piece's time is when the kernel got it, however late this process reads it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from time import monotonic_ns

import pytest

from lab.certificates import make_certificate
from ttft_otel.bench import http_exchange
from ttft_otel.bench.http_exchange import (
    SO_TIMESTAMPNS,
    TIMESPEC,
    BenchTarget,
    TimestampedSocket,
    keep_timestamps_enabled,
    perform_exchange,
)

SLEEP_S = 0.08
MIN_LEAD_NS = 60_000_000  # so much earlier than its reading a piece came that lay there for SLEEP_S
RESPONSE_BYTES = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture
def timestamps_enabled() -> Iterator[None]:
    """The kernel notes times; it begins a while after it was asked to."""
    with (
        keep_timestamps_enabled(),
        socket.create_server(("127.0.0.1", 0)) as listening,
        TimestampedSocket() as far,
    ):
        far.connect(listening.getsockname())
        near, _ = listening.accept()
        far.enable_timestamps()
        for _ in range(100):
            near.sendall(b"x")
            time.sleep(0.02)
            far.recv(1)
            if far.last_byte_ns < monotonic_ns() - 10_000_000:
                break
        near.close()
        yield


@pytest.mark.parametrize("data", (TIMESPEC.pack(2**40, 0), b"", b"x" * 40))
def test_odd(data: bytes) -> None:
    """A timestamp in the future (the wall clock was set back), or none, is not used."""
    before = monotonic_ns()

    assert (
        before
        <= http_exchange.read_arrival_ns([(socket.SOL_SOCKET, SO_TIMESTAMPNS, data)])
        <= monotonic_ns()
    )


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for the loopback, and its key."""
    return make_certificate(tmp_path_factory.mktemp("secrets"), "DNS:localhost,IP:127.0.0.1")


@pytest.mark.usefixtures("timestamps_enabled")
@pytest.mark.parametrize("url", ("http://127.0.0.1", "http://localhost", "https://localhost"))
def test_stalled(url: str, tls_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop that stands still while an answer comes does not make the answer later."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tls_files[0]))
    http_exchange._create_tls_context.cache_clear()
    woken = []

    async def send_late_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(RESPONSE_BYTES)
        time.sleep(SLEEP_S)
        woken.append(monotonic_ns())
        await reader.read()  # the end of a connection would count as the last byte's
        writer.close()

    async def request_answer() -> http_exchange.RawResponse:
        tls = None
        if url.startswith("https"):
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(*tls_files)
        server = await asyncio.start_server(send_late_answer, "127.0.0.1", 0, ssl=tls)
        async with server:
            target = BenchTarget.parse_url(f"{url}:{server.sockets[0].getsockname()[1]}")
            return await perform_exchange(
                target, target.encode_request("/", b"", {}), monotonic_ns(), 10.0
            )

    reply = asyncio.run(request_answer())
    http_exchange._create_tls_context.cache_clear()

    assert (reply.error, reply.status, [piece for _, piece in reply.pieces]) == ("", 200, [b"ok"])
    assert reply.sent_ns <= reply.end_ns <= woken[0] - MIN_LEAD_NS


def test_nobody() -> None:
    """A closed port and an unknown host are counted failures, not exceptions."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for host in ("127.0.0.1", "localhost", "host.invalid"):
        target = BenchTarget.parse_url(f"http://{host}:{port}")
        reply = asyncio.run(perform_exchange(target, b"", monotonic_ns(), 10.0))
        assert reply.error.startswith("connection: "), reply
