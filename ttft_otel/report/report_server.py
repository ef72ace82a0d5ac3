# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel serve`: its web app, and HTTP and gRPC servers around one store, until SIGINT or SIGTERM.

The app has OTLP/HTTP receiver, pages, JSON API and answers to alerts, all on one port, so that an operator
has a single address to forward and to open in a firewall. Spans that were accepted are on disk before it
ends.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Final, cast

import grpc
import msgspec
import uvicorn
from anyio.to_thread import run_sync
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

from ttft_otel import __version__
from ttft_otel.http.bounded_connection import BoundedConnection
from ttft_otel.http.head_checks import CallerRules, HeadLimits
from ttft_otel.model import stages
from ttft_otel.report.assemble.summary import summarize
from ttft_otel.report.breakdown_source import (
    ComparedWindows,
    ExplainAnswer,
    Explainer,
    ExplainQuestion,
    ServeOptions,
    open_source,
)
from ttft_otel.report.receive import alert_webhook, receiver
from ttft_otel.report.receive.receiver import ArrivingBody, BodyBudget, Receiver, create_grpc_server
from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.show import json_answers, pages
from ttft_otel.report.store.database_reader import (
    MAX_REQUESTS,
    RequestFilter,
    StoredTrace,
    open_reader,
)
from ttft_otel.report.store.database_schema import StoreError
from ttft_otel.report.store.span_store import SpanStore, StoreUnavailableError

# An exporter sends its head at once; only a stalled or idle client takes longer.
MAX_WAIT_S: Final = 10.0  # seconds for the head of a request
MAX_CONNECTIONS: Final = 256  # with more, those that have waited longest are closed
SHUTDOWN_GRACE_S: Final = 3  # seconds for requests in progress at the end
STATIC_FOLDER: Final = Path(__file__).parent / "show" / "static"
SECURITY_HEADERS: Final = {
    # Span names and attributes come from anywhere: should one escape the templates, it cannot run.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Requests of a running server: a page from a cache would be out of date within seconds.
    "Cache-Control": "no-store",
}


