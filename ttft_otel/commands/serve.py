# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel serve`: its options; report_server.py runs the servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, TextIO

import click

from ttft_otel.commands.command_options import make_number_option
from ttft_otel.http.head_checks import is_loopback
from ttft_otel.model.names import env_names
from ttft_otel.report.app import RequestExplainer
from ttft_otel.report.report_server import ReportServer, ServeOptions, run_server
from ttft_otel.report.store import database_schema

MEGABYTE: Final = 1 << 20
DEFAULTS: Final = ServeOptions(Path())


@click.command(
    epilog="""\b
Examples:
  ttft-otel serve
  ttft-otel serve --keep-requests 5000 --keep-hours 24 --db /data/spans.db
  ttft-otel serve --host 0.0.0.0 --insecure       for servers on other machines
The page, /ttft_report/ID, /api/... and OTLP over HTTP share --http-port.
"""
)
@click.option("--host", default=DEFAULTS.host, show_default=True, help="Address to listen on.")
@make_number_option(
    "--http-port",
    click.IntRange(0, 65535),
    DEFAULTS.http_port,
    "Pages, API and OTLP/HTTP; 0 takes a free port.",
)
@make_number_option(
    "--grpc-port",
    click.IntRange(-1, 65535),
    DEFAULTS.grpc_port,
    "OTLP/gRPC; 0 takes a free port, -1 disables it.",
)
@click.option(
    "--db", type=click.Path(path_type=Path, dir_okay=False), help=database_schema.DB_OPTION_HELP
)
# Three limits, since any of them may be what a disk or a policy demands; the first one reached counts.
@make_number_option(
    "--keep-requests",
    click.IntRange(1),
    DEFAULTS.max_traces,
    "Traces to keep; older ones are removed.",
)
@make_number_option(
    "--keep-hours",
    click.FloatRange(0.001),
    DEFAULTS.max_age_hours,
    "Age in hours at which traces are removed.",
)
@make_number_option(
    "--keep-mb",
    click.IntRange(1),
    DEFAULTS.max_bytes // MEGABYTE,
    "Size of the database in MiB at which the oldest traces are removed.",
)
@click.option(
    # Its own flag: spans hold request IDs and timings, and whoever reaches the port reads them.
    "--insecure",
    is_flag=True,
    help="Listen on an address that other machines can reach, also without a token.",
)
@click.option("--allowed-host", multiple=True, help="Another name that Host may have on loopback.")
@click.option(
    "--token-file",
    type=click.File(),
    help="File with a token that whoever sends or reads has to show; in a browser it is the password.",
)
# `explain_request` is from main.py, which may import explain/; None where the command is called by itself.
@click.pass_obj
def serve(
    explain_request: RequestExplainer | None,
    host: str,
    http_port: int,
    grpc_port: int,
    db: Path | None,
    keep_requests: int,
    keep_hours: float,
    keep_mb: int,
    insecure: bool,
    allowed_host: tuple[str, ...],
    token_file: TextIO | None,
) -> None:
    """Receive spans over OTLP (gRPC and HTTP), store them, and show where the time went."""
    token = token_file.read().strip() if token_file else ""
    if token_file and not token:
        raise click.UsageError("--token-file: the file is empty.")
    if not (insecure or token or is_loopback(host)):
        raise click.UsageError(
            f"--host {host} can be reached from other machines, which could read and send everything: "
            "add --token-file, or --insecure if something else decides who reaches it."
        )
    options = ServeOptions(
        path=db or database_schema.get_default_path(),
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        max_traces=keep_requests,
        max_age_hours=keep_hours,
        max_bytes=keep_mb * MEGABYTE,
        allowed_hosts=allowed_host,
        token=token,
        explain_request=explain_request,
    )
    try:
        # Printed when both ports are bound: scripts wait for these lines.
        run_server(options, _print_addresses)
    except database_schema.StoreError as error:
        raise click.ClickException(str(error)) from error


def _print_addresses(server: ReportServer) -> None:
    """Print the addresses, the database's path, and how to start a server that sends here."""
    options = server.options
    at = f"[{options.host}]:" if ":" in options.host else f"{options.host}:"
    lines = [f"ttft-otel serve: page and OTLP/HTTP on http://{at}{server.http_port}"]
    if server.grpc_port >= 0:
        lines.append(f"                 OTLP/gRPC on {at}{server.grpc_port}")
    lines.append(f"                 spans in {options.path}")
    # 4318 is where servers send unless they are configured otherwise (settings.py).
    endpoint_setting = (
        ""
        if server.http_port == 4318
        else f"{env_names.OTEL_EXPORTER_OTLP_ENDPOINT}=http://{at}{server.http_port} "
    )
    # Set already: the line would contradict it.
    if env_names.OTEL_EXPORTER_OTLP_ENDPOINT not in os.environ:
        lines.append(
            f"                 send here: {endpoint_setting}{env_names.TTFT_OTEL}=1 vllm serve MODEL"
        )
    click.echo("\n".join(lines))
