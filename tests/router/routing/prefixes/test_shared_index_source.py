# SPDX-License-Identifier: Apache-2.0
"""A worker and the service of its index over a real socket, also one that is silent, confused or gone."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.fake_vllm.kv_publisher import FakePublisher, run_publisher
from lab.fake_vllm.prefix_cache import FakeEngine
from router.fake_instances import wait_until
from router.routing.prefixes.test_kv_subscription import build_fleet
from ttft_otel.router.routing.policies.block_keys import compute_block_keys
from ttft_otel.router.routing.prefixes import shared_index_source
from ttft_otel.router.routing.prefixes.kv_events_source import KvEventsSource
from ttft_otel.router.routing.prefixes.shared_index_source import (
    FrameSplitter,
    IndexChannel,
    SharedIndexSource,
)
from ttft_otel.router.routing.prompts.prompt_reader import Prompt
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.query_client import QueryClient
from ttft_otel.router.workers.index_service import IndexService

BLOCK_TOKENS = 4
IDS = [*range(5 * BLOCK_TOKENS)]
KEYS = compute_block_keys(IDS, BLOCK_TOKENS)


@pytest.fixture
def path() -> Iterator[Path]:
    """Where the service listens; pytest's folders would make the path too long for a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder) / "index.sock"


@asynccontextmanager
async def run_service(path: Path) -> AsyncIterator[IndexService]:
    """A real service, until the block ends: then its lifeline does."""
    read_fd, write_fd = os.pipe()
    service = IndexService(KvEventsSource(BLOCK_TOKENS, 1000, ()), path)
    task = asyncio.create_task(service.run(read_fd))
    try:
        yield service
    finally:
        os.close(write_fd)
        await task
        os.close(read_fd)


@asynccontextmanager
async def run_source(path: Path, *urls: str) -> AsyncIterator[SharedIndexSource]:
    """A worker's source that asks the service at `path`."""
    source = SharedIndexSource(BLOCK_TOKENS, 1000)
    async with QueryClient() as queries:
        await source.start(queries, build_fleet(*urls))
        source.join_owner(path)
        try:
            yield source
        finally:
            await source.close()


@asynccontextmanager
async def run_fake_service(
    path: Path, answer: Callable[[bytes], bytes]
) -> AsyncIterator[list[Any]]:
    """A listener that answers whatever it gets by `answer`; "" closes the connection. Yields its writers."""
    writers: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while data := await reader.read(1 << 16):
            reply = answer(data)
            if reply == b"":
                break
            writer.write(reply.removesuffix(b"-"))
        writer.close()

    server = await asyncio.start_unix_server(serve, str(path))
    try:
        yield writers
    finally:
        server.close()
        # A connection that was just accepted gets its writer some turns of the loop later.
        for _ in range(5):
            await asyncio.sleep(0.005)
            for writer in writers:
                writer.close()


@asynccontextmanager
async def run_channel(path: Path) -> AsyncIterator[IndexChannel]:
    """A connected channel without a source."""
    channel = IndexChannel(path, lambda: ["http://127.0.0.1:1"], lambda _: None)
    await wait_until(lambda: channel.is_connected)
    try:
        yield channel
    finally:
        await channel.close()


async def look_up_patiently(source: SharedIndexSource, urls: list[str]) -> dict[str, int]:
    """An answer; a machine that is busy may make some late."""
    while (found := await source.look_up("m", Prompt(len(IDS), IDS, KEYS), urls)) is None:
        await asyncio.sleep(0.05)
    return found


async def test_reported_and_estimated(tmp_path: Path, path: Path) -> None:
    """What an instance reports counts, whatever it was sent; of one that is silent, what it was sent."""
    silent = "http://127.0.0.1:1"
    publisher = FakePublisher(tmp_path, FakeEngine(BLOCK_TOKENS))
    async with (
        run_publisher(publisher) as url,
        run_service(path) as service,
        run_source(path, url, silent) as source,
    ):
        await publisher.wait_for_subscriber()
        await wait_until(lambda: url in service.source.reported.reporting)
        publisher.engine.compute_prompt(IDS[: 3 * BLOCK_TOKENS])
        await publisher.publish_events()
        await wait_until(lambda: len(service.source.reported) == 3)
        source.index.record_served(silent, KEYS[:2])
        source.index.record_served(url, KEYS)

        found = await look_up_patiently(source, [url, silent])
        assert found == {url: 3 * BLOCK_TOKENS, silent: 2 * BLOCK_TOKENS}
        await wait_until(lambda: source.describe_instances()[url]["source"] == "kv-events")
        assert source.describe_instances()[url]["blocks"] == 3
        assert source.describe_instances()[silent] == {"source": "history", "blocks": 2}
        assert source.describe_problem() == ""

        # An instance that this worker has not any more is followed by nobody.
        source._pool.replace_instances({"mono": []})
        source.sync_instances()
        await wait_until(lambda: not len(service.pool))
        assert not service.source.reported.reporting


