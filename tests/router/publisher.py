# SPDX-License-Identifier: Apache-2.0
"""An instance that publishes KV events as vLLM does, over real sockets: for the tests of prefixes/."""

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

from tests.router.engine import Engine

END = (-1).to_bytes(8, "big", signed=True)


@dataclass
class Publisher:
    """A PUB and a ROUTER socket; `old`: replays without a topic; `hole` is left out of one replay."""

    folder: Path
    engine: Engine = field(default_factory=Engine)
    old: bool = False
    hole: int | None = None
    asked: list[int] = field(default_factory=list)
    status: int = 200
    _sockets: list[Any] = field(default_factory=list)
    _serving: asyncio.Task[None] | None = None

    @property
    def events(self) -> str:
        """Where it publishes."""
        return f"ipc://{self.folder}/events"

    @property
    def replay(self) -> str:
        """Where it is asked again."""
        return f"ipc://{self.folder}/replay"

    def open(self, context: zmq.asyncio.Context) -> None:
        """Bind."""
        for kind, address in ((zmq.PUB, self.events), (zmq.ROUTER, self.replay)):
            socket = context.socket(kind)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            self._sockets.append(socket)
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """End, as a process that is killed."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets.clear()

    async def say(self, lose: bool = False) -> None:
        """Publish what the engine has to tell; `lose`: it arrives nowhere."""
        message = self.engine.publish()
        if message is not None and not lose:
            await self._sockets[0].send_multipart(
                (b"kv", message[0].to_bytes(8, "big"), message[1])
            )

    async def _serve(self) -> None:
        socket = self._sockets[1]
        while True:
            client, _, start = await socket.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            topic = () if self.old else (b"kv",)
            for number, payload in list(enumerate(self.engine.said))[-self.engine.keep :]:
                if number == self.hole:
                    self.hole = None
                elif number >= first:
                    told = (client, b"", *topic, number.to_bytes(8, "big"), payload)
                    await socket.send_multipart(told)
            await socket.send_multipart((client, b"", *topic, END, b""))

    async def sources(self, _: web.Request) -> web.Response:
        """What it says of where it publishes."""
        config = {"publisher": "zmq", "enable_kv_cache_events": True, "topic": "kv"}
        config |= {"endpoint": self.events, "replay_endpoint": self.replay}
        return web.json_response({"0": config}, status=self.status)

    async def metrics(self, _: web.Request) -> web.Response:
        """As much of a metrics page as the router reads."""
        labels = f'block_size="{self.engine.size}",enable_prefix_caching="True"'
        return web.Response(text=f"vllm:cache_config_info{{{labels}}} 1.0\n")


@asynccontextmanager
async def published(publisher: Publisher) -> AsyncIterator[str]:
    """An instance with this publisher: its URL."""
    context = zmq.asyncio.Context()
    publisher.open(context)
    app = web.Application()
    app.router.add_get("/kv_event_sources", publisher.sources)
    app.router.add_get("/metrics", publisher.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await publisher.close()
        context.destroy(linger=0)
