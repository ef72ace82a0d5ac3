# SPDX-License-Identifier: Apache-2.0
"""The control plane (health, models, metrics, /ttft_report) around the data path of endpoint.py.

command.py builds the application and runs it under uvicorn.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from ttft_otel import __version__
from ttft_otel.model.endpoints import MODELS_PATH
from ttft_otel.model.names import env_names
from ttft_otel.router.control.router_metrics import RouterMetrics
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.proxy.client_stream import render_error
from ttft_otel.router.proxy.endpoint import ProxyEndpoint
from ttft_otel.router.types import AsgiReceive, AsgiScope, AsgiSend

if TYPE_CHECKING:
    from ttft_otel.router.discovery.discovery import Discovery, FoundInstances

DATA_PATH_PREFIX: Final = "/v1/"
CLOSE_HEADER: Final = (b"connection", b"close")


class RouterApp:
    """The ASGI application: POST below /v1 is data and goes straight to `endpoint`.

    In front of FastAPI, not a Route inside it: whatever middleware or telemetry of its own FastAPI
    has then costs the data path nothing.
    """

    def __init__(
        self, endpoint: ProxyEndpoint, control_plane: FastAPI, metrics: RouterMetrics
    ) -> None:
        self.endpoint = endpoint
        self.control_plane = control_plane
        self.metrics = metrics
        self.admission = endpoint.admission
        self.found: FoundInstances | None = None  # where instances come and go
        self.allowed_hosts: tuple[str, ...] = ()  # further names that Host may have
        self.cors_origins: tuple[str, ...] = ()  # origins whose web pages may call the router

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        # All else, unknown paths and methods included, is for FastAPI to answer.
        is_data = scope["type"] == "http" and scope["method"] == "POST"
        if not (is_data and scope["path"].startswith(DATA_PATH_PREFIX)):
            await self.control_plane(
                scope,
                receive,
                _explain_startup_errors(send) if scope["type"] == "lifespan" else send,
            )
            return
        if self.admission.is_draining:
            send = _announce_close(send)
        # Only data is counted: a scrape or a probe under way must not delay a stop.
        self.admission.requests_under_way += 1
        try:
            await self.endpoint(scope, receive, send)
        finally:
            self.admission.requests_under_way -= 1


def build_app(
    endpoint: ProxyEndpoint,
    handoff_counts: Callable[[], Mapping[str, int]],
    background: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    discovery: Discovery | None = None,
) -> RouterApp:
    """Build the application from data path and control plane.

    handoff_counts: returns counts of records by result. background: entered while the application runs.
    discovery: whose sources /readyz and /metrics describe, None without --discover.
    """

    @asynccontextmanager
    async def run_lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            # In this order: what runs in the background changes a pool that is probed by then.
            await endpoint.upstream.start()
            async with background():
                yield
        finally:
            # First: releases are sent by the session that is closed next.
            await endpoint.prefill_decode.wait_releases()
            await endpoint.upstream.close()

    app = FastAPI(
        title="ttft-otel router",
        version=__version__,
        lifespan=run_lifespan,
        openapi_url=None,  # it would describe the control plane, which is in the docs, without a key
    )
    metrics = RouterMetrics(endpoint, handoff_counts, discovery)
    _add_error_handlers(app, endpoint.admission.refusal_counts)
    _add_health_routes(app, endpoint, discovery)
    _add_model_routes(app, endpoint)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.render_text(), media_type=CONTENT_TYPE_LATEST)

    # `:path`, as a client may choose an ID with slashes in it.
    @app.get("/ttft_report/{request_id:path}")
    async def get_ttft_report(request_id: str, request: Request) -> JSONResponse:
        # An ID may be guessed, so reports are only for whoever has the key of their request.
        owner = _check_api_key(endpoint, request)
        report = await endpoint.reports.find_report(owner, request_id)
        if report is not None:
            return JSONResponse(report)
        max_reports = endpoint.reports.max_reports
        message = f"No report for {request_id[:256]!r}: the newest {max_reports} are kept."
        if endpoint.send_record is None:
            message = (
                f"No reports: tracing is off. Start the router without {env_names.TTFT_OTEL}=0."
            )
        raise RequestRejected(404, message)

    return RouterApp(endpoint, app, metrics)


def _announce_close(send: AsgiSend) -> AsgiSend:
    """Say that the connection ends with this response: a client that kept it would meet a refusal later."""

    async def send_last(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], CLOSE_HEADER]}
        await send(message)

    return send_last


def _explain_startup_errors(send: AsgiSend) -> AsgiSend:
    """Report configuration errors at startup by message and remedy, without a traceback."""

    async def send_explained(message: Any) -> None:
        # Starlette sends this message while it handles the error of the startup.
        error = sys.exc_info()[1]
        if message["type"] == "lifespan.startup.failed" and isinstance(error, ValueError):
            message = {**message, "message": f"ttft-otel cannot start: {error}"}
        await send(message)

    return send_explained


def _add_health_routes(app: FastAPI, endpoint: ProxyEndpoint, discovery: Discovery | None) -> None:
    @app.get("/healthz")
    async def get_healthz() -> dict[str, str]:
        # Alive while the event loop turns: a restart would not bring instances back.
        return {"status": "ok"}

    @app.get("/health")
    @app.get("/readyz")
    async def get_readiness() -> JSONResponse:
        """Ready when each leg has an instance that is not failed, until the router is to stop."""
        upstream = endpoint.upstream
        if not endpoint.admission.is_draining:
            await upstream.health_monitor.wait_probed()
        states: dict[str, dict[str, str]] = {}
        for instance in upstream.pool:
            states.setdefault(instance.leg, {})[instance.url] = instance.state
        missing_legs = upstream.pool.list_missing_legs()
        # One healthy instance per leg can serve; a draining one takes nothing new.
        is_ready = not missing_legs and all("healthy" in leg.values() for leg in states.values())
        body: dict[str, Any] = {"status": "ready" if is_ready else "not ready", "legs": states}
        if missing_legs:
            body["reason"] = f"there is no instance yet for {' and '.join(missing_legs)}"
        if discovery is not None:
            body["discovery"] = discovery.describe_sources()
        # Said while requests still pass: balancers have --drain-delay to notice.
        if endpoint.admission.is_draining:
            is_ready = False
            body["status"] = "draining"
        return JSONResponse(body, 200 if is_ready else 503)


def _add_model_routes(app: FastAPI, endpoint: ProxyEndpoint) -> None:
    @app.get(MODELS_PATH)
    async def list_models(request: Request) -> JSONResponse:
        _check_api_key(endpoint, request)
        upstream = endpoint.upstream
        # the client's key is the instances' one unless we have keys of our own
        authorization = (
            "" if endpoint.admission.client_keys else request.headers.get("authorization", "")
        )
        # Asked anew: an adapter may have been loaded a moment ago.
        statuses = await upstream.health_monitor.refresh_leg_models(
            endpoint.answering_leg, authorization
        )
        any_answered = 200 in statuses.values()
        if not any_answered and (
            refused_status := next((each for each in statuses.values() if each in (401, 403)), 0)
        ):
            raise RequestRejected(refused_status, "The instances do not take this key.")
        merged: dict[str, Any] = {}
        for instance, status in statuses.items():
            if status == 200 or not any_answered:  # with nobody there, what they said before
                for card in instance.model_cards:
                    merged.setdefault(card["id"], card)
        if not merged and not any_answered:
            raise RequestRejected(502, "No instance answered /v1/models; see /readyz.")
        return JSONResponse({"object": "list", "data": list(merged.values())})


def _check_api_key(endpoint: ProxyEndpoint, request: Request) -> str:
    """The owner, "" where keys are not checked. Raises RequestRejected."""
    if not endpoint.admission.client_keys:
        return ""
    # Starlette reads headers as Latin-1, and a key may be any text.
    text = request.headers.get("authorization", "").encode("latin-1")
    return endpoint.admission.check_api_key(text.decode("utf-8", "surrogateescape"))


def _add_error_handlers(app: FastAPI, refusal_counts: Counter[str]) -> None:
    """Render what the control plane refuses in OpenAI's form, and count it."""

    async def render_rejection(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRejected)
        refusal_counts[error.reason] += 1
        headers, data = render_error(error)
        header_map = {name.decode(): value.decode() for name, value in headers}
        return Response(data, error.status, header_map)

    async def render_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        rejection = RequestRejected(error.status_code, str(error.detail))
        response = await render_rejection(request, rejection)
        # The Allow header of a 405, for example.
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(RequestRejected, render_rejection)
    app.add_exception_handler(HTTPException, render_http_error)