class ReportServer(uvicorn.Server):
    """uvicorn's server, with gRPC on the same event loop and a bound on connections that wait.

    on_started: gets the server once it listens on http_port and grpc_port (-1 without gRPC).
    """

    def __init__(
        self,
        config: uvicorn.Config,
        span_receiver: Receiver | None,
        options: ServeOptions,
        on_started: Callable[[ReportServer], None],
    ) -> None:
        super().__init__(config)
        self.http_port = self.grpc_port = -1
        self._span_receiver = span_receiver
        self.options = options
        self._on_started = on_started
        self._grpc_server: grpc.aio.Server | None = None
        # By connection: its last request (uvicorn's object), whether that has ended, and since when.
        self._waits: dict[Any, tuple[Any, bool, float]] = {}

    def close(self) -> None:
        """End after requests in progress."""
        # Read by uvicorn's loop at its next tick, so any thread may set it.
        self.should_exit = True

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Bind (`sockets` as in uvicorn), then call on_started. Raises StoreError for gRPC's port."""
        # gRPC first: if its port is taken, nothing has begun to listen yet.
        if self._span_receiver and self.options.grpc_port >= 0:
            self._grpc_server = self._bind_grpc(self._span_receiver)
            await self._grpc_server.start()
        try:
            await super().startup(sockets)  # type: ignore[arg-type]
        # uvicorn's way to say that it cannot bind; gRPC is listening already.
        except SystemExit:
            await self._stop_grpc()
            raise
        # What was built until now stays: the garbage collector need not look through it again and again,
        # which was a tenth of what it takes to receive.
        gc.collect()
        gc.freeze()
        if self.started:
            # Asked of the socket: port 0 is known only now.
            self.http_port = self.servers[0].sockets[0].getsockname()[1]
            self._on_started(self)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: close connections that have waited too long for a request."""
        self._close_overdue()
        return await super().on_tick(counter)

    def _close_overdue(self) -> None:
        """Close what has waited for MAX_WAIT_S, and the oldest beyond MAX_CONNECTIONS.

        uvicorn closes a kept-alive connection between two requests, but neither one that never sends a
        request nor one that stops in the middle of a head.
        """
        now_s = monotonic()
        waits: dict[Any, tuple[Any, bool, float]] = {}
        connections: Iterable[Any] = self.server_state.connections
        for connection in connections:
            request = connection.cycle
            is_waiting = request is None or request.response_complete
            before = self._waits.get(connection)
            # Another request, or its end, starts the wait anew.
            is_same = before is not None and before[0] is request and before[1] == is_waiting
            waits[connection] = before if before and is_same else (request, is_waiting, now_s)
        # Replaced as a whole, so that closed connections are forgotten.
        self._waits = waits
        # Waiting ones first, each group oldest first.
        ordered = sorted(waits.items(), key=lambda item: (not item[1][1], item[1][2]))
        excess = len(ordered) - MAX_CONNECTIONS
        for position, (connection, (_, is_waiting, since_s)) in enumerate(ordered):
            if position < excess or (is_waiting and now_s - since_s > MAX_WAIT_S):
                connection.transport.close()

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        # Side by side, so that both together take no longer than the grace.
        await asyncio.gather(super().shutdown(sockets), self._stop_grpc())  # type: ignore[arg-type]

    async def _stop_grpc(self) -> None:
        if self._grpc_server:
            await self._grpc_server.stop(SHUTDOWN_GRACE_S)

    def _bind_grpc(self, span_receiver: Receiver) -> grpc.aio.Server:
        server = create_grpc_server(span_receiver)
        wanted = self.options
        host = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
        try:
            self.grpc_port = server.add_insecure_port(f"{host}:{wanted.grpc_port}")
        except RuntimeError as error:
            raise StoreError(
                _describe_taken_port(wanted.host, wanted.grpc_port, "--grpc-port")
            ) from error
        return server


def run_server(options: ServeOptions, on_started: Callable[[ReportServer], None]) -> None:
    """Serve until a signal. Raises StoreError when the database or a port cannot be used."""
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises SIGTERM again after its shutdown: without a handler that would end the process
        # before the store is closed.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if options.tempo:
        _run_until_signal(options, None, on_started)
        return
    store = SpanStore(options.path, options.max_traces, options.max_age_hours, options.max_bytes)
    try:
        _run_until_signal(options, Receiver(store, options.token), on_started)
    finally:
        # After both servers: what they have accepted is still written.
        store.close()


def _run_until_signal(
    options: ServeOptions,
    span_receiver: Receiver | None,
    on_started: Callable[[ReportServer], None],
) -> None:
    web = create_app(span_receiver, options)
    config = uvicorn.Config(
        web,
        host=options.host,
        port=options.http_port,
        http=cast(
            type[asyncio.Protocol],
            functools.partial(
                BoundedConnection,
                head_limits=HeadLimits(),
                callers=CallerRules(options.host, options.allowed_hosts),
            ),
        ),
        # Nothing here speaks WebSocket, and uvicorn would look for a library.
        ws="none",
        # Exports come every few seconds from every server: a line for each would be all there is.
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        # Nobody needs to know which server and version this is.
        server_header=False,
    )
    server = ReportServer(config, span_receiver, options, on_started)
    try:
        server.run()
    except SystemExit as error:
        # uvicorn exits with a code when it cannot bind; without one it is our SIGTERM handler.
        if error.code:
            raise StoreError(
                _describe_taken_port(options.host, options.http_port, "--http-port")
            ) from error


def _describe_taken_port(host: str, port: int, option: str) -> str:
    return f"cannot listen on {host}:{port}: is it taken? choose another with {option} PORT"


def _read_filters(
    model: str = "", role: str = "", error: str = "", min_ttft_ms: str = "", last: str = ""
) -> RequestFilter:
    """The filter in a URL's query; an empty or invalid field does not restrict the result.

    min_ttft_ms: shortest TTFT, in milliseconds. last: number of requests, newest first.
    """
    return RequestFilter(
        model=model,
        role=role,
        error=error,
        # SQLite's integers have 64 bits, Python's have no end.
        min_us=min(int(_parse_number(min_ttft_ms, 0.0) * 1000), 1 << 50),
        last=min(int(_parse_number(last, 200.0)), MAX_REQUESTS),
    )


def _parse_number(text: str, default: float) -> float:
    try:
        # A form sends empty fields, too: no error, the field restricts nothing.
        value = float(text)
    except ValueError:
        return default
    # NaN fails both comparisons.
    return value if 0.0 <= value <= 1e15 else default


Filters = Annotated[RequestFilter, Depends(_read_filters)]


def _read_question(
    begin: Annotated[str, Query(alias="from")] = "",
    end: Annotated[str, Query(alias="to")] = "",
    model: str = "",
    slo_ms: str = "",
    trace: str = "",
) -> ExplainQuestion:
    """What a link of a dashboard or of an alert asks; what is empty or invalid restricts nothing.

    begin, end: Unix milliseconds. slo_ms: the objective, milliseconds. trace: one request, by its trace ID.
    """
    since_ms, until_ms = _parse_number(begin, 0.0), _parse_number(end, 0.0)
    until_ms = max(until_ms, since_ms) if until_ms else 0.0
    # Grafana writes a variable of several values as {a,b}, also for one, and all as a pattern.
    names = model.removeprefix("{").removesuffix("}").split(",")
    model = names[0] if len(names) == 1 and names[0] != ".*" else ""
    # SQLite's integers have 64 bits.
    wanted = RequestFilter(
        model=model,
        since_ns=min(int(since_ms) * 10**6, 1 << 62),
        until_ns=min(int(until_ms) * 10**6, 1 << 62),
        last=0 if since_ms else MAX_REQUESTS,
    )
    return ExplainQuestion("", trace, wanted, min(int(_parse_number(slo_ms, 0.0) * 1000), 1 << 50))


AskedQuestion = Annotated[ExplainQuestion, Depends(_read_question)]


def create_app(span_receiver: Receiver | None, options: ServeOptions) -> FastAPI:
    """Create the app. span_receiver: stores what is posted; None where pages show Tempo's requests."""

    async def check_token(request: Request) -> None:
        # Probes have no token, and files are public.
        is_open = request.url.path == "/healthz"
        # Starlette reads headers as Latin-1, and a token may be any text.
        authorization = request.headers.get("authorization", "").encode("latin-1")
        if not is_open and not receiver.is_admitted(authorization, options.token):
            challenge = {"WWW-Authenticate": 'Basic realm="ttft-otel"'}
            raise HTTPException(401, receiver.TOKEN_HINT, challenge)

    # No /docs: FastAPI's page would load its scripts from another site.
    app = FastAPI(
        title="ttft-otel",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(check_token)],
    )
    if span_receiver:
        # On the same port, so that OTEL_EXPORTER_OTLP_ENDPOINT is also the page's address.
        app.add_api_route(
            "/v1/traces", span_receiver.handle_post, methods=["POST"], include_in_schema=False
        )
    app.mount("/static", StaticFiles(directory=STATIC_FOLDER), name="static")
    app.add_exception_handler(StoreError, _answer_store_error)
    _add_health_route(app, span_receiver)
    _add_api_routes(app, options.source)
    _add_page_routes(app, options)
    if options.explain is not None:
        # An explanation reads up to a thousand requests: one at a time, so that spans are stored meanwhile.
        is_free = threading.Semaphore(1)
        _add_why_routes(app, options, options.explain, is_free)
        _add_alert_route(
            app, options, span_receiver.budget if span_receiver else BodyBudget(), is_free
        )
    return app