async def test_instances_of_all_workers(path: Path) -> None:
    """The service follows what any worker has, and goes on with the last one's when that is replaced."""
    one, other = "http://127.0.0.1:1", "http://127.0.0.1:2"
    async with run_service(path) as service:
        async with run_source(path, one):
            async with run_source(path, one, other):
                await wait_until(lambda: {each.url for each in service.pool} == {one, other})
            await wait_until(lambda: {each.url for each in service.pool} == {one})
        await wait_until(lambda: not service.urls_by_worker)
        assert {each.url for each in service.pool} == {one}


async def test_a_keeper_that_cannot_follow(path: Path) -> None:
    """It ends with the error, so that the supervisor says so and starts another one."""

    class FailingSource(KvEventsSource):
        async def start(self, queries: QueryClient, pool: InstancePool) -> None:
            raise OSError("no sockets left")

    read_fd, write_fd = os.pipe()
    service = IndexService(FailingSource(BLOCK_TOKENS, 1000, ()), path)
    task = asyncio.create_task(service.run(read_fd))
    async with run_source(path, "http://127.0.0.1:1"):
        with pytest.raises(OSError, match="no sockets left"):
            await task
    os.close(read_fd)
    os.close(write_fd)


async def test_without_a_service(path: Path) -> None:
    """The estimate decides at once, and it is said; a service that comes later is found."""
    url = "http://127.0.0.1:1"
    async with run_source(path, url) as source:
        assert await source.look_up("m", Prompt(len(IDS), IDS, KEYS), [url]) is None
        assert source.channel is not None and source.channel.counts["away"] == 1
        assert "is away" in source.describe_problem()
        async with run_service(path):
            assert await look_up_patiently(source, [url]) == {url: 0}
            await source.close()


async def test_a_silent_service(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request waits for a bounded time; after some in a row nobody asks for a while."""
    monkeypatch.setattr(shared_index_source, "LATE_PAUSE_S", 3600.0)

    async with run_fake_service(path, lambda _: b"-"), run_channel(path) as channel:
        for _ in range(10):
            assert await channel.look_up(KEYS) is None
        assert channel.counts["late"] == shared_index_source.MAX_LATE
        assert channel.counts["skipped"] == 10 - shared_index_source.MAX_LATE


async def test_too_many_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of lookups that wait, requests are decided without one."""
    monkeypatch.setattr(shared_index_source, "DEADLINE_S", 3600.0)

    async with run_fake_service(path, lambda _: b"-") as writers, run_channel(path) as channel:
        asking = [asyncio.create_task(channel.look_up(KEYS)) for _ in range(100)]
        await wait_until(lambda: channel.counts["skipped"] == 100 - shared_index_source.MAX_LOOKUPS)
        # With the connection end all that wait for it, long before their time is over.
        writers[0].close()
        assert await asyncio.gather(*asking) == [None] * 100
        assert channel.counts["away"] == shared_index_source.MAX_LOOKUPS


@pytest.mark.parametrize("reply", [b"", b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\3\x92\xa1d"])
async def test_a_confused_service(path: Path, reply: bytes) -> None:
    """A connection on which something else comes is given up, and made anew."""
    async with run_fake_service(path, lambda _: reply) as writers:
        channel = IndexChannel(path, lambda: [], lambda _: None)
        await wait_until(lambda: len(writers) >= 3)
        await channel.close()


async def test_a_confused_worker(path: Path) -> None:
    """The service hangs up on who sends something else, and goes on with the others."""
    url = "http://127.0.0.1:1"
    async with run_service(path), run_source(path, url) as source:
        assert await look_up_patiently(source, [url]) == {url: 0}
        for garbage in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\7\x93\xa1l\1\xc4\1x"):
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(garbage)
            assert await reader.read() == b""
            writer.close()
        assert await look_up_patiently(source, [url]) == {url: 0}
        await source.close()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 1000])
def test_frames_in_pieces(size: int) -> None:
    """Messages are whole, however they arrive."""
    messages = [shared_index_source.Depths(number, {"u": number}) for number in range(5)]
    data = b"".join(map(shared_index_source.frame_message, messages))
    splitter, found = FrameSplitter(), []
    for begin in range(0, len(data), size):
        found += splitter.split_frames(data[begin : begin + size])

    assert [shared_index_source.owner_decoder.decode(each) for each in found] == messages


def test_a_very_long_prompt() -> None:
    """Of more blocks than a message may have, the first are asked for: prefixes match from the beginning."""
    keys = tuple(range(1, shared_index_source.MAX_ASKED_BLOCKS + 10))

    asked = shared_index_source.unpack_keys(shared_index_source.pack_keys(keys))

    assert tuple(asked) == keys[: shared_index_source.MAX_ASKED_BLOCKS]
    frame = shared_index_source.frame_message(
        shared_index_source.Lookup(1, shared_index_source.pack_keys(keys))
    )
    assert len(frame) < shared_index_source.MAX_FRAME_BYTES
