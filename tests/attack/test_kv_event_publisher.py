# SPDX-License-Identifier: Apache-2.0
"""An instance that publishes KV events to harm the router: nothing of it reaches other instances' blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from aiohttp import web
from router.routing.prefixes.test_kv_subscription import (
    BLOCK_TOKENS,
    PROMPT_IDS,
    build_fleet,
    count_indexed_blocks,
    run_source,
    wait_until,
)

from attack.watched_process import LoopStallWatch
from lab.fake_vllm.kv_publisher import FakePublisher, run_publisher
from lab.fake_vllm.prefix_cache import FakeEngine, build_stored_event, encode_batch
from ttft_otel.router.routing.prefixes import kv_events_source
from ttft_otel.router.routing.prefixes.kv_events import MAX_EVENT_TOKENS, ReportedIndex
from ttft_otel.router.routing.prefixes.kv_events_source import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED_MESSAGES,
    KvEventsSource,
)
from ttft_otel.router.routing.prefixes.prefix_source import PrefixSource

# Seconds that no turn may exceed: 50 ms are required, on a core of an idle machine; these are slower.
MAX_TURN_S = 0.15


@asynccontextmanager
async def watch_loop() -> AsyncIterator[None]:
    """Watch the running loop, and fail at the end if a turn was too long."""
    watch = LoopStallWatch(time.thread_time)
    task = asyncio.create_task(watch.watch_turns())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert watch.longest_s < MAX_TURN_S


@dataclass
class HostilePublisher(FakePublisher):
    """Publishes what it is told to; its replay sends `replay_frames` again and again."""

    replay_frames: list[tuple[bytes, bytes]] = field(default_factory=list)
    sources: bytes | None = None

    async def send_payload(self, number: int, payload: bytes) -> None:
        """Publish one message with any number and any content."""
        await self.send_frames(b"kv", number.to_bytes(8, "big"), payload)

    async def send_frames(self, *frames: bytes) -> None:
        """Publish any frames, in pieces, because this loop's turns are measured."""
        for position, frame in enumerate(frames, 1):
            await self._sockets[0].send(frame, zmq.SNDMORE if position < len(frames) else 0)
            if position % 100 == 0:
                await asyncio.sleep(0)

    async def answer_sources(self, request: web.Request) -> web.Response:
        """Answer /kv_event_sources with anything."""
        if self.sources is None:
            return await super().answer_sources(request)
        return web.Response(body=self.sources, content_type="application/json")

    async def _serve_replays(self) -> None:
        if not self.replay_frames:
            await super()._serve_replays()
        socket = self._sockets[1]
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        while True:
            client, _, start = await socket.recv_multipart()
            number = int.from_bytes(start, "big")
            try:
                while True:  # until the client has gone
                    for topic, payload in self.replay_frames:
                        frames = (client, b"", topic, number.to_bytes(8, "big"), payload)
                        await socket.send_multipart(frames)
                        number += 1
            except zmq.ZMQError:
                continue


@dataclass
class Fleet:
    """A source that follows an honest and a hostile instance."""

    source: PrefixSource
    honest: FakePublisher
    hostile: HostilePublisher
    honest_url: str
    hostile_url: str

    def get_counts(self) -> dict[str, int]:
        """What the router counts of the hostile instance."""
        counts: dict[str, int] = self.source.describe_instances()[self.hostile_url].get(
            "counts", {}
        )
        return counts

    async def wait_for_count(self, name: str, least: int = 1) -> None:
        """Wait until this was counted so often."""
        await wait_until(lambda: self.get_counts().get(name, 0) >= least)

    async def check_honest(self) -> None:
        """The honest instance's blocks are known, also those that it stores from now on."""
        assert count_indexed_blocks(self.source, self.honest_url, PROMPT_IDS) == 5
        ids = [*range(7000, 7000 + 2 * BLOCK_TOKENS)]
        self.honest.engine.compute_prompt(ids)
        await self.honest.publish_events()
        await wait_until(lambda: count_indexed_blocks(self.source, self.honest_url, ids) == 2)


