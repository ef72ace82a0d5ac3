# SPDX-License-Identifier: Apache-2.0
"""Servers for the router's tests: an instance that keeps to a plan, a slow wire, and the router itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web
from yarl import URL

from ttft_otel import clock, timing
from ttft_otel.record import Record, decode
from ttft_otel.router import app, choose
from ttft_otel.router.fleet import Fleet
from ttft_otel.router.forward import Forward
from ttft_otel.router.gate import Gate
from ttft_otel.router.health import Health
from ttft_otel.router.legs import Legs
from ttft_otel.router.report import Reports as Reports
from ttft_otel.router.routing import Routing
from ttft_otel.router.server import configure
from ttft_otel.settings import Settings

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EVENTS = (b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n")


@dataclass
class Plan:
    """How an instance behaves: stages in ms are really slept, `rest` too in a plain answer."""

    stages: Mapping[str, int] = field(default_factory=lambda: {"prefill.compute": 20})
    unattributed: int = 0
    rest: int = 0
    chunks: Sequence[bytes] = EVENTS
    gap: float = 0.0
    status: int = 200
    timed: bool = True
    breaks: bool = False  # cut the connection after the first chunk
    drops: int = 0  # so many requests are cut off before any answer
    says: Mapping[str, int] | None = None  # its Server-Timing in µs, whatever it really did
    health: int = 200
    models: Sequence[str] = ("tiny",)
    key: str = ""  # its models are told for it only


@dataclass
class Seen:
    """One request as the instance got it."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    at: int
    cancelled: int = 0

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


class Instance:
    """A server with a plan; remembers what it was asked."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.seen, self.url = plan, list[Seen](), ""
        self.asked: list[str] = []  # the keys with which its models were asked for

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer as planned."""
        seen = Seen(request.raw_path, request.headers.copy(), await request.read(), clock.now())
        self.seen.append(seen)
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            seen.cancelled = clock.now()
            raise

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        plan = self.plan
        start = clock.now()
        parts = {}
        for name, length in plan.stages.items():
            mark = clock.now()
            await asyncio.sleep(length / 1000)
            parts[name] = clock.now() - mark
        await asyncio.sleep(plan.unattributed / 1000)
        ttft = clock.now() - start
        if plan.drops and request.transport is not None:
            plan.drops -= 1
            request.transport.abort()
        await asyncio.sleep(plan.rest / 1000)
        rest = clock.now() - start - ttft if plan.rest else None
        headers = {"X-Own": "kept", "Connection": "X-Hop", "X-Hop": "not kept"}
        if plan.timed:
            unattributed = ttft - sum(parts.values())
            headers["Server-Timing"] = timing.write(parts, unattributed, ttft, rest)
        if plan.says is not None:
            headers["Server-Timing"] = timing.write(plan.says, 0, sum(plan.says.values()), rest)
        body = await request.read()
        if plan.status >= 400 or b'"stream":true' not in body.replace(b" ", b""):
            text = b'{"error": "no"}' if plan.status >= 400 else b'{"answer":  "42"}'
            return web.Response(
                body=text, status=plan.status, headers=headers, content_type="application/json"
            )
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, chunk in enumerate(plan.chunks):
            if number:
                await asyncio.sleep(plan.gap)
            await response.write(chunk)
            if plan.breaks and request.transport is not None:
                request.transport.abort()
        return response