def _add_health_route(app: FastAPI, span_receiver: Receiver | None) -> None:
    @app.get("/healthz")
    # Plain functions, here and below: FastAPI runs them in threads, where SQLite may block.
    def healthz() -> JSONResponse:
        """200 while spans can be stored, else 503; counts of spans, and the last error."""
        if span_receiver is None:
            return JSONResponse({"status": "ok", "version": __version__})
        trouble = span_receiver.store.last_error
        with open_reader(span_receiver.store.path) as db:
            sizes = db.count_rows()
        content = {
            "status": "trouble" if trouble else "ok",
            "trouble": trouble or None,
            "stored": sizes,
            "received": dict(span_receiver.counts),
            "store": dict(span_receiver.store.counts),
            "version": __version__,
        }
        # For probes, which read nothing but the status.
        return JSONResponse(content, 503 if trouble else 200)


def _add_api_routes(app: FastAPI, source: SourceChoice) -> None:
    # `path`: clients choose request IDs, which may contain a slash.
    @app.get("/ttft_report/{request_id:path}")
    def ttft_report(request_id: str) -> Response:
        """The TTFT report of one request: by role and combined, in milliseconds."""
        with open_source(source) as opened:
            request = opened.find_request(request_id)
        return (
            JSONResponse(json_answers.build_report(request))
            if request
            else _answer_unknown("request", request_id)
        )

    @app.get("/api/requests")
    def list_requests(wanted: Filters) -> list[dict[str, Any]]:
        """The newest requests that match the filter."""
        with open_source(source) as opened:
            return [json_answers.describe_request(each) for each in opened.list_latest(wanted)]

    @app.get("/api/trace/{trace_id}")
    def get_trace(trace_id: str) -> Response:
        """All spans of one trace."""
        stored_trace = _find_trace(source, trace_id)
        return (
            JSONResponse(json_answers.describe_trace(stored_trace))
            if stored_trace
            else _answer_unknown("trace", trace_id)
        )

    @app.get("/api/summary")
    def get_summary(wanted: Filters) -> dict[str, Any]:
        """Percentiles over the newest requests that match the filter."""
        with open_source(source) as opened:
            return json_answers.describe_summary(summarize(opened.list_latest(wanted)))


