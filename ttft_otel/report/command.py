# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel serve` and `ttft-otel report`: options in, server.py or terminal.py does the work.

cli.py imports it when one of the two is called; `report` needs no extra.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import click

from ttft_otel import cli, names
from ttft_otel.report import answer, schema, terminal
from ttft_otel.report.query import MOST, Trace, Wanted, reader
from ttft_otel.report.shape import Request
from ttft_otel.report.summary import summarize

MEGABYTE = 1 << 20
DB_HELP = "Database file.  [default: $XDG_STATE_HOME/ttft-otel/spans.db]"


@click.command(
    epilog="""\b
Examples:
  ttft-otel serve
  ttft-otel serve --keep-requests 5000 --keep-hours 24 --db /data/spans.db
  ttft-otel serve --host 0.0.0.0                  for servers on other machines
The page, /ttft_report/ID, /api/... and OTLP over HTTP share --http-port.
"""
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--http-port", default=4318, show_default=True, type=click.IntRange(0, 65535))
@click.option("--grpc-port", default=4317, show_default=True, type=click.IntRange(-1, 65535))
@click.option("--db", type=click.Path(path_type=Path, dir_okay=False), help=DB_HELP)
@click.option("--keep-requests", default=20_000, show_default=True, type=click.IntRange(1))
@click.option("--keep-hours", default=168.0, show_default=True, type=click.FloatRange(0.001))
@click.option("--keep-mb", default=2048, show_default=True, type=click.IntRange(1))
@click.option("--allow-host", multiple=True, help="Another Host header to accept on loopback.")
def serve(
    host: str,
    http_port: int,
    grpc_port: int,
    db: Path | None,
    keep_requests: int,
    keep_hours: float,
    keep_mb: int,
    allow_host: tuple[str, ...],
) -> None:
    """Receive spans over OTLP (gRPC and HTTP), keep them, show where the time went."""
    try:
        server = importlib.import_module("ttft_otel.report.server")
    except ModuleNotFoundError as error:
        text = cli.missing_text("serve", "serve", error.name or "a package")
        raise click.ClickException(text) from error
    options = server.Options(
        path=db or schema.default(),
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        keep=keep_requests,
        hours=keep_hours,
        limit=keep_mb * MEGABYTE,
        hosts=allow_host,
    )
    try:
        server.run(options, lambda doors: _greet(host, doors.http, doors.grpc, options.path))
    except schema.Trouble as error:
        raise click.ClickException(str(error)) from error


@click.command(
    epilog="""\b
Examples:
  ttft-otel report                     percentiles of the last 200 requests
  ttft-otel report --last 1            the newest request's waterfall
  ttft-otel report --request ID --json | jq .combined
  ttft-otel report --trace 4bf92f3577b34da6a3ce929d0e0e4736
"""
)
@click.option("--last", type=click.IntRange(1, MOST), help="The newest N requests.  [default: 200]")
@click.option("--trace", "trace_id", metavar="ID", help="One trace, by its 32 hex digits.")
@click.option("--request", "request_id", metavar="ID", help="One request, by its request id.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
@click.option("--db", type=click.Path(path_type=Path, dir_okay=False), help=DB_HELP)
def report(
    last: int | None, trace_id: str | None, request_id: str | None, as_json: bool, db: Path | None
) -> None:
    """Print where the time to first token went: one request, or percentiles over many."""
    if sum(each is not None for each in (last, trace_id, request_id)) > 1:
        raise click.UsageError("--last, --trace and --request exclude each other")
    try:
        with reader(db or schema.default()) as found:
            if request_id is not None:
                one = found.request(request_id)
                _one(found.trace(one.trace_id) if one else None, one, request_id, as_json)
            elif trace_id is not None:
                _one(found.trace(trace_id.lower()), None, trace_id, as_json)
            else:
                _many(found.latest(Wanted(last=last or 200)), found, last, as_json)
    except schema.Trouble as error:
        raise click.ClickException(str(error)) from error


def _one(trace: Trace | None, one: Request | None, name: str, as_json: bool) -> None:
    if trace is None:
        raise click.ClickException(
            f"nothing of {name!r} is stored: not traced, not here yet, or evicted; "
            "`ttft-otel report --last 20 --json` lists what is"
        )
    if as_json:
        _dump(answer.report(one) if one else answer.trace(trace))
    else:
        terminal.waterfall(trace, one)


def _many(requests: list[Request], found: Any, last: int | None, as_json: bool) -> None:
    if not requests:
        raise click.ClickException(
            "no request is stored yet; start a server with TTFT_OTEL=1 and send it one"
        )
    if as_json:
        summary = answer.summary(summarize(requests))
        _dump({"requests": [answer.request(each) for each in requests], "summary": summary})
    elif last == 1:
        _one(found.trace(requests[0].trace_id), requests[0], requests[0].request_id, False)
    else:
        terminal.table(requests)


def _dump(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _greet(host: str, http: int, grpc: int, path: Path) -> None:
    """Say where everything is, and which one line makes a server send here."""
    at = f"[{host}]" if ":" in host else host
    lines = [f"ttft-otel serve: page and OTLP/HTTP on http://{at}:{http}"]
    if grpc >= 0:
        lines.append(f"                 OTLP/gRPC on {at}:{grpc}")
    lines.append(f"                 spans in {path}")
    where = "" if http == 4318 else f"{names.ENV_ENDPOINT}=http://{at}:{http} "
    if names.ENV_ENDPOINT not in os.environ:
        lines.append(f"                 send here: {where}{names.ENV_ON}=1 vllm serve MODEL")
    click.echo("\n".join(lines))
