# SPDX-License-Identifier: Apache-2.0
"""The control plane (health, models, metrics, /ttft_report) around forward.py's data path.

command.py builds it and gives it to uvicorn; operators and Prometheus read it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from ttft_otel import __version__, names, stages
from ttft_otel.router import answer
from ttft_otel.router.answer import Rejected, Send
from ttft_otel.router.forward import Forward, Receive, Scope
from ttft_otel.router.metrics import Metrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler

    from ttft_otel.settings import Settings

DATA: Final = "/v1/"


class App:
    """The ASGI application: POST below /v1 is data and goes straight to `forward`.

    In front of FastAPI, not a Route inside it: whatever middleware or telemetry of its own FastAPI
    has then costs the data path nothing.
    """

    def __init__(self, forward: Forward, control: FastAPI, metrics: Metrics) -> None:
        self.forward, self.control, self.metrics = forward, control, metrics
        self.gate = forward.gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        data = scope["type"] == "http" and scope["method"] == "POST"
        if not (data and scope["path"].startswith(DATA)):
            await self.control(
                scope, receive, _plain(send) if scope["type"] == "lifespan" else send
            )
            return
        self.gate.inside += 1
        try:
            await self.forward(scope, receive, send)
        finally:
            self.gate.inside -= 1


def build(
    forward: Forward,
    counts: Callable[[], Mapping[str, int]],
    beside: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
) -> App:
    """Put data path and control plane together; `counts` are handoff's, `beside` runs as long."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await forward.legs.start()
            async with beside():
                yield
        finally:
            await forward.pair.releases.end()
            await forward.legs.close()

    app = FastAPI(title="ttft-otel router", version=__version__, lifespan=lifespan)
    metrics = Metrics(forward, counts)
    app.add_exception_handler(Rejected, _rejected)
    app.add_exception_handler(HTTPException, _nowhere)
    _health(app, forward)
    _models(app, forward)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/ttft_report/{request_id:path}")
    async def ttft_report(request_id: str, request: Request) -> JSONResponse:
        _check(forward, request)
        found = forward.reports.get(request_id)
        if found is not None:
            return JSONResponse(found)
        most = forward.reports.most
        why = f"No report for {request_id[:256]!r}: the newest {most} are kept."
        if forward.emit is None:
            why = f"No reports: tracing is off. Start the router without {names.ENV_ON}=0."
        raise Rejected(404, why, "NotFoundError")

    return App(forward, app, metrics)


def _plain(send: Send) -> Send:
    """Say of what cannot work as configured why, with the remedy, and not where in the code."""

    async def say(message: Any) -> None:
        error = sys.exc_info()[1]
        if message["type"] == "lifespan.startup.failed" and isinstance(error, ValueError):
            message = {**message, "message": f"ttft-otel cannot start: {error}"}
        await send(message)

    return say


def _health(app: FastAPI, forward: Forward) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/health")
    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        """Ready when each leg has an instance that does not fail, until the router is stopped."""
        legs = forward.legs
        if not forward.gate.draining:
            await legs.health.ready()
        states: dict[str, dict[str, str]] = {}
        for each in legs.fleet:
            states.setdefault(each.leg, {})[each.url] = each.state
        ready = bool(states) and all("healthy" in leg.values() for leg in states.values())
        word = "ready" if ready else "not ready"
        if forward.gate.draining:
            ready, word = False, "draining"
        return JSONResponse({"status": word, "legs": states}, 200 if ready else 503)


def _models(app: FastAPI, forward: Forward) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> JSONResponse:
        """The models of all who answer, each id once."""
        _check(forward, request)
        legs = forward.legs
        asked = legs.fleet.get(forward.last)
        # the client's key is the instances' one unless we have keys of our own
        key = "" if forward.gate.keys else request.headers.get("authorization", "")
        told = await asyncio.gather(*(legs.health.learn(each, key) for each in asked))
        known = 200 in told
        if not known and (refused := next((each for each in told if each in (401, 403)), 0)):
            raise Rejected(refused, "The instances do not take this key.", "AuthenticationError")
        merged: dict[str, Any] = {}
        for each, answered in zip(asked, told, strict=True):
            if answered == 200 or not known:  # with nobody there, what they said before
                for card in each.cards:
                    merged.setdefault(str(card.get("id")), card)
        if not merged and not known:
            raise Rejected(502, "No instance answered /v1/models; see /readyz.", "UpstreamError")
        return JSONResponse({"object": "list", "data": list(merged.values())})


def _check(forward: Forward, request: Request) -> None:
    if forward.gate.keys:
        forward.gate.check(request.headers.get("authorization", ""))


async def _rejected(_: Request, error: Exception) -> Response:
    assert isinstance(error, Rejected)
    headers, data = answer.render(error)
    named = {name.decode(): value.decode() for name, value in headers}
    return Response(data, error.status, named)


async def _nowhere(request: Request, error: Exception) -> Response:
    """No such path or method, in the form that clients of vLLM read."""
    assert isinstance(error, HTTPException)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    response = await _rejected(request, Rejected(error.status_code, str(error.detail), kind))
    response.headers.update(error.headers or {})
    return response


def instrument(app: App, protocol: str) -> Callable[[], None]:
    """Trace the control plane, if an endpoint is configured; gives back what ends it.

    The data path is not part of it: its spans are Records.
    """
    if not (os.environ.get(names.ENV_ENDPOINT) or os.environ.get(names.ENV_TRACES_ENDPOINT)):
        return lambda: None
    try:
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    except ImportError:
        return lambda: None  # never required
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    service = os.environ.get(names.ENV_SERVICE) or stages.SERVICES["router"]
    provider = TracerProvider(
        sampler=_sampler(app.forward.settings),
        resource=Resource.create({SERVICE_NAME: service}),
    )
    provider.add_span_processor(BatchSpanProcessor(_exporter(protocol)))
    FastAPIInstrumentor.instrument_app(
        app.control,
        tracer_provider=provider,
        excluded_urls="/health,/metrics,/readyz",  # polled all day
        exclude_spans=["send", "receive"],
    )
    return provider.shutdown


def _sampler(read: Settings) -> Sampler:
    """The data path's: the SDK's own would let callers decide who are not trusted."""
    from opentelemetry.sdk.trace import sampling

    name = read.sampler.removeprefix("parentbased_")
    known = {"always_on": sampling.ALWAYS_ON, "always_off": sampling.ALWAYS_OFF}
    root = known.get(name) or sampling.TraceIdRatioBased(read.ratio)
    return sampling.ParentBased(root) if read.trust and name != read.sampler else root


def _exporter(protocol: str) -> SpanExporter:
    """The SDK's own exporter, which reads the OTEL_EXPORTER_OTLP_* variables itself."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    return http.OTLPSpanExporter()