def _add_page_routes(app: FastAPI, options: ServeOptions) -> None:
    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def index_page(wanted: Filters) -> HTMLResponse:
        with open_source(options.source) as opened:
            text = pages.render_index(
                opened.list_latest(wanted),
                wanted,
                opened.list_models(),
                options.explain is not None,
            )
        return HTMLResponse(text, headers=SECURITY_HEADERS)

    @app.get("/trace/{trace_id}", response_class=HTMLResponse, include_in_schema=False)
    def trace_page(trace_id: str) -> HTMLResponse:
        stored_trace = _find_trace(options.source, trace_id)
        if not stored_trace:
            text = pages.render_template("missing.html", trace_id=trace_id)
            return HTMLResponse(text, 404, SECURITY_HEADERS)
        text = pages.render_trace(stored_trace, options.explain is not None, options.grafana_url)
        return HTMLResponse(text, headers=SECURITY_HEADERS)

    @app.get("/stages.css", include_in_schema=False)
    def stages_css() -> Response:
        return Response(stages.build_style_sheet(), media_type="text/css")


def _add_why_routes(
    app: FastAPI, options: ServeOptions, explain: Explainer, is_free: threading.Semaphore
) -> None:
    def answer_page(question: ExplainQuestion | ComparedWindows) -> HTMLResponse:
        status = 200
        if is_free.acquire(blocking=False):
            try:
                answer = explain(options.source, question)
            finally:
                is_free.release()
        else:
            status = 503
            answer = ExplainAnswer.refuse(
                "Something else is being explained: try again in a moment."
            )
        text = (
            pages.render_diff(question, answer)
            if isinstance(question, ComparedWindows)
            else pages.render_why(question, answer, options.grafana_url)
        )
        return HTMLResponse(text, status, SECURITY_HEADERS)

    @app.get("/diff", response_class=HTMLResponse, include_in_schema=False)
    def diff_page(a: str = "2h..1h", b: str = "1h..", model: str = "") -> HTMLResponse:
        return answer_page(ComparedWindows(a, b, model))

    @app.get("/why", response_class=HTMLResponse, include_in_schema=False)
    def why_window_page(question: AskedQuestion) -> HTMLResponse:
        return answer_page(question)

    # `path`: clients choose request IDs, which may contain a slash.
    @app.get("/why/{request_id:path}", response_class=HTMLResponse, include_in_schema=False)
    def why_page(request_id: str) -> HTMLResponse:
        return answer_page(ExplainQuestion(request_id=request_id))


def _add_alert_route(
    app: FastAPI, options: ServeOptions, budget: BodyBudget, is_free: threading.Semaphore
) -> None:
    @app.post("/api/alerts")
    async def answer_alerts(request: Request) -> JSONResponse:
        """Explanations of the alerts that Alertmanager's webhook posts (version 4)."""
        # Another site's page may post only other types without being asked whether it may.
        if not request.headers.get("content-type", "").lower().startswith(receiver.JSON_TYPE):
            raise HTTPException(415, f"send {receiver.JSON_TYPE}")
        try:
            with budget.open_body() as body:
                reading = _read_bounded(request, budget, body)
                await asyncio.wait_for(reading, receiver.MAX_READ_S)
                group = alert_webhook.decode_group(body.data)
        except asyncio.TimeoutError as error:
            raise HTTPException(408, "the body did not arrive in time") from error
        except StoreUnavailableError as error:
            raise HTTPException(503, str(error)) from error
        except (
            msgspec.MsgspecError,
            UnicodeDecodeError,
            RecursionError,
            ClientDisconnect,
        ) as error:
            raise HTTPException(400, f"not of Alertmanager's version 4: {error}") from error
        if not is_free.acquire(blocking=False):
            # Upon which Alertmanager tries again.
            raise HTTPException(503, "something else is being explained: try again")
        try:
            return JSONResponse(await run_sync(alert_webhook.answer_group, options, group))
        finally:
            is_free.release()


async def _read_bounded(request: Request, budget: BodyBudget, body: ArrivingBody) -> None:
    """Read the body of a webhook. Raises HTTPException for one that is too large, StoreUnavailableError."""
    async for chunk in request.stream():
        if len(body.data) + len(chunk) > alert_webhook.MAX_BODY_BYTES:
            raise HTTPException(413, f"more than {alert_webhook.MAX_BODY_BYTES} bytes")
        budget.extend_body(body, chunk)


def _find_trace(source: SourceChoice, trace_id: str) -> StoredTrace | None:
    with open_source(source) as opened:
        # As IDs are stored and shown; the search itself takes both cases.
        return opened.find_trace(trace_id.lower())


def _answer_unknown(kind: str, name: str) -> JSONResponse:
    return JSONResponse(
        {
            "error": f"unknown_{kind}",
            kind: name,
            "message": f"no {kind} {name!r} is stored: not traced, not arrived yet, or removed",
        },
        404,
    )


async def _answer_store_error(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": "store", "message": str(error)}, 503)
