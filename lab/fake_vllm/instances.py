# SPDX-License-Identifier: Apache-2.0
"""A server with vLLM's interface that follows a plan, for tests of the router and beside it.

It takes plain requests, and keeps them for the test; what it reports in Server-Timing it has really waited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from ttft_otel.model import timing
from ttft_otel.model.names import header_names
from ttft_otel.tracing import clock

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
    # Reported in Server-Timing, in µs, whatever it really did.
    reported_us: Mapping[str, int] | None = None
    encoder_cache: timing.EncoderCacheCounts | None = None  # reported there about media items
    reports_no_token: bool = False  # its engine ends the request before the first token
    # The response to a body, if not streamed.
    answers: Callable[[bytes], bytes] = lambda _: b'{"answer":  "42"}'
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
        self.plan = plan
        self.received: list[ReceivedRequest] = []
        self.url = ""
        self.models_authorizations: list[str] = []  # of the requests for its models

    def build_app(self) -> web.Application:
        """All that it serves: health, models, and a response to whatever is posted."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self.answer_health)
        app.router.add_get("/v1/models", self.answer_models)
        app.router.add_post("/{path:.*}", self.handle_request)
        return app

    async def answer_health(self, _: web.Request) -> web.Response:
        """The planned status."""
        return web.Response(status=self.plan.health_status)

    async def answer_models(self, request: web.Request) -> web.Response:
        """The planned models, for who has the key."""
        self.models_authorizations.append(request.headers.get("Authorization", ""))
        key = self.plan.models_key
        if key and self.models_authorizations[-1] != f"Bearer {key}":
            return web.json_response({"error": "no"}, status=401)
        cards = [{"id": name} for name in self.plan.models]
        return web.json_response({"object": "list", "data": cards})

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
async def run_fake(instance: FakeInstance, host: str = "127.0.0.1") -> AsyncIterator[None]:
    """Serve `instance` on a free port of `host`."""
    async with run_web_app(instance.build_app(), host) as instance.url:
        yield


@contextlib.asynccontextmanager
async def run_instance(
    plan: InstancePlan | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[FakeInstance]:
    """A running FakeInstance; `host` is the address that it listens on."""
    instance = FakeInstance(plan or InstancePlan())
    async with run_fake(instance, host):
        yield instance
