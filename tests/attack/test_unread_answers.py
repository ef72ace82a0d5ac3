# SPDX-License-Identifier: Apache-2.0
"""Clients that ask and never read, and bodies that fill the container: the others are served."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from router import raw_http
from router.raw_http import RouterProcess

from ttft_otel.router.control.uvicorn_server import MemoryLimit

STREAM_BODY = b'{"model": "tiny", "stream": true, "messages": []}'
STALLED = 8
IN_FLIGHT = "ttft_otel_router_requests_in_flight"
REFUSALS = "ttft_otel_router_refusals_total"
LIMIT_BYTES = 256 << 20
BODY_BYTES = 60 << 20
GROUPS = Path("/sys/fs/cgroup/memory")  # of version 1, where tests can make some


@contextlib.asynccontextmanager
async def connect(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that reads nothing by itself but 64 KiB."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def wait_for(router: RouterProcess, name: str, value: float) -> None:
    """Wait until a metric has this value."""
    async with asyncio.timeout(20):
        while await router.read_metric(name) != [value]:
            await asyncio.sleep(0.1)


async def test_who_never_reads() -> None:
    """Their connections end after --send-timeout; one that reads slowly stays."""
    async with (
        raw_http.run_instance() as one,
        raw_http.run_router_process("--backend", one.url, "--send-timeout", "2") as router,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(connect(router.url)) for _ in range(STALLED + 1)]
        for _, writer in clients:
            writer.write(raw_http.encode_request("flood", STREAM_BODY))
        await wait_for(router, IN_FLIGHT, STALLED + 1)
        slow_reader, _ = clients[0]
        read_bytes = 0

        async def read_slowly() -> None:
            nonlocal read_bytes
            while data := await slow_reader.read(256 << 10):
                read_bytes += len(data)
                await asyncio.sleep(0.3)

        reading = asyncio.create_task(read_slowly())
        await wait_for(router, f'{REFUSALS}{{reason="send_timeout"}}', STALLED)
        await wait_for(router, IN_FLIGHT, 1)
        assert not reading.done() and read_bytes > 0
        reading.cancel()


@pytest.mark.parametrize("mood", ["stall", "slow"])
async def test_an_instance_that_falls_silent(mood: str) -> None:
    """Its stream is cut after --idle-timeout and counts against it; one that pauses shortly goes on."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(raw_http.encode_head(200, len(raw_http.MODELS_BODY)))
                    writer.write(raw_http.MODELS_BODY)
                    continue
                await reader.readexactly(len(STREAM_BODY))
                writer.write(raw_http.encode_head(200, None))
                for _ in range(6):
                    writer.write(raw_http.encode_chunk(raw_http.EVENT_BYTES))
                    await asyncio.sleep(0.6)
                if mood == "stall":
                    await reader.read()
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        flags = ("--backend", url, "--idle-timeout", "1")
        async with (
            raw_http.run_router_process(*flags) as router,
            connect(router.url) as (reader, writer),
        ):
            writer.write(raw_http.encode_request("ok", STREAM_BODY))
            text = b""
            while not text.endswith(b"0\r\n\r\n") and (
                part := await asyncio.wait_for(reader.read(4096), 20)
            ):
                text += part
            assert text.count(b"word") == 6
            assert text.endswith(b"0\r\n\r\n") == (mood == "slow")


@contextlib.contextmanager
def enter_small_group() -> Iterator[None]:
    """Processes that are started meanwhile have little memory."""
    group = GROUPS / f"ttft-otel-test-{os.getpid()}"
    own = next(
        line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if ":memory:" in line
    )
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (GROUPS / own.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))


def remove_groups() -> None:
    """Remove those without a process."""
    for group in GROUPS.glob("ttft-otel-test-*"):
        with contextlib.suppress(OSError):
            group.rmdir()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(
    not os.access(GROUPS, os.W_OK), reason="needs root and control groups of version 1"
)
async def test_memory_of_the_container() -> None:
    """Bodies that arrive slowly fill it: new requests are refused until they are gone, none is killed."""
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with raw_http.run_instance() as one, contextlib.AsyncExitStack() as stack:
        stack.callback(remove_groups)  # after the router has ended
        with enter_small_group():
            router = await stack.enter_async_context(
                raw_http.run_router_process("--backend", one.url)
            )
        request = raw_http.encode_request()
        async with contextlib.AsyncExitStack() as uploads:
            refused = f'{REFUSALS}{{reason="memory"}}'
            while not await router.read_metric(refused):
                _, writer = await uploads.enter_async_context(connect(router.url))
                writer.write(head + b"Content-Length: %d\r\n\r\n" % BODY_BYTES)
                for _ in range(48):
                    writer.write(b"x" * (1 << 20))
                    await asyncio.wait_for(writer.drain(), 20)
                await asyncio.sleep(1.2)
                status = raw_http.parse_status(await raw_http.send_bytes(router.url, request))
                assert status in (200, 503)
            assert status == 503
        async with asyncio.timeout(20):
            while status != 200:
                await asyncio.sleep(0.2)
                status = raw_http.parse_status(await raw_http.send_bytes(router.url, request))


@pytest.mark.parametrize(
    ("membership", "files", "share"),
    [
        ("0::/a/b", {"a/b/memory.max": "1000", "a/b/memory.current": "950"}, 0.9),
        ("0::/../x", {"memory.max": "1000", "memory.current": "950"}, 0.9),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": "950"}, 0),
        ("9:name=x:/\n4:memory:/a", {"memory/a/memory.limit_in_bytes": "1000"}, 0.75),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": str((1 << 63) - 4096)}, 0),
        ("0::/", {}, 0),
        ("nonsense::", {"memory.max": "x"}, 0),
    ],
)
def test_control_groups(
    membership: str, files: dict[str, str], share: float, tmp_path: Path
) -> None:
    """Both versions are read, and what can be dropped does not count."""
    more = {
        "memory/a/memory.usage_in_bytes": "800",
        "memory/a/memory.stat": "total_inactive_file 50",
    }
    stats = {"a/b/memory.stat": "anon 1\ninactive_file 50\n", "memory.stat": "inactive_file 50"}
    for name, text in {**more, **stats, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    named = tmp_path / "membership"
    named.write_text(f"{membership}\n")
    assert MemoryLimit(tmp_path, named).measure_share() == share
