# SPDX-License-Identifier: Apache-2.0
"""The web app of `ttft-otel serve`: OTLP/HTTP receiver, pages and JSON API; report_server.py runs it.

All on one port, so that an operator has a single address to forward and to open in a firewall.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.staticfiles import StaticFiles

from ttft_otel import __version__
from ttft_otel.model import palette
from ttft_otel.report.assemble.summary import summarize
from ttft_otel.report.receive import receiver
from ttft_otel.report.receive.receiver import Receiver
from ttft_otel.report.show import json_answers, pages
from ttft_otel.report.store.database_reader import (
    MAX_REQUESTS,
    RequestFilter,
    StoredTrace,
    open_reader,
)
from ttft_otel.report.store.database_schema import StoreError

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
    return value if 0.0 <= value <= 1e12 else default


Filters = Annotated[RequestFilter, Depends(_read_filters)]


# Sentences why a request took so long, by the database's path and the request's ID.
RequestExplainer = Callable[[Path, str], list[str]]


def create_app(
    span_receiver: Receiver,
    explain_request: RequestExplainer | None = None,
) -> FastAPI:
    """Create the app.

    span_receiver: stores what is posted; pages read the same database.
    explain_request: answers "Why?" of a request's page, which has no such link without it.
    """

    async def check_token(request: Request) -> None:
        # Probes have no token, and files are public.
        is_open = request.url.path == "/healthz"
        # Starlette reads headers as Latin-1, and a token may be any text.
        authorization = request.headers.get("authorization", "").encode("latin-1")
        if not is_open and not span_receiver.admits(authorization):
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
    # On the same port, so that OTEL_EXPORTER_OTLP_ENDPOINT is also the page's address.
    app.include_router(receiver.create_routes(span_receiver))
    app.mount("/static", StaticFiles(directory=STATIC_FOLDER), name="static")
    app.add_exception_handler(StoreError, _answer_store_error)
    _add_health_route(app, span_receiver)
    _add_api_routes(app, span_receiver.store.path)
    _add_page_routes(app, span_receiver.store.path, is_explained=explain_request is not None)
    if explain_request is not None:
        _add_why_route(app, span_receiver.store.path, explain_request)
    return app


def _add_health_route(app: FastAPI, span_receiver: Receiver) -> None:
    @app.get("/healthz")
    # Plain functions, here and below: FastAPI runs them in threads, where SQLite may block.
    def healthz() -> JSONResponse:
        """200 while spans can be stored, else 503; counts of spans, and the last error."""
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


def _add_api_routes(app: FastAPI, path: Path) -> None:
    # `path`: clients choose request IDs, which may contain a slash.
    @app.get("/ttft_report/{request_id:path}")
    def ttft_report(request_id: str) -> Response:
        """The TTFT report of one request: by role and combined, in milliseconds."""
        with open_reader(path) as db:
            request = db.find_request(request_id)
        return (
            JSONResponse(json_answers.build_report(request))
            if request
            else _answer_unknown("request", request_id)
        )

    @app.get("/api/requests")
    def list_requests(wanted: Filters) -> list[dict[str, Any]]:
        """The newest requests that match the filter."""
        with open_reader(path) as db:
            return [json_answers.describe_request(each) for each in db.list_latest(wanted)]

    @app.get("/api/trace/{trace_id}")
    def get_trace(trace_id: str) -> Response:
        """All spans of one trace."""
        stored_trace = _find_trace(path, trace_id)
        return (
            JSONResponse(json_answers.describe_trace(stored_trace))
            if stored_trace
            else _answer_unknown("trace", trace_id)
        )

    @app.get("/api/summary")
    def get_summary(wanted: Filters) -> dict[str, Any]:
        """Percentiles over the newest requests that match the filter."""
        with open_reader(path) as db:
            return json_answers.describe_summary(summarize(db.list_latest(wanted)))


def _add_page_routes(app: FastAPI, path: Path, is_explained: bool) -> None:
    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def index_page(wanted: Filters) -> HTMLResponse:
        with open_reader(path) as db:
            text = pages.render_index(db.list_latest(wanted), wanted, db.list_models())
        return HTMLResponse(text, headers=SECURITY_HEADERS)

    @app.get("/trace/{trace_id}", response_class=HTMLResponse, include_in_schema=False)
    def trace_page(trace_id: str) -> HTMLResponse:
        stored_trace = _find_trace(path, trace_id)
        if not stored_trace:
            return HTMLResponse(pages.render_missing(trace_id), 404, SECURITY_HEADERS)
        text = pages.render_trace(stored_trace, is_explained)
        return HTMLResponse(text, headers=SECURITY_HEADERS)

    @app.get("/stages.css", include_in_schema=False)
    def stages_css() -> Response:
        return Response(palette.build_style_sheet(), media_type="text/css")


def _add_why_route(app: FastAPI, path: Path, explain_request: RequestExplainer) -> None:
    # It reads up to a thousand requests: one at a time, so that spans are stored meanwhile.
    is_free = threading.Semaphore(1)

    # `path`: clients choose request IDs, which may contain a slash.
    @app.get("/why/{request_id:path}", response_class=HTMLResponse, include_in_schema=False)
    def why_page(request_id: str) -> HTMLResponse:
        if not is_free.acquire(blocking=False):
            busy = ["Another request is being explained: try again in a moment."]
            return HTMLResponse(pages.render_why(request_id, busy), 503, SECURITY_HEADERS)
        try:
            sentences = explain_request(path, request_id)
        finally:
            is_free.release()
        return HTMLResponse(pages.render_why(request_id, sentences), headers=SECURITY_HEADERS)


def _find_trace(path: Path, trace_id: str) -> StoredTrace | None:
    with open_reader(path) as db:
        # As IDs are stored and shown; the search itself takes both cases.
        return db.find_trace(trace_id.lower())


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
