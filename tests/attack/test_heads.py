# SPDX-License-Identifier: Apache-2.0
"""Heads without end at every HTTP port of ours, and at gRPC's: refused early, while others are served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from router import fake_instances, raw_http
from router.control.test_admin import open_admin
from router.fake_instances import InstancePlan, find_unused_url

from attack.serve_thread import run_serve
from ttft_otel.report.receive.receiver import OTLP_TRACE_SERVICE

PORTS = ("router", "serve", "admin")
ENOUGH_BYTES = 2 << 20  # of an attack in these tests
PATHS = {"router": "/healthz", "serve": "/healthz", "admin": "/instances"}
START = "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
# What begins, what follows without end, and the statuses that refuse it; "" where no answer is due.
ATTACKS = {
    "headers": (START, b"a: b\r\n" * 1000, {431, 400}),
    "many headers": (START, b"".join(b"x%d: b\r\n" % number for number in range(1000)), {431, 400}),
    "a header": (START + "x-a: ", b"a" * 4096, {431, 400}),
    "a name": (START, b"a" * 4096, {431, 400}),
    "a target": ("GET /", b"a" * 4096, {414, 400}),
    "trailers": (CHUNKED, b"a: b\r\n" * 1000, {431, 400, 404, 405, 415}),
    "a trailer": (CHUNKED + "x-a: ", b"a" * 4096, {431, 400, 404, 405, 415}),
}


@contextlib.asynccontextmanager
async def open_port(port: str, path: Path) -> AsyncIterator[str]:
    """The URL of this HTTP port of ours."""
    if port == "serve":
        with run_serve(path) as server:
            yield f"http://127.0.0.1:{server.http_port}"
        return
    async with (
        fake_instances.run_instance(InstancePlan({})) as one,
        fake_instances.run_router([one.url]) as router,
    ):
        if port == "router":
            yield router.url
            return
        async with open_admin(router) as admin:
            yield admin.url.rpartition("/")[0]


async def attack(url: str, start: bytes, part: bytes) -> tuple[int, int]:
    """Send `start` and then parts; the status of the answer (0: closed without one) and how much was sent."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sent_bytes = 0
    answering = asyncio.ensure_future(reader.read(65_536))
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(start)
            while sent_bytes < ENOUGH_BYTES and not answering.done():
                writer.write(part)
                await writer.drain()
                sent_bytes += len(part)
                await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            return raw_http.parse_status(await asyncio.wait_for(answering, 5)), sent_bytes
        return 0, sent_bytes
    finally:
        answering.cancel()
        writer.transport.abort()


@pytest.mark.parametrize("port", PORTS)
async def test_heads_without_end_are_refused(port: str, tmp_path: Path) -> None:
    """Each of the attacks gets its refusal at once, though its head never ends; then the port serves on."""
    async with open_port(port, tmp_path) as url:
        for name, (start, part, expected) in ATTACKS.items():
            path = "/v1/traces" if "trailer" in name else PATHS[port]
            status, _ = await attack(url, start.format(path=path).encode(), part)
            assert status in expected | {0}, (name, status)
            # Without an answer only where one to the request itself was due, or nothing could be read.
            assert status or "trailer" in name or port == "admin", name
        ask = START.format(path=PATHS[port]).encode() + b"\r\n"
        assert raw_http.parse_status(await raw_http.send_bytes(url, ask)) == 200


@pytest.mark.parametrize("port", PORTS)
async def test_long_heads_are_served(port: str, tmp_path: Path) -> None:
    """The control: heads below the bounds are answered as short ones are."""
    many = "".join(f"x-{number}: b\r\n" for number in range(100))
    long = f"x-a: {'a' * 8000}\r\n"
    async with open_port(port, tmp_path) as url:
        for more in (many, long, "Connection: upgrade\r\nUpgrade: websocket\r\n"):
            ask = f"{START.format(path=PATHS[port])}{more}\r\n".encode()
            assert raw_http.parse_status(await raw_http.send_bytes(url, ask)) == 200, more[:20]


async def test_metadata_is_bounded(tmp_path: Path) -> None:
    """A gRPC call with 64 KB of metadata is refused; one with 4 KB is judged by its message."""
    port = int(find_unused_url().rpartition(":")[2])
    statuses = []
    with run_serve(tmp_path, port):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        call = channel.unary_unary(f"/{OTLP_TRACE_SERVICE}/Export")
        for number in (4, 64):
            metadata = grpc.aio.Metadata(*((f"x-{at}", "a" * 1000) for at in range(number)))
            try:
                await call(b"", metadata=metadata, timeout=20)
            except grpc.aio.AioRpcError as error:
                statuses.append(error.code())
            else:
                statuses.append(grpc.StatusCode.OK)
        await channel.close()
    assert statuses == [grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED]


@pytest.mark.full
@pytest.mark.parametrize("part", [b"a: b\r\n" * 10_000, b"a" * 60_000])
async def test_memory_and_time(part: bytes, tmp_path: Path) -> None:
    """40 MB of a head cost `serve` no memory, and others no time."""
    url = find_unused_url()
    flags = (
        "--http-port",
        url.rpartition(":")[2],
        "--grpc-port",
        "-1",
        "--db",
        str(tmp_path / "s.db"),
    )
    code = "from ttft_otel.commands.main import main; main()"
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "serve", *flags), env={**os.environ, "TTFT_OTEL": "0"}
    )
    ask = START.format(path="/healthz").encode() + b"\r\n"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                if raw_http.parse_status(await raw_http.send_bytes(url, ask)) == 200:
                    break
            await asyncio.sleep(0.05)
        before_bytes = read_memory(child.pid)
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        longest_s = 0.0
        with contextlib.suppress(ConnectionError):
            writer.write(START.format(path="/").encode() + b"a: ")
            for _ in range(0, 40 << 20, len(part)):
                writer.write(part)
                await writer.drain()
        start_s = time.monotonic()
        assert raw_http.parse_status(await raw_http.send_bytes(url, ask)) == 200
        longest_s = time.monotonic() - start_s
        grown_bytes = read_memory(child.pid) - before_bytes
        writer.transport.abort()
        assert grown_bytes < 20 << 20
        assert longest_s < 1
    finally:
        child.kill()
        await child.wait()


def read_memory(pid: int) -> int:
    """Private memory of a process in bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kilo) << 10 for kilo in re.findall(r"Private_\w+: +(\d+) kB", text))
