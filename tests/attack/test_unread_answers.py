# SPDX-License-Identifier: Apache-2.0
"""Clients that ask and never read, and bodies that fill the container: the others are served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from router import fake_instances, raw_http
from router.fake_instances import InstancePlan, wait_until

from ttft_otel.router.control.uvicorn_server import DrainingServer, MemoryLimit, ServerPlan
from ttft_otel.router.limits import RouterLimits

STREAM_BODY = b'{"model": "tiny", "stream": true, "messages": []}'
STALLED = 8


@contextlib.asynccontextmanager
async def connect(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that reads nothing by itself but 64 KiB."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_who_never_reads() -> None:
    """Their connections end after --send-timeout; one that reads slowly stays."""
    limits = RouterLimits(send_timeout=1.0)
    async with (
        raw_http.run_instance() as one,
        fake_instances.run_router([one.url], limits=limits) as router,
        contextlib.AsyncExitStack() as stack,
    ):
        admission = router.app.admission
        clients = [await stack.enter_async_context(connect(router.url)) for _ in range(STALLED + 1)]
        for _, writer in clients:
            writer.write(raw_http.encode_request("flood", STREAM_BODY))
        await wait_until(lambda: admission.requests_under_way == STALLED + 1)
        slow_reader, _ = clients[0]
        read_bytes = 0

        async def read_slowly() -> None:
            nonlocal read_bytes
            while data := await slow_reader.read(256 << 10):
                read_bytes += len(data)
                await asyncio.sleep(0.2)

        reading = asyncio.create_task(read_slowly())
        await wait_until(lambda: admission.refusal_counts["send_timeout"] == STALLED)
        await wait_until(lambda: admission.requests_under_way == 1)
        assert not reading.done() and read_bytes > 0
        reading.cancel()
        slow_reader._transport.abort()


@pytest.mark.parametrize("permits", [asyncio.Semaphore(1), None], ids=["stall", "slow"])
async def test_an_instance_that_falls_silent(permits: asyncio.Semaphore | None) -> None:
    """Its stream is cut after --idle-timeout; one that pauses shortly goes on, however long it takes."""
    plan, limits = InstancePlan({}, gap_s=0.4, permits=permits), RouterLimits(idle_timeout=0.6)
    async with fake_instances.run_routed_instances([plan], limits=limits) as (router, _):
        answer = asyncio.wait_for(router.post_chat(), 20)
        if permits is None:
            assert (await answer)[2] == b"".join(fake_instances.STREAM_EVENTS)
        else:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer


async def test_memory_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is nearly used up, new requests are refused until some is free; one alone is served."""
    shares = iter((0.5, 0.91, 0.87, 0.84))
    monkeypatch.setattr(MemoryLimit, "measure_share", lambda _: next(shares))
    held = InstancePlan({"prefill.compute": 20_000})
    async with fake_instances.run_routed_instances([held]) as (router, one):
        plan = ServerPlan("127.0.0.1", 0, 0.0, 0.0, lambda: None)
        server = DrainingServer(router.app, plan)
        server.config.load()
        server._memory.max_bytes = 1 << 30
        admission = router.app.admission
        waiting = asyncio.create_task(router.post_chat())
        await wait_until(lambda: one.received)
        one.plan = InstancePlan({})
        statuses = []
        for _ in range(4):
            await server.on_tick(0)
            statuses.append((await router.post_chat())[0])
        assert statuses == [200, 503, 503, 200]
        assert admission.refusal_counts == {"memory": 2}
        waiting.cancel()
        await wait_until(lambda: not admission.requests_under_way)
        admission.is_memory_short = True
        assert (await router.post_chat())[0] == 200


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
