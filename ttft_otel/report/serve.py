# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel serve`: options in, server.py runs; without its extra cli.py says what to install."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import click

from ttft_otel import names
from ttft_otel.report import schema
from ttft_otel.report.server import Options, run

MEGABYTE: Final = 1 << 20


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
@click.option("--db", type=click.Path(path_type=Path, dir_okay=False), help=schema.HELP)
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
    options = Options(
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
        run(options, lambda doors: _greet(host, doors.http, doors.grpc, options.path))
    except schema.Trouble as error:
        raise click.ClickException(str(error)) from error


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
