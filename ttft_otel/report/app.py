# SPDX-License-Identifier: Apache-2.0
"""The web app of `ttft-otel serve`: OTLP in, page and JSON out, on one port; server.py runs it.

One port, because one address is what an operator has to remember, forward and firewall.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles

from ttft_otel import __version__, palette
from ttft_otel.report import answer, pages, receiver
from ttft_otel.report.query import MOST, Trace, Wanted, reader
from ttft_otel.report.receiver import Receiver
from ttft_otel.report.schema import Trouble
from ttft_otel.report.summary import summarize

HERE: Final = Path(__file__).parent
LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]", "::1")
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def filters(
    model: str = "", role: str = "", error: str = "", min_ttft_ms: str = "", last: str = ""
) -> Wanted:
    """Read the page's form; an empty or unreadable field does not narrow."""
    return Wanted(
        model=model,
        role=role,
        error=error,
        min_us=min(int(_number(min_ttft_ms, 0.0) * 1000), 1 << 50),
        last=min(int(_number(last, 200.0)), MOST),
    )


def _number(text: str, default: float) -> float:
    try:
        value = float(text)
    except ValueError:
        return default
    return value if 0.0 <= value <= 1e12 else default


Filters = Annotated[Wanted, Depends(filters)]


def create(taking: Receiver, hosts: Sequence[str] = ("*",)) -> FastAPI:
    """Make the app around a receiver. hosts: Host headers accepted, against DNS rebinding."""
    app = FastAPI(title="ttft-otel", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    app.include_router(receiver.routes(taking))
    app.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    app.add_exception_handler(Trouble, _trouble)
    _health(app, taking)
    _api(app, taking.store.path)
    _html(app, taking.store.path)
    return app


def _health(app: FastAPI, taking: Receiver) -> None:
    @app.get("/healthz")
    def healthz() -> JSONResponse:
        """200 while spans can be stored; what was stored, refused, evicted; the last trouble."""
        trouble = taking.store.trouble
        with reader(taking.store.path) as db:
            sizes = db.sizes()
        content = {
            "status": "trouble" if trouble else "ok",
            "trouble": trouble or None,
            "stored": sizes,
            "received": dict(taking.counts),
            "store": dict(taking.store.counts),
            "version": __version__,
        }
        return JSONResponse(content, 503 if trouble else 200)


def _api(app: FastAPI, path: Path) -> None:
    @app.get("/ttft_report/{request_id:path}")
    def ttft_report(request_id: str) -> Response:
        """The original TTFT report: by role and combined, milliseconds."""
        with reader(path) as db:
            found = db.request(request_id)
        return JSONResponse(answer.report(found)) if found else _unknown("request", request_id)

    @app.get("/api/requests")
    def requests(wanted: Filters) -> list[dict[str, Any]]:
        """The newest requests, filtered."""
        with reader(path) as db:
            return [answer.request(each) for each in db.latest(wanted)]

    @app.get("/api/trace/{trace_id}")
    def trace(trace_id: str) -> Response:
        """All spans of one trace."""
        found = _trace(path, trace_id)
        return JSONResponse(answer.trace(found)) if found else _unknown("trace", trace_id)

    @app.get("/api/summary")
    def summary(wanted: Filters) -> dict[str, Any]:
        """Percentiles over the newest requests, filtered."""
        with reader(path) as db:
            return answer.summary(summarize(db.latest(wanted)))


def _html(app: FastAPI, path: Path) -> None:
    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def index(wanted: Filters) -> HTMLResponse:
        with reader(path) as db:
            text = pages.index(db.latest(wanted), wanted, db.models())
        return HTMLResponse(text, headers=HEADERS)

    @app.get("/trace/{trace_id}", response_class=HTMLResponse, include_in_schema=False)
    def trace(trace_id: str) -> HTMLResponse:
        found = _trace(path, trace_id)
        if not found:
            return HTMLResponse(pages.missing(trace_id), 404, HEADERS)
        return HTMLResponse(pages.trace(found), headers=HEADERS)

    @app.get("/stages.css", include_in_schema=False)
    def stages_css() -> Response:
        return Response(palette.sheet(), media_type="text/css")


def _trace(path: Path, trace_id: str) -> Trace | None:
    with reader(path) as db:
        return db.trace(trace_id.lower())


def _unknown(what: str, name: str) -> JSONResponse:
    return JSONResponse(
        {
            "error": f"unknown_{what}",
            what: name,
            "message": f"no {what} {name!r} is stored: not traced, not here yet, or evicted",
        },
        404,
    )


async def _trouble(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": "store", "message": str(error)}, 503)
