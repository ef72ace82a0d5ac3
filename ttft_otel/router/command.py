# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel router`: flags and environment in, a running server out; cli.py offers it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Final

import click
import uvicorn

from ttft_otel import handoff, names, settings
from ttft_otel.router import app as control
from ttft_otel.router.choose import Instance, instance
from ttft_otel.router.forward import LARGEST, Forward
from ttft_otel.router.legs import Legs
from ttft_otel.router.plan import MODES, STRIP
from ttft_otel.router.report import KEPT, Reports

ENV: Final = "TTFT_OTEL_ROUTER_"
GRACE: Final = 30  # seconds for running answers when the router is told to stop

EXAMPLES: Final = """
\b
One encoder and two prefill-decode servers:
  ttft-otel router --encoder http://127.0.0.1:8001 \\
                   --backend http://127.0.0.1:8002 --backend http://127.0.0.1:8003
\b
One plain vLLM server:
  ttft-otel router --backend http://127.0.0.1:8001 --port 8000
\b
The same by environment (lists are separated by blanks):
  TTFT_OTEL_ROUTER_BACKEND="http://127.0.0.1:8002 http://127.0.0.1:8003" ttft-otel router
\b
Where a request's time went:
  curl http://127.0.0.1:8000/ttft_report/REQUEST_ID
"""


@click.command("router", epilog=EXAMPLES)
@click.option(
    "--encoder",
    "encoders",
    multiple=True,
    metavar="URL",
    envvar=f"{ENV}ENCODER",
    show_envvar=True,
    help="An encoder instance; repeat for more. Without any, backends encode images themselves.",
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="URL",
    envvar=f"{ENV}BACKEND",
    show_envvar=True,
    help="A server that answers: prefill-decode behind encoders, plain otherwise. Repeatable.",
)
@click.option(
    "--prefill",
    "prefills",
    multiple=True,
    metavar="URL",
    envvar=f"{ENV}PREFILL",
    show_envvar=True,
    help="A prefill instance; repeat for more. Needs --decode, takes the place of --backend.",
)
@click.option(
    "--decode",
    "decodes",
    multiple=True,
    metavar="URL",
    envvar=f"{ENV}DECODE",
    show_envvar=True,
    help="A decode instance; repeat for more.",
)
@click.option(
    "--first-token",
    type=click.Choice(MODES),
    default=STRIP,
    show_default=True,
    envvar=f"{ENV}FIRST_TOKEN",
    show_envvar=True,
    help="How the prefill instance's token reaches the client; see docs/router.md.",
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, envvar=f"{ENV}HOST", show_envvar=True
)
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    envvar=f"{ENV}PORT",
    show_envvar=True,
)
@click.option(
    "--max-body",
    default=LARGEST,
    show_default=True,
    type=click.IntRange(min=1),
    envvar=f"{ENV}MAX_BODY",
    show_envvar=True,
    help="Largest request body in bytes; more is answered with 413.",
)
@click.option(
    "--reports",
    default=KEPT,
    show_default=True,
    type=click.IntRange(min=1),
    envvar=f"{ENV}REPORTS",
    show_envvar=True,
    help="How many requests /ttft_report remembers.",
)
def command(
    encoders: tuple[str, ...],
    backends: tuple[str, ...],
    prefills: tuple[str, ...],
    decodes: tuple[str, ...],
    first_token: str,
    host: str,
    port: int,
    max_body: int,
    reports: int,
) -> None:
    """Route requests to vLLM servers and trace each one's time to first token.

    Images of chat requests go to the encoders first, all at once; then the whole request goes to a
    backend, or to a prefill and then to a decode instance. Answers are passed on byte by byte.
    Spans go where the OTEL_EXPORTER_OTLP_* variables say; TTFT_OTEL=0 makes none.
    """
    read = settings.read()
    if problems := settings.validate(read):
        raise click.UsageError("\n".join(problems))
    if bool(prefills) != bool(decodes) or bool(backends) == bool(decodes):
        raise click.UsageError("Give either --backend, or --prefill and --decode together.")
    last = "prefill_decode" if encoders else "mono"
    given = {"encode": encoders, "prefill": prefills, "decode": decodes, last: backends}
    legs = Legs({leg: _fleet(urls, leg) for leg, urls in given.items() if urls})
    # Starting a router asks for its spans: only an explicit "off" turns them off.
    off = names.ENV_ON in os.environ and not read.on
    send = (lambda _: False) if off else handoff.sender().send
    forward = Forward(legs, read, send, Reports(reports), max_body, first_token)
    app = control.build(forward, handoff.counts)
    end: Callable[[], None] = _nothing if off else control.instrument(app, read.protocol)
    try:
        serve(app, host, port)
    finally:
        end()


def serve(app: control.App, host: str, port: int) -> None:
    """Run until told to stop; the legs' own Date and Server headers pass through."""
    # uvicorn raises SIGTERM again when it is done: without a handler that would skip the exit's
    # drain of the last records
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvicorn.run(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        log_level="warning",
        date_header=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE,
    )


def _fleet(urls: tuple[str, ...], leg: str) -> tuple[Instance, ...]:
    try:
        return tuple(instance(url, leg) for url in urls)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _nothing() -> None:
    """Nothing was started that would have to end."""
