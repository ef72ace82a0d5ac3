# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel router`: flags, environment and file in, a running server out; cli.py offers it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import click

from ttft_otel import handoff, names, settings
from ttft_otel.router import admin, config, flags, fleet, health, plan, retry
from ttft_otel.router import app as control
from ttft_otel.router.config import Options, option
from ttft_otel.router.forward import LARGEST, Forward
from ttft_otel.router.gate import Gate
from ttft_otel.router.legs import Legs
from ttft_otel.router.report import KEPT, Reports
from ttft_otel.router.server import serve

DRAIN: Final = 30.0  # seconds for running answers when the router is told to stop

EXAMPLES: Final = """
\b
One plain vLLM server:
  ttft-otel router --backend http://127.0.0.1:8001 --port 8000
\b
One encoder and two prefill-decode servers:
  ttft-otel router --encoder http://127.0.0.1:8001 \\
                   --backend http://127.0.0.1:8002 --backend http://127.0.0.1:8003
\b
Prefill and decode apart, with an encoder before them or without:
  ttft-otel router --prefill http://127.0.0.1:8002 --decode http://127.0.0.1:8003
  ttft-otel router --encoder http://127.0.0.1:8001 \\
                   --prefill http://127.0.0.1:8002 --decode http://127.0.0.1:8003
\b
The same by environment (lists are separated by blanks):
  TTFT_OTEL_ROUTER_BACKEND="http://127.0.0.1:8002 http://127.0.0.1:8003" ttft-otel router
\b
The same from a file, flags without their dashes; `kill -HUP` reads it again:
  printf 'backend: [http://127.0.0.1:8002]\\nport: 8000\\n' > router.yaml
  ttft-otel router --config router.yaml
\b
Where a request's time went:
  curl http://127.0.0.1:8000/ttft_report/REQUEST_ID
"""

log: Final = logging.getLogger("ttft_otel")


