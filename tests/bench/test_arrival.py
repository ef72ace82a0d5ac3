# SPDX-License-Identifier: Apache-2.0
"""A piece's time is when the kernel got it, however late this process reads it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns

import pytest

from ttft_otel.bench import arrival, wire
from ttft_otel.bench.arrival import STAMPS, TIMESPEC, Stamped, noting
from ttft_otel.bench.wire import Target, exchange

ASLEEP = 0.08
LEAST_NS = 60_000_000  # so much earlier than its reading a piece came that lay there for ASLEEP
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@contextmanager
def connected() -> Iterator[tuple[socket.socket, Stamped]]:
    """Two ends of a connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening, Stamped() as far:
        far.connect(listening.getsockname())
        near, _ = listening.accept()
        with near:
            yield near, far


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Stamped]]:
    """Two ends of a connection over the loopback."""
    with connected() as ends:
        yield ends


@pytest.fixture
def noted() -> Iterator[None]:
    """The kernel notes times; it begins a while after it was asked to."""
    with noting(), connected() as (near, far):
        far.stamp()
        for _ in range(100):
            near.sendall(b"x")
            time.sleep(0.02)
            far.recv(1)
            if far.came_ns < monotonic_ns() - 10_000_000:
                break
        yield


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("into", (False, True))
def test_late(pair: tuple[socket.socket, Stamped], into: bool) -> None:
    """Both ways of reading give the bytes, and the time of the last of them."""
    near, far = pair
    far.stamp()
    near.sendall(b"abc")
    sent = monotonic_ns()
    time.sleep(ASLEEP)
    room = bytearray(2)

    first = bytes(room[: far.recv_into(room)]) if into else far.recv(2)
    came, now = far.came_ns, monotonic_ns()
    rest = far.recv(9)

    assert (first, rest) == (b"ab", b"c")
    assert came < now - LEAST_NS and abs(came - sent) < ASLEEP * 1e9 / 2


def test_untold(pair: tuple[socket.socket, Stamped]) -> None:
    """Where the kernel notes no times, the read's own counts."""
    near, far = pair
    near.sendall(b"abc")
    time.sleep(ASLEEP)
    before = monotonic_ns()

    assert far.recv(9) == b"abc"
    assert before <= far.came_ns <= monotonic_ns()


@pytest.mark.parametrize("data", (TIMESPEC.pack(2**40, 0), b"", b"x" * 40))
def test_odd(data: bytes) -> None:
    """A time to come (the wall clock was set back) or what is no time is not believed."""
    before = monotonic_ns()

    assert before <= arrival.came([(socket.SOL_SOCKET, STAMPS, data)]) <= monotonic_ns()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for the loopback, and its key."""
    folder = tmp_path_factory.mktemp("secrets")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    words = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=server")
    names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    out = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run(("openssl", "req", *words, *names, *out), check=True, capture_output=True)
    return certificate, key


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("url", ("http://127.0.0.1", "http://localhost", "https://localhost"))
def test_stalled(url: str, secrets: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop that stands still while an answer comes does not make the answer later."""
    monkeypatch.setenv("SSL_CERT_FILE", str(secrets[0]))
    wire._tls.cache_clear()
    woken = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        time.sleep(ASLEEP)
        woken.append(monotonic_ns())
        await reader.read()  # the end of a connection would count as the last byte's
        writer.close()

    async def asked() -> wire.Reply:
        tls = None
        if url.startswith("https"):
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(*secrets)
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
        async with server:
            target = Target.of(f"{url}:{server.sockets[0].getsockname()[1]}")
            return await exchange(target, target.message("/", b"", {}), monotonic_ns(), 10.0)

    reply = asyncio.run(asked())
    wire._tls.cache_clear()

    assert (reply.error, reply.status, [piece for _, piece in reply.pieces]) == ("", 200, [b"ok"])
    assert reply.sent_ns <= reply.end_ns <= woken[0] - LEAST_NS


def test_nobody() -> None:
    """A port where nobody listens and a host that does not exist are failures, not exceptions."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for host in ("127.0.0.1", "localhost", "host.invalid"):
        target = Target.of(f"http://{host}:{port}")
        reply = asyncio.run(exchange(target, b"", monotonic_ns(), 10.0))
        assert reply.error.startswith("connection: "), reply