@asynccontextmanager
async def run_fleet(tmp_path: Path, max_reported: int = 0, **options: Any) -> AsyncIterator[Fleet]:
    """Both instances, and a source that knows the honest one's prompt; its loop is watched.

    max_reported: limit of the index, 0 for its own. options: of the hostile publisher.
    """
    for name in ("honest", "hostile"):
        (tmp_path / name).mkdir()
    honest = FakePublisher(tmp_path / "honest", FakeEngine(BLOCK_TOKENS))
    hostile = HostilePublisher(tmp_path / "hostile", FakeEngine(BLOCK_TOKENS), **options)
    source = KvEventsSource()
    assert isinstance(source.index, ReportedIndex)
    source.index.max_reported = max_reported or source.index.max_reported
    async with run_publisher(honest) as good, run_publisher(hostile) as bad:
        honest.engine.compute_prompt(PROMPT_IDS)
        await honest.publish_events()
        async with run_source(build_fleet(good, bad), source), watch_loop():
            fleet = Fleet(source, honest, hostile, good, bad)
            await wait_until(lambda: count_indexed_blocks(source, good, PROMPT_IDS) == 5)
            if not hostile.sources:
                await hostile.wait_for_subscriber()
                await wait_until(lambda: source.describe_instances()[bad].get("connected", False))
            yield fleet


def encode_array(count: int, element: bytes) -> bytes:
    """A msgpack array of equal elements."""
    return b"\xdd" + count.to_bytes(4, "big") + element * count


def encode_event(**fields: Any) -> bytes:
    """A message with one BlockStored event, whose fields are as given."""
    return encode_batch(build_stored_event([1], [1] * BLOCK_TOKENS) | fields)


CLEARS = [{"type": "AllBlocksCleared"}, build_stored_event([1], [1] * BLOCK_TOKENS)]
MALFORMED = (
    b"\xc1" * 1000,
    msgspec.msgpack.encode([0.0]),
    b"\x93\xc0" + encode_array(MAX_MESSAGE_BYTES - 100, b"\x90") + b"\x00",
    b"\x93\xc0" + b"\x91" * 4_000_000 + b"\x00\x00",
    b"\x93\xc0\x91" + encode_array(8_000_000, b"\x90") + b"\x00",
    b"\x93\xc0\x91" + b"\x81\xa1a" * 1_000_000 + b"\x00\x00",
    encode_event(token_ids=[1] * (MAX_EVENT_TOKENS + 1)),
    encode_event(block_hashes=[1] * 1_000_000),
    encode_event(token_ids=[-1] * BLOCK_TOKENS),
    encode_event(token_ids=[1 << 63] * BLOCK_TOKENS),
    encode_event(token_ids="1234"),
    encode_event(block_hashes=[0.5]),
    encode_event(medium=["GPU"]),
    encode_event(group_idx={}),
    encode_event(kv_cache_spec_kind=[]),
    encode_event(block_size="4"),
    encode_event(extra_keys=[[[[]] * 1000] * 1000]),
)


async def test_malformed(tmp_path: Path) -> None:
    """Messages of another form are counted; later ones are applied, and the event loop stays free."""
    async with run_fleet(tmp_path) as fleet:
        for number, payload in enumerate(MALFORMED):
            await fleet.hostile.send_payload(number, payload)
            await fleet.wait_for_count("malformed", least=number + 1)
        # A message of very many frames is one malformed message, too.
        await fleet.hostile.send_frames(b"kv", *[b""] * 20_000)
        await fleet.wait_for_count("malformed", least=len(MALFORMED) + 1)
        await fleet.hostile.send_payload(len(MALFORMED), encode_event())
        await fleet.wait_for_count("stored")
        await fleet.check_honest()