@click.command("router", cls=config.Command, epilog=EXAMPLES)
@config.file("--config", metavar="FILE", help="YAML, a line for each flag; SIGHUP reads it again.")
@option(
    "--encoder",
    multiple=True,
    metavar="URL",
    help="An encoder instance; repeat for more. Without any, images are encoded where they are used.",
)
@option(
    "--prefill",
    multiple=True,
    metavar="URL",
    help="A prefill instance; repeat for more. Needs --decode, takes the place of --backend.",
)
@option("--decode", multiple=True, metavar="URL", help="A decode instance; repeat for more.")
@option(
    "--backend",
    multiple=True,
    metavar="URL",
    help="A server that answers: prefill-decode behind encoders, plain otherwise. Repeatable.",
)
@option(
    "--first-token",
    type=click.Choice(plan.MODES),
    default=plan.STRIP,
    help="How the prefill instance's token reaches the client; see docs/router.md.",
)
@option("--stream-prefill-token", is_flag=True, help="The same as --first-token strip.")
@option("--host", default="127.0.0.1", help="The address to listen on.")
@option("--port", default=8000, type=click.IntRange(0, 65535), help="The port; 0: any free one.")
@option(
    "--max-body",
    default=LARGEST,
    type=click.IntRange(min=1),
    help="Largest request body in bytes; more is answered with 413.",
)
@option(
    "--reports",
    default=KEPT,
    type=click.IntRange(min=1),
    help="How many requests /ttft_report remembers.",
)
@option(
    "--api-key",
    multiple=True,
    callback=config.filled,
    metavar="KEY",
    help="Clients must send one of these; without any, their Authorization goes on as it came.",
)
@option("--upstream-key", default="", metavar="KEY", help="The key that instances ask for.")
@option(
    "--trust-trace-headers",
    is_flag=True,
    envvar=[f"{config.ENV}TRUST_TRACE_HEADERS", names.ENV_TRUST],
    help="Callers decide by traceparent what is sampled, not only what it belongs to.",
)
@option(
    "--health-interval",
    default=health.INTERVAL,
    type=click.FloatRange(0.05),
    help="Seconds between two probes of an instance.",
)
@option(
    "--retries",
    default=retry.RETRIES,
    type=click.IntRange(0, 10),
    help="Other instances that a request may be tried on before its first byte.",
)
@option(
    "--retry-budget",
    default=retry.RATIO,
    type=click.FloatRange(0, 1),
    help="Retries as a share of all calls to instances.",
)
@option(
    "--breaker-failures",
    default=fleet.FAILURES,
    type=click.IntRange(min=1),
    help="Failures in a row after which an instance gets nothing for a while.",
)
@option(
    "--drain-delay",
    default=0.0,
    type=click.FloatRange(0),
    help="Seconds after SIGTERM in which new requests are still taken.",
)
@option(
    "--drain-timeout",
    default=DRAIN,
    type=click.FloatRange(0),
    help="Seconds after SIGTERM in which running answers may end.",
)
@option(
    "--admin-port",
    type=click.IntRange(0, 65535),
    help="A port on loopback with GET and POST /instances; none without it.",
)
@option("--admin-token", default="", metavar="TOKEN", help="What /instances asks for.")
@flags.options(option)
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Route requests to vLLM servers and trace each one's time to first token.

    Images of chat requests go to the encoders first, all at once; then the whole request goes to a
    backend, or to a prefill and then to a decode instance. Answers are passed on byte by byte.
    Spans go where the OTEL_EXPORTER_OTLP_* variables say; TTFT_OTEL=0 makes none.
    """
    wanted = Options(**given)
    read = dataclasses.replace(settings.read(), trust=wanted.trust_trace_headers)
    if problems := settings.validate(read):
        raise click.UsageError("\n".join(problems))
    # Starting a router asks for its spans: only an explicit "off" turns them off.
    off = names.ENV_ON in os.environ and not read.on
    app = build(wanted, read, None if off else handoff.sender().send)
    end: Callable[[], None] = _nothing if off else control.instrument(app, read.protocol)
    try:
        serve(
            app,
            wanted.host,
            wanted.port,
            wanted.drain_delay,
            wanted.drain_timeout,
            Reload(ctx, wanted, app),
        )
    finally:
        end()


def build(
    wanted: Options, read: settings.Settings, send: Callable[[bytes], bool] | None
) -> control.App:
    """The application that these options ask for; without `send`, untraced. Raises UsageError."""
    instances = fleet.Fleet(wanted.legs(), wanted.breaker_failures)
    legs = Legs(
        instances,
        wanted.routing(instances, wanted.upstream_key),
        retries=wanted.retries,
        budget=wanted.retry_budget,
        health=health.Health(instances, wanted.health_interval, wanted.upstream_key),
    )
    gate = Gate(legs, wanted.api_key, wanted.upstream_key)
    reports = Reports(wanted.reports)
    forward = Forward(legs, read, send, reports, wanted.max_body, wanted.mode, gate)
    port, token = wanted.admin_port, wanted.admin_token
    beside = nullcontext if port is None else functools.partial(admin.serve, legs, port, token)
    return control.build(forward, handoff.counts, beside)


class Reload:
    """What SIGHUP does: other instances and keys, or a line in the log that says what is wrong."""

    def __init__(self, ctx: click.Context, now: Options, app: control.App) -> None:
        self.ctx, self.now, self.app = ctx, now, app
        self._following: asyncio.Task[None] | None = None

    def __call__(self) -> None:
        """Read everything again; runs on the event loop, and takes milliseconds."""
        try:
            fresh = config.again(self.ctx)
            self._take(fresh)
        except click.ClickException as error:
            self.app.metrics.reloads["failed"] += 1
            log.error("ttft-otel: nothing is changed: %s", error.format_message())

    def _take(self, fresh: Options) -> None:
        legs = self.app.forward.legs
        wanted = fresh.legs()
        if set(wanted) != set(legs.fleet.legs()):
            before, after = ", ".join(legs.fleet.legs()), ", ".join(wanted)
            raise click.UsageError(f"the legs were {before} and would be {after}: restart for that")
        added, removed = legs.fleet.replace(wanted)
        self.app.gate.let(fresh.api_key)
        self._following = asyncio.ensure_future(legs.follow())
        self.app.metrics.reloads["ok"] += 1
        log.warning(
            "ttft-otel: configuration read again: added %s; removed %s",
            ", ".join(added) or "nothing",
            ", ".join(removed) or "nothing",
        )
        if needs := config.fixed(self.now, fresh):
            log.warning("ttft-otel: only a restart changes %s", ", ".join(needs))


def _nothing() -> None:
    """Nothing was started that would have to end."""
