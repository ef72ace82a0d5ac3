# SPDX-License-Identifier: Apache-2.0
"""Servers for the router's tests: an instance that follows a plan, a slow proxy, and the router."""

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

from lab.free_ports import find_free_port
from ttft_otel.model import timing
from ttft_otel.model.names import header_names
from ttft_otel.model.record import Record, decode_record
from ttft_otel.router import types
from ttft_otel.router.control import app
from ttft_otel.router.control.uvicorn_server import build_uvicorn_config
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy.admission import AdmissionGate
from ttft_otel.router.proxy.endpoint import ProxyEndpoint
from ttft_otel.router.recent_reports import RecentReports as RecentReports
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.upstream.health_monitor import HealthMonitor
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.router.upstream.upstream_client import UpstreamClient
from ttft_otel.tracing import clock
from ttft_otel.tracing.settings import Settings

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STREAM_EVENTS = (b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n")


@dataclass
class InstancePlan:
    """How an instance behaves; it really sleeps for `stages_ms`, and `rest_ms` if not streaming."""

    stages_ms: Mapping[str, int] = field(default_factory=lambda: {"prefill.compute": 20})
    unattributed_ms: int = 0
    rest_ms: int = 0
    chunks: Sequence[bytes] = STREAM_EVENTS
    gap_s: float = 0.0
    permits: asyncio.Semaphore | None = None  # each chunk after the first takes one
    status: int = 200
    sends_timing: bool = True
    breaks_stream: bool = False  # close the connection after the first chunk
    dropped_requests: int = 0  # number of requests that are dropped without a response
    reported_us: Mapping[str, int] | None = (
        None  # reported in Server-Timing, in µs, whatever it really did
    )
    encoder_cache: timing.EncoderCacheCounts | None = None  # reported there about media items
    reports_no_token: bool = False  # its engine ends the request before the first token
    answers: Callable[[bytes], bytes] = lambda _: (
        b'{"answer":  "42"}'
    )  # the response to a body, if not streamed
    health_status: int = 200
    models: Sequence[str] = ("tiny",)
    models_key: str = ""  # the API key that /v1/models requires


@dataclass
class ReceivedRequest:
    """A request as the instance received it."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    received_us: int
    cancelled_us: int = 0

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


class FakeInstance:
    """A server that follows `plan` and keeps the requests that it received."""

    def __init__(self, plan: InstancePlan) -> None:
        self.plan, self.received, self.url = plan, list[ReceivedRequest](), ""
        self.models_authorizations: list[
            str
        ] = []  # Authorization headers of requests for its models

    async def handle_request(self, request: web.Request) -> web.StreamResponse:
        """Keep `request`, and respond as planned."""
        received_request = ReceivedRequest(
            request.raw_path, request.headers.copy(), await request.read(), clock.now_us()
        )
        self.received.append(received_request)
        try:
            return await self._answer_request(request)
        except asyncio.CancelledError:
            received_request.cancelled_us = clock.now_us()
            raise

    async def _answer_request(self, request: web.Request) -> web.StreamResponse:
        plan = self.plan
        start_us = clock.now_us()
        parts_us = {}
        for name, length in plan.stages_ms.items():
            stage_start_us = clock.now_us()
            await asyncio.sleep(length / 1000)
            parts_us[name] = clock.now_us() - stage_start_us
        await asyncio.sleep(plan.unattributed_ms / 1000)
        ttft_us = clock.now_us() - start_us
        if plan.dropped_requests and request.transport is not None:
            plan.dropped_requests -= 1
            request.transport.abort()
        await asyncio.sleep(plan.rest_ms / 1000)
        rest_us = clock.now_us() - start_us - ttft_us if plan.rest_ms else None
        headers = {"X-Own": "kept", "Connection": "X-Hop", "X-Hop": "not kept"}
        if plan.sends_timing:
            unattributed_us = ttft_us - sum(parts_us.values())
            headers["Server-Timing"] = timing.format_server_timing(
                parts_us, unattributed_us, ttft_us, rest_us, ec=plan.encoder_cache
            )
        if plan.reported_us is not None:
            headers["Server-Timing"] = timing.format_server_timing(
                plan.reported_us, 0, sum(plan.reported_us.values()), rest_us
            )
        if plan.reports_no_token:
            headers["Server-Timing"] = header_names.TIMING_NO_TOKEN
        body = await request.read()
        if plan.status >= 400 or b'"stream":true' not in body.replace(b" ", b""):
            text = b'{"error": "no"}' if plan.status >= 400 else plan.answers(body)
            return web.Response(
                body=text, status=plan.status, headers=headers, content_type="application/json"
            )
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, chunk in enumerate(plan.chunks):
            if number:
                await asyncio.sleep(plan.gap_s)
                if plan.permits is not None:
                    await plan.permits.acquire()
            await response.write(chunk)
            if plan.breaks_stream and request.transport is not None:
                request.transport.abort()
        return response


def open_listening_socket(host: str = "127.0.0.1") -> socket.socket:
    """A listening socket on a free port, by default of the loopback."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    return sock


def find_unused_url() -> str:
    """The URL of a port on which nothing listens, and which no outgoing connection takes."""
    return f"http://127.0.0.1:{find_free_port()}"


def find_unused_urls(count: int) -> list[str]:
    """As many URLs of different ports on which nothing listens."""
    return [find_unused_url() for _ in range(count)]


@contextlib.asynccontextmanager
async def run_web_app(web_app: web.Application, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve `web_app` on a free port of `host`; gives its URL.

    A handler is cancelled when its client hangs up, as vLLM's are.
    """
    runner = web.AppRunner(web_app, access_log=None, handler_cancellation=True)
    await runner.setup()
    sock = open_listening_socket(host)
    await web.SockSite(runner, sock).start()
    try:
        yield f"http://{host}:{sock.getsockname()[1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def run_instance(
    plan: InstancePlan | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[FakeInstance]:
    """A running Instance; `host` is the address that it listens on."""
    fake_instance = FakeInstance(plan or InstancePlan())

    async def answer_health(_: web.Request) -> web.Response:
        return web.Response(status=fake_instance.plan.health_status)

    async def answer_models(request: web.Request) -> web.Response:
        fake_instance.models_authorizations.append(request.headers.get("Authorization", ""))
        if (
            fake_instance.plan.models_key
            and fake_instance.models_authorizations[-1] != f"Bearer {fake_instance.plan.models_key}"
        ):
            return web.json_response({"error": "no"}, status=401)
        cards = [{"id": name} for name in fake_instance.plan.models]
        return web.json_response({"object": "list", "data": cards})

    server = web.Application(client_max_size=1 << 28)
    server.router.add_get("/health", answer_health)
    server.router.add_get("/v1/models", answer_models)
    server.router.add_post("/{path:.*}", fake_instance.handle_request)
    async with run_web_app(server, host) as fake_instance.url:
        yield fake_instance


@contextlib.asynccontextmanager
async def run_slow_proxy(url: str, delay_s: float) -> AsyncIterator[str]:
    """A TCP proxy that holds every byte towards the server for `delay_s` seconds."""
    host, port = url.removeprefix("http://").split(":")

    async def relay_bytes(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await asyncio.sleep(delay_s)
                writer.write(data)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    relays: set[asyncio.Task[None]] = set()

    async def relay_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            relays.add(task)
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(
            relay_bytes(reader, up_writer, delay_s), relay_bytes(up_reader, writer, 0)
        )

    server = await asyncio.start_server(relay_connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        # The router has closed its connections: each relay ends once both its writers are closed.
        await asyncio.gather(*relays)


class RunningRouter:
    """A running router: its client, its records and its URL."""

    def __init__(
        self, client: aiohttp.ClientSession, url: str, encoded_records: list[bytes]
    ) -> None:
        self.client, self.url, self._encoded_records = client, url, encoded_records
        self.app: app.RouterApp
        self.server: PromptServer

    @property
    def fleet(self) -> InstancePool:
        """Its instances."""
        return self.app.endpoint.upstream.pool

    @property
    def records(self) -> list[Record]:
        """What was given to the exporter, decoded."""
        return [decode_record(data) for data in self._encoded_records]

    async def post_body(self, path: str, body: Any, **headers: str) -> tuple[int, Any, bytes]:
        """Post JSON (or bytes as they are); status, headers, body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        header_map = {name.replace("_", "-"): value for name, value in headers.items()}
        header_map.setdefault("Content-Type", "application/json")
        async with self.client.post(
            URL(f"{self.url}{path}", encoded=True), data=data, headers=header_map
        ) as response:
            return response.status, response.headers, await response.read()

    async def post_chat(
        self, *images: str, stream: bool = True, **headers: str
    ) -> tuple[int, Any, bytes]:
        """A chat request with these images."""
        return await self.post_body(
            "/v1/chat/completions", build_chat(*images, stream=stream), **headers
        )

    async def get_json(self, path: str, **headers: str) -> tuple[int, Any, Any]:
        """Get JSON from the control plane; status, headers, body."""
        header_map = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.get(f"{self.url}{path}", headers=header_map) as response:
            return response.status, response.headers, json.loads(await response.read())

    async def wait_for_records(self, count: int) -> list[Record]:
        """Wait until there are `count` records, and return all."""
        await self.wait_for_encoded(count)
        return self.records

    async def wait_for_encoded(self, count: int) -> list[bytes]:
        """Wait until the exporter was given `count` messages, and return all as they are."""
        for _ in range(200):
            if len(self._encoded_records) >= count:
                break
            await asyncio.sleep(0.01)
        return list(self._encoded_records)


def build_chat(*images: str, stream: bool = True) -> dict[str, Any]:
    """The body of a chat request with these image URLs."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "what is it?"}]
    content += [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "stream": stream,
    }


@contextlib.asynccontextmanager
async def run_router(
    backends: Sequence[str],
    encoders: Sequence[str] = (),
    settings: Settings | None = None,
    prepare: Callable[[app.RouterApp], None] = lambda _: None,
    *,
    prefills: Sequence[str] = (),
    decodes: Sequence[str] = (),
    failures: int = 5,
    pause_s: float = 2.0,
    probe_interval_s: float = 5.0,
    retries: int = 2,
    budget: float = 0.2,
    keys: Sequence[str] = (),
    key: str = "",
    traced: bool = True,
    routing: Callable[[InstancePool], RoutingService] | None = None,
    **options: Any,
) -> AsyncIterator[RunningRouter]:
    """Run the router on a real socket, with its records in a list.

    routing: builds the routing service; round_robin on all legs by default. keys: of clients. key: sent to
    instances. pause_s: first open period of a breaker. options: arguments of ProxyEndpoint.
    """
    urls_by_leg = {
        "encode": encoders,
        "prefill": prefills,
        "decode": decodes,
        "prefill_decode" if encoders else "mono": backends,
    }
    instances = {
        leg: [types.parse_instance_url(url, leg) for url in urls]
        for leg, urls in urls_by_leg.items()
        if urls
    }
    limits = options.get("limits") or RouterLimits()
    fleet = InstancePool(
        instances, failures, pause_s, limits.breaker_trial, limits.first_byte_timeout
    )
    health = HealthMonitor(fleet, probe_interval_s, key)
    routing_service = (
        routing(fleet) if routing else RoutingService(fleet, others_policy="round_robin")
    )
    legs = UpstreamClient(fleet, routing_service, retries, budget, health, limits)
    options["admission"] = AdmissionGate(legs, keys, key)
    encoded_records: list[bytes] = []

    def record_sent(data: bytes) -> bool:
        encoded_records.append(data)
        return True

    forward = ProxyEndpoint(
        legs, routing_service, settings or Settings(), record_sent if traced else None, **options
    )
    router_app = app.build_app(forward, lambda: {"sent": len(encoded_records), "dropped": 3})
    prepare(router_app)
    async with serve_app(router_app, encoded_records) as running:
        yield running


@contextlib.asynccontextmanager
async def run_routed_instances(
    backends: Sequence[InstancePlan | None] = (None,),
    encoders: Sequence[InstancePlan | None] = (),
    settings: Settings | None = None,
    *,
    prefills: Sequence[InstancePlan | None] = (),
    decodes: Sequence[InstancePlan | None] = (),
    **options: Any,
) -> AsyncIterator[tuple[Any, ...]]:
    """Run an instance for each plan (None: the default plan) and a router in front of all of them.

    Gives the router, then the instances: encoders, prefills, decodes, backends. options: of run_router.
    """
    async with contextlib.AsyncExitStack() as stack:
        legs = [
            [await stack.enter_async_context(run_instance(plan)) for plan in plans]
            for plans in (encoders, prefills, decodes, backends)
        ]
        encode, prefill, decode, serve = ([each.url for each in leg] for leg in legs)
        router = await stack.enter_async_context(
            run_router(serve, encode, settings, prefills=prefill, decodes=decode, **options)
        )
        yield (router, *(each for leg in legs for each in leg))


class PromptServer(uvicorn.Server):
    """uvicorn's server without its fixed pauses: hundreds of tests stop one.

    Its main loop looks every 0.1 s whether to exit, and its shutdown begins with a sleep of 0.1 s.
    What router processes do when they are stopped is tested in cli/test_router_process.py.

    cancels: end what is under way at once, as uvicorn does after timeout_graceful_shutdown.
    """

    cancels = False

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.exit_requested = asyncio.Event()

    async def main_loop(self) -> None:
        """Wait for `exit_requested`."""
        await self.on_tick(0)  # sets the default headers
        await self.exit_requested.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close listeners, wait for requests and connections to end, then end the lifespan."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for task in list(self.server_state.tasks) if self.cancels else ():
            task.cancel()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.001)
        await self.lifespan.shutdown()


@contextlib.asynccontextmanager
async def serve_app(
    router_app: app.RouterApp, encoded_records: list[bytes]
) -> AsyncIterator[RunningRouter]:
    """Serve `router_app` on a real socket; its records are appended to `encoded_records`."""
    server = PromptServer(build_uvicorn_config(router_app))
    sock = open_listening_socket()
    task = asyncio.create_task(server.serve([sock]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        async with aiohttp.ClientSession() as client:
            running = RunningRouter(
                client, f"http://127.0.0.1:{sock.getsockname()[1]}", encoded_records
            )
            running.app, running.server = router_app, server
            yield running
    finally:
        server.exit_requested.set()
        await task


class LoopDelays:
    """By how much the running event loop was late in all, in microseconds.

    Instances, router and client of a scenario share one loop and one core: on a busy machine every
    upper bound on a time has to allow for what the loop itself lost. Made inside a scenario.
    """

    PERIOD_US = 5_000
    MIN_DELAY_US = 2_000  # timers are up to a millisecond late on an idle machine

    def __init__(self) -> None:
        self.total_us = 0
        self._task = asyncio.create_task(self._watch())  # asyncio.run() cancels it at the end

    async def _watch(self) -> None:
        while True:
            began_us = clock.now_us()
            await asyncio.sleep(self.PERIOD_US / 1e6)
            delay_us = clock.now_us() - began_us - self.PERIOD_US
            self.total_us += delay_us if delay_us > self.MIN_DELAY_US else 0


def run_with_timeout(scenario: Callable[[], Awaitable[None]], timeout_s: float = 30) -> None:
    """Run `scenario` in a new event loop, for at most `timeout_s` seconds."""

    async def run_bounded() -> None:
        await asyncio.wait_for(scenario(), timeout_s)

    asyncio.run(run_bounded())
