# SPDX-License-Identifier: Apache-2.0
"""The command `ttft-otel serve`: its options; report_server.py runs the servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, TextIO

import click

from ttft_otel.commands.command_options import OptionDecorator, make_number_option
from ttft_otel.commands.source_options import add_source_options
from ttft_otel.http.head_checks import is_loopback
from ttft_otel.model.names import env_names
from ttft_otel.report.breakdown_source import Explainer, ServeOptions
from ttft_otel.report.report_server import ReportServer, run_server
from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.store import database_schema

MEGABYTE: Final = 1 << 20
DEFAULTS: Final = ServeOptions(Path())


def _check_url(context: click.Context, option: click.Parameter, value: str) -> str:
    """A URL without the slash at its end. Raises BadParameter for what no link may be made of."""
    if value and not value.startswith(("http://", "https://")):
        raise click.BadParameter("write http://HOST:PORT", context, option)
    return value.rstrip("/")


def _make_url_option(name: str, help_text: str) -> OptionDecorator:
    return click.option(name, metavar="URL", default="", callback=_check_url, help=help_text)


@click.command(
    epilog="""\b
Examples:
  ttft-otel serve
  ttft-otel serve --keep-requests 5000 --keep-hours 24 --db /data/spans.db
  ttft-otel serve --host 0.0.0.0 --insecure       for servers on other machines
  ttft-otel serve --tempo http://127.0.0.1:3200 --http-port 4319 --grafana http://127.0.0.1:3000
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
@_make_url_option("--grafana", "Where people reach Grafana: pages link to its dashboard.")
@_make_url_option(
    "--alertmanager", "Where answers to the alerts of /api/alerts go: http://127.0.0.1:9093."
)
@_make_url_option("--page-url", "Where people reach the pages, for links of answers.")
@add_source_options
# `explain` is from main.py, which may import explain/; None where the command is called by itself.
@click.pass_obj
def serve(
    explain: Explainer | None,
    host: str,
    http_port: int,
    grpc_port: int,
    keep_requests: int,
    keep_hours: float,
    keep_mb: int,
    insecure: bool,
    allowed_host: tuple[str, ...],
    token_file: TextIO | None,
    grafana: str,
    alertmanager: str,
    page_url: str,
    source: SourceChoice,
) -> None:
    """Receive spans over OTLP (gRPC and HTTP), store them, show where the time went, and answer alerts.

    With --tempo nothing is received: pages and answers are of the requests in Tempo.
    """
    token = token_file.read().strip() if token_file else ""
    if token_file and not token:
        raise click.UsageError("--token-file: the file is empty.")
    if not (insecure or token or is_loopback(host)):
        raise click.UsageError(
            f"--host {host} can be reached from other machines, which could read and send everything: "
            "add --token-file, or --insecure if something else decides who reaches it."
        )
    options = ServeOptions(
        path=source.db or database_schema.get_default_path(),
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        max_traces=keep_requests,
        max_age_hours=keep_hours,
        max_bytes=keep_mb * MEGABYTE,
        allowed_hosts=allowed_host,
        token=token,
        explain=explain,
        tempo=source if source.tempo else None,
        page_url=page_url,
        grafana_url=grafana,
        alertmanager_url=alertmanager,
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
    if options.tempo:
        click.echo(f"ttft-otel serve: page on http://{at}{server.http_port}, of Tempo's requests")
        return
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
