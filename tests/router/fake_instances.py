# SPDX-License-Identifier: Apache-2.0
"""A router before lab.fake_vllm's instances or its prefill and decode servers, which are taken from here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvicorn
from yarl import URL

from lab.fake_vllm.instances import (
    STREAM_EVENTS,
    FakeInstance,
    InstancePlan,
    open_listening_socket,
    run_instance,
    run_web_app,
)
from lab.fake_vllm.pair_servers import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    CHAT_PATH,
    PairModel,
    PairServer,
    run_server,
)
from lab.free_ports import find_free_port
from ttft_otel.model.record import Record, decode_record
from ttft_otel.router import types
from ttft_otel.router.control import app
from ttft_otel.router.control.uvicorn_server import build_uvicorn_config
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy.admission import AdmissionGate
from ttft_otel.router.proxy.endpoint import ProxyEndpoint
from ttft_otel.router.proxy.exchange_reporter import RecentReports
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.routing.upstream_client import UpstreamClient
from ttft_otel.router.upstream.connection_pool import ClientTls
from ttft_otel.router.upstream.instance_pool import HealthMonitor, InstancePool
from ttft_otel.tracing import clock
from ttft_otel.tracing.settings import Settings

__all__ = [
    "ANSWER_TOKENS",
    "BLOCK_TOKENS",
    "CHAT_PATH",
    "STREAM_EVENTS",
    "FakeInstance",
    "InstancePlan",
    "PairModel",
    "PairServer",
    "RecentReports",
    "open_listening_socket",
    "run_instance",
    "run_server",
    "run_web_app",
]

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def find_unused_url() -> str:
    """The URL of a port on which nothing listens, and which no outgoing connection takes."""
    return f"http://127.0.0.1:{find_free_port()}"


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
    tls: ClientTls | None = None,
    limits: RouterLimits | None = None,
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
    limits = limits or RouterLimits()
    fleet = InstancePool(
        instances, failures, pause_s, limits.breaker_trial, limits.first_byte_timeout
    )
    health = HealthMonitor(fleet, probe_interval_s)
    routing_service = (
        routing(fleet) if routing else RoutingService(fleet, others_policy="round_robin")
    )
    legs = UpstreamClient(routing_service, retries, budget, health, limits, tls, key)
    options["admission"] = AdmissionGate(legs, keys, key)
    encoded_records: list[bytes] = []

    def record_sent(data: bytes) -> bool:
        encoded_records.append(data)
        return True

    forward = ProxyEndpoint(
        legs, settings or Settings(), record_sent if traced else None, **options
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
    What router processes do when they are stopped is tested in commands/router/test_router_command.py.

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


async def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until `condition` holds. Raises TimeoutError; a busy machine takes longer than an idle one."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def run_disaggregated(
    model: PairModel, encoder: InstancePlan | None = None, **options: Any
) -> AsyncIterator[tuple[Any, ...]]:
    """Run prefill and decode with the same `model`, and a router; with a plan for one, an encoder before
    them.

    Gives the router, then the servers: encoder, prefill, decode. options: of run_router.
    """
    async with contextlib.AsyncExitStack() as stack:
        encoders = []
        if encoder is not None:
            encoders.append(await stack.enter_async_context(run_instance(encoder)))
        prefill = await stack.enter_async_context(run_server(model, False))
        decode = await stack.enter_async_context(run_server(model, True))
        router = await stack.enter_async_context(
            run_router(
                [],
                [each.url for each in encoders],
                prefills=[prefill.url],
                decodes=[decode.url],
                **options,
            )
        )
        yield (router, *encoders, prefill, decode)


@dataclass
class PairFleet:
    """Prefill, decode, their shared state, and the router in front of them."""

    model: PairModel
    prefill: PairServer
    decode: PairServer
    router: RunningRouter

    async def send_request(self, path: str = CHAT_PATH, **fields: Any) -> PairAnswer:
        """Send a streamed request; `fields` override those of the body."""
        body: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 4}
        body |= (
            {"prompt": "x"}
            if path != CHAT_PATH
            else {"messages": [{"role": "user", "content": "x"}]}
        )
        status, headers, data = await self.router.post_body(path, body | fields)
        return PairAnswer(status, headers, data)

    async def wait_until_freed(self) -> bool:
        """Whether prefill releases all blocks within a second."""
        for _ in range(100):
            if not self.model.held_requests:
                return True
            await asyncio.sleep(0.01)
        return False


@dataclass
class PairAnswer:
    """The response that the client received."""

    status: int
    headers: Any
    body: bytes

    @property
    def events(self) -> list[Any]:
        """Its parsed events; [DONE] as text."""
        texts = [each.removeprefix(b"data: ") for each in self.body.split(b"\n\n") if each]
        return [text.decode() if text == b"[DONE]" else json.loads(text) for text in texts]

    @property
    def texts(self) -> list[str]:
        """The texts of its events, without the role event of a chat."""
        choices = [each["choices"][0] for each in self.events[:-1] if each.get("choices")]
        deltas = [choice.get("delta", choice) for choice in choices]
        return [delta.get("content", delta.get("text")) for delta in deltas if "role" not in delta]


@contextlib.asynccontextmanager
async def run_fleet(
    mode: str = "strip", options: Mapping[str, Any] | None = None, **fields: Any
) -> AsyncIterator[PairFleet]:
    """Run one prefill, one decode and a router with --first-token `mode`; `fields` are those of PairModel.

    options: more of run_router.
    """
    model, options = PairModel(**fields), {"probe_interval_s": 0.05, **(options or {})}
    async with run_disaggregated(model, first_token=mode, **options) as (router, prefill, decode):
        yield PairFleet(model, prefill, decode, router)
