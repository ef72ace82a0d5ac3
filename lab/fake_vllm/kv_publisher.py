# SPDX-License-Identifier: Apache-2.0
"""An instance that publishes KV events over ZMQ as vLLM does, for the tests of routing/prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import web

from lab.fake_vllm.instances import run_web_app
from lab.fake_vllm.prefix_cache import FakeEngine

END_NUMBER = (-1).to_bytes(8, "big", signed=True)


@dataclass
class FakePublisher:
    """A PUB and a ROUTER socket. The former is an XPUB, which reports its subscribers.

    omits_topic: send replays without topic. skipped_number: the message that one replay lacks.
    """

    folder: Path
    engine: FakeEngine = field(default_factory=FakeEngine)
    omits_topic: bool = False
    skipped_number: int | None = None
    replay_starts: list[int] = field(default_factory=list)
    status: int = 200
    _sockets: list[Any] = field(default_factory=list)
    _replay_task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        # Addresses of the PUB socket and of the one for replays.
        self.events_endpoint = f"ipc://{self.folder}/events"
        self.replay_endpoint = f"ipc://{self.folder}/replay"

    def bind_sockets(self, context: zmq.asyncio.Context) -> None:
        """Bind both sockets and serve replays."""
        for kind, address in ((zmq.XPUB, self.events_endpoint), (zmq.ROUTER, self.replay_endpoint)):
            socket = context.socket(kind)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            self._sockets.append(socket)
        self._replay_task = asyncio.create_task(self._serve_replays())

    async def wait_for_subscriber(self) -> None:
        """Wait for a subscription, which comes after the connection: what is sent before it is lost."""
        while not (await self._sockets[0].recv()).startswith(b"\x01"):
            pass

    async def close(self) -> None:
        """Close the sockets, like a killed process."""
        if self._replay_task is not None:
            self._replay_task.cancel()
            await asyncio.gather(self._replay_task, return_exceptions=True)
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets.clear()

    async def publish_events(self, is_lost: bool = False) -> None:
        """Publish the engine's pending events; `is_lost`: drop the message instead."""
        message = self.engine.take_message()
        if message is not None and not is_lost:
            await self._sockets[0].send_multipart(
                (b"kv", message[0].to_bytes(8, "big"), message[1])
            )

    async def _serve_replays(self) -> None:
        socket = self._sockets[1]
        while True:
            client, _, start = await socket.recv_multipart()
            start_number = int.from_bytes(start, "big")
            self.replay_starts.append(start_number)
            topic = () if self.omits_topic else (b"kv",)
            for number, payload in list(enumerate(self.engine.messages))[
                -self.engine.max_kept_messages :
            ]:
                if number == self.skipped_number:
                    self.skipped_number = None
                elif number >= start_number:
                    frames = (client, b"", *topic, number.to_bytes(8, "big"), payload)
                    await socket.send_multipart(frames)
            await socket.send_multipart((client, b"", *topic, END_NUMBER, b""))

    async def answer_sources(self, _: web.Request) -> web.Response:
        """Answer /kv_event_sources."""
        config = {"publisher": "zmq", "enable_kv_cache_events": True, "topic": "kv"}
        config |= {"endpoint": self.events_endpoint, "replay_endpoint": self.replay_endpoint}
        return web.json_response({"0": config}, status=self.status)

    async def answer_metrics(self, _: web.Request) -> web.Response:
        """Answer /metrics with the part that the router reads."""
        labels = f'block_size="{self.engine.block_size}",enable_prefix_caching="True"'
        return web.Response(text=f"vllm:cache_config_info{{{labels}}} 1.0\n")


@asynccontextmanager
async def run_publisher(publisher: FakePublisher) -> AsyncIterator[str]:
    """Run an instance with this `publisher`; yields its URL."""
    context = zmq.asyncio.Context()
    publisher.bind_sockets(context)
    app = web.Application()
    app.router.add_get("/kv_event_sources", publisher.answer_sources)
    app.router.add_get("/metrics", publisher.answer_metrics)
    try:
        async with run_web_app(app) as url:
            yield url
    finally:
        await publisher.close()
        context.destroy(linger=0)
