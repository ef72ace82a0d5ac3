# SPDX-License-Identifier: Apache-2.0
"""The control plane (health, models, metrics, /ttft_report) around forward.py's data path.

command.py builds it and gives it to uvicorn; operators and Prometheus read it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from ttft_otel import __version__, guard, meter, names, stages
from ttft_otel.router.answer import Send
from ttft_otel.router.choose import Instance
from ttft_otel.router.forward import Forward, Receive, Scope

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

ASK: Final = aiohttp.ClientTimeout(total=5.0)  # of the control plane's own questions
DATA: Final = "/v1/"


class App:
    """The ASGI application: POST below /v1 is data and goes straight to `forward`.

    In front of FastAPI, not a Route inside it: whatever middleware or telemetry of its own FastAPI
    has then costs the data path nothing.
    """

    def __init__(self, forward: Forward, control: FastAPI) -> None:
        self.forward, self.control = forward, control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        data = scope["type"] == "http" and scope["method"] == "POST"
        if data and scope["path"].startswith(DATA):
            await self.forward(scope, receive, send)
        else:
            await self.control(scope, receive, send)


def build(forward: Forward, counts: Callable[[], Mapping[str, int]]) -> App:
    """Put the data path and the control plane together; `counts` are handoff's."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await forward.legs.start()
        try:
            yield
        finally:
            await forward.legs.close()

    app = FastAPI(title="ttft-otel router", version=__version__, lifespan=lifespan)
    _health(app, forward)
    _models(app, forward)
    _metrics(app, counts)

    @app.get("/ttft_report/{request_id:path}")
    async def ttft_report(request_id: str) -> JSONResponse:
        found = forward.reports.get(request_id)
        if found is not None:
            return JSONResponse(found)
        most = forward.reports.most
        return _error(404, f"No report for {request_id[:256]!r}: the newest {most} are kept.")

    return App(forward, app)


def _health(app: FastAPI, forward: Forward) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/health")
    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        """Ready when each leg has an instance that answers its own /health."""
        asked = list(forward.legs.fleet)
        answers = await asyncio.gather(*(_alive(forward, each) for each in asked))
        legs: dict[str, dict[str, bool]] = {}
        for each, alive in zip(asked, answers, strict=True):
            legs.setdefault(each.leg, {})[each.url] = alive
        ready = all(any(states.values()) for states in legs.values())
        body = {"status": "ready" if ready else "not ready", "legs": legs}
        return JSONResponse(body, 200 if ready else 503)


async def _alive(forward: Forward, asked: Instance) -> bool:
    try:
        async with forward.legs.session.get(f"{asked.url}/health", timeout=ASK) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return False


def _models(app: FastAPI, forward: Forward) -> None:
    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """Every backend's models, each id once."""
        asked = forward.legs.fleet.get(forward.last, ())
        answers = await asyncio.gather(*(_list(forward, each) for each in asked))
        if asked and all(answer is None for answer in answers):
            return _error(502, "No backend answered /v1/models; see /readyz.")
        merged: dict[str, Any] = {}
        for answer in answers:
            for model in answer or ():
                if isinstance(model, dict):
                    merged.setdefault(str(model.get("id")), model)
        return JSONResponse({"object": "list", "data": list(merged.values())})


async def _list(forward: Forward, asked: Instance) -> list[Any] | None:
    try:
        async with forward.legs.session.get(f"{asked.url}/v1/models", timeout=ASK) as response:
            body = await response.json() if response.status == 200 else None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
        return None
    data = body.get("data") if isinstance(body, dict) else None
    return data if isinstance(data, list) else None


class _Counts:
    """Prometheus collector over counters that live elsewhere; read at each scrape."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self.counts = counts

    def collect(self) -> Iterable[Metric]:
        counts = self.counts()
        records = CounterMetricFamily(names.METRIC_RECORDS, "Records given to the exporter.")
        records.add_metric([], counts.get("sent", 0))
        dropped = meter.lost(
            names.METRIC_DROPPED, {"handoff": counts.get("dropped", 0)}, ["handoff"]
        )
        errors = CounterMetricFamily(
            names.METRIC_ERRORS, "Errors of the tracing itself, caught.", labels=["place"]
        )
        for place, number in guard.errors.items():
            errors.add_metric([place], number)
        return (records, dropped, errors, meter.lost(names.METRIC_LOST, counts))


def _metrics(app: FastAPI, counts: Callable[[], Mapping[str, int]]) -> None:
    registry = CollectorRegistry()
    registry.register(_Counts(counts))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _error(status: int, message: str) -> JSONResponse:
    kind = "NotFoundError" if status == 404 else "UpstreamError"
    content = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": content}, status)


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
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}))
    provider.add_span_processor(BatchSpanProcessor(_exporter(protocol)))
    FastAPIInstrumentor.instrument_app(
        app.control,
        tracer_provider=provider,
        excluded_urls="/health,/metrics,/readyz",  # polled all day
        exclude_spans=["send", "receive"],
    )
    return provider.shutdown


def _exporter(protocol: str) -> SpanExporter:
    """The SDK's own exporter, which reads the OTEL_EXPORTER_OTLP_* variables itself."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    return http.OTLPSpanExporter()