async def test_many_events(tmp_path: Path) -> None:
    """Events that store nothing, or only clear the cache, are applied without holding up the event loop."""
    async with run_fleet(tmp_path) as fleet:
        orphan = build_stored_event([2], [1] * BLOCK_TOKENS, parent_block_hash=99)
        for number, events in enumerate(([orphan] * 40_000, CLEARS * 5_000)):
            await fleet.hostile.send_payload(number, encode_batch(*events))
        await wait_until(lambda: fleet.get_counts().get("cleared", 0) == 5_000)
        assert fleet.get_counts()["orphans"] == 40_000
        await fleet.check_honest()


async def test_giant_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message beyond the bound ends the connection, in ZMQ for good; the feed makes another one."""
    monkeypatch.setattr(kv_events_source, "REFRESH_INTERVAL_S", 0.1)
    monkeypatch.setattr(kv_events_source, "MAX_SILENCE_S", 1.0)

    assert MAX_QUEUED_MESSAGES * MAX_MESSAGE_BYTES <= 256 << 20
    async with run_fleet(tmp_path) as fleet:
        await fleet.hostile.send_payload(0, b"x" * (MAX_MESSAGE_BYTES + 1))
        await fleet.wait_for_count("disconnects")
        await wait_until(lambda: len(fleet.hostile.replay_starts) > 1)  # connected again
        fleet.hostile.engine.compute_prompt(PROMPT_IDS)
        await fleet.hostile.publish_events()
        await fleet.wait_for_count("stored")
        await fleet.check_honest()


async def test_jumps(tmp_path: Path) -> None:
    """Message numbers that jump forward and back cost replays and blocks of this instance alone."""
    async with run_fleet(tmp_path) as fleet:
        last = (1 << 64) - 1
        for number in (5, last, 0, last, 7, 7, 6, 1 << 63, 3):
            await fleet.hostile.send_payload(number, encode_event())
        await wait_until(lambda: fleet.get_counts().get("messages", 0) >= 3)
        await fleet.wait_for_count("gaps")
        await fleet.check_honest()


async def test_endless_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that never ends is given up and counted; messages published afterwards are applied."""
    monkeypatch.setattr(kv_events_source, "MAX_REPLAYED_MESSAGES", 2_000)

    async with run_fleet(tmp_path, replay_frames=[(b"kv", encode_event())]) as fleet:
        await fleet.wait_for_count("lost")
        await fleet.check_honest()


async def test_blocks_without_end(tmp_path: Path) -> None:
    """One instance cannot fill the index: another instance's share stays free."""
    async with run_fleet(tmp_path, max_reported=1_000) as fleet:
        hashes = range(10_000)
        event = build_stored_event(hashes, [each for each in hashes for _ in range(4)])
        await fleet.hostile.send_payload(0, encode_batch(event))
        await fleet.wait_for_count("dropped")
        await fleet.check_honest()
        stored = fleet.source.describe_instances()[fleet.hostile_url]["blocks"]
        assert 250 <= stored <= 500


SOURCES = (
    b"[" * 60_000,
    b'{"0": "' + b"x" * 10_000_000 + b'"}',
    msgspec.json.encode(
        {str(rank): {"publisher": "zmq", "endpoint": "tcp://*:1"} for rank in range(1_000)}
    ),
    b'{"' + b"9" * 10_000 + b'": {}}',
    b'{"0": {"publisher": "zmq", "endpoint": "tcp://a b:1"}}',
    b'{"0": {"publisher": "zmq", "endpoint": "ipc:///' + b"x" * 5_000 + b'"}}',
)


async def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an instance claims as its event endpoint, it is asked again, and followed once that works."""
    monkeypatch.setattr(kv_events_source, "REFRESH_INTERVAL_S", 0.05)

    async with run_fleet(tmp_path, sources=SOURCES[0]) as fleet:
        for fleet.hostile.sources in SOURCES:
            await asyncio.sleep(0.2)
        await fleet.check_honest()
        fleet.hostile.sources = None
        fleet.hostile.engine.compute_prompt(PROMPT_IDS)
        await fleet.hostile.publish_events()
        await wait_until(
            lambda: count_indexed_blocks(fleet.source, fleet.hostile_url, PROMPT_IDS) == 5
        )