def free() -> socket.socket:
    """A listening socket on loopback."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def unused() -> str:
    """The URL of a port where nobody listens."""
    with free() as sock:
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


@contextlib.asynccontextmanager
async def instance(plan: Plan | None = None) -> AsyncIterator[Instance]:
    """A running Instance."""
    made = Instance(plan or Plan())

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=made.plan.health)

    async def models(request: web.Request) -> web.Response:
        made.asked.append(request.headers.get("Authorization", ""))
        if made.plan.key and made.asked[-1] != f"Bearer {made.plan.key}":
            return web.json_response({"error": "no"}, status=401)
        cards = [{"id": name} for name in made.plan.models]
        return web.json_response({"object": "list", "data": cards})

    server = web.Application(client_max_size=1 << 28)
    server.router.add_get("/health", health)
    server.router.add_get("/v1/models", models)
    server.router.add_post("/{path:.*}", made.handle)
    runner = web.AppRunner(server, access_log=None, handler_cancellation=True)
    await runner.setup()
    sock = free()
    await web.SockSite(runner, sock).start()
    made.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def wire(url: str, delay: float) -> AsyncIterator[str]:
    """A TCP proxy that holds every byte towards the server for `delay` seconds."""
    host, port = url.removeprefix("http://").split(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait: float) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await asyncio.sleep(wait)
                writer.write(data)
        writer.close()

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, up_writer, delay), pump(up_reader, writer, 0))

    server = await asyncio.start_server(link, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


class Router:
    """A running router: its client, its records and its URL."""

    def __init__(self, client: aiohttp.ClientSession, url: str, sent: list[bytes]) -> None:
        self.client, self.url, self._sent = client, url, sent
        self.app: app.App

    @property
    def fleet(self) -> Fleet:
        """Its instances."""
        return self.app.forward.legs.fleet

    @property
    def records(self) -> list[Record]:
        """What was given to the exporter, decoded."""
        return [decode(data) for data in self._sent]

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, bytes]:
        """Post JSON (or bytes as they are); status, headers, body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named.setdefault("Content-Type", "application/json")
        async with self.client.post(
            URL(f"{self.url}{path}", encoded=True), data=data, headers=named
        ) as response:
            return response.status, response.headers, await response.read()

    async def chat(
        self, *images: str, stream: bool = True, **headers: str
    ) -> tuple[int, Any, bytes]:
        """A chat request with these images."""
        return await self.post("/v1/chat/completions", chat(*images, stream=stream), **headers)

    async def get(self, path: str, **headers: str) -> tuple[int, Any, Any]:
        """Get JSON from the control plane; status, headers, body."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.get(f"{self.url}{path}", headers=named) as response:
            return response.status, response.headers, json.loads(await response.read())

    async def settled(self, halves: int) -> list[Record]:
        """The records, once there are that many."""
        for _ in range(200):
            if len(self._sent) >= halves:
                break
            await asyncio.sleep(0.01)
        return self.records


def chat(*images: str, stream: bool = True) -> dict[str, Any]:
    """A chat request's body with these image URLs."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "what is it?"}]
    content += [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "stream": stream,
    }


@contextlib.asynccontextmanager
async def router(
    backends: Sequence[str],
    encoders: Sequence[str] = (),
    settings: Settings | None = None,
    prepare: Callable[[app.App], None] = lambda _: None,
    *,
    prefills: Sequence[str] = (),
    decodes: Sequence[str] = (),
    failures: int = 5,
    pause: float = 2.0,
    pace: float = 5.0,
    retries: int = 2,
    budget: float = 0.2,
    keys: Sequence[str] = (),
    key: str = "",
    traced: bool = True,
    routing: Callable[[Fleet], Routing] | None = None,
    **options: Any,
) -> AsyncIterator[Router]:
    """The router on a real socket; its records go into a list. Legs take turns, unless `routing` says."""
    given = {
        "encode": encoders,
        "prefill": prefills,
        "decode": decodes,
        "prefill_decode" if encoders else "mono": backends,
    }
    instances = {
        leg: [choose.instance(url, leg) for url in urls] for leg, urls in given.items() if urls
    }
    fleet = Fleet(instances, failures, pause)
    health = Health(fleet, pace, key)
    made = routing(fleet) if routing else Routing(fleet, others="round_robin")
    legs = Legs(fleet, made, retries, budget, health)
    options["gate"] = Gate(legs, keys, key)
    sent: list[bytes] = []

    def send(data: bytes) -> bool:
        sent.append(data)
        return True

    forward = Forward(legs, settings or Settings(), send if traced else None, **options)
    built = app.build(forward, lambda: {"sent": len(sent), "dropped": 3})
    prepare(built)
    server = uvicorn.Server(configure(built))
    sock = free()
    task = asyncio.create_task(server.serve([sock]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        async with aiohttp.ClientSession() as client:
            running = Router(client, f"http://127.0.0.1:{sock.getsockname()[1]}", sent)
            running.app = built
            yield running
    finally:
        server.should_exit = True
        await task


def run(scenario: Callable[[], Awaitable[None]], seconds: float = 30) -> None:
    """Run one test's scenario in a loop of its own."""

    async def bounded() -> None:
        await asyncio.wait_for(scenario(), seconds)

    asyncio.run(bounded())
