# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel stack` and `ttft-otel dashboards`: the observability stack from the package, without a checkout.

`init` writes its files into a folder; the others run `docker compose` there, or ask a running stack.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from ttft_otel import __version__
from ttft_otel.stack import stack_folder, stack_queries

FOLDER_ARGUMENT = click.argument(
    "folder", default="ttft-otel-stack", type=click.Path(path_type=Path, file_okay=False)
)
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
SMOKE_TIMEOUT_OPTION = click.option(
    "--timeout",
    default=stack_queries.ARRIVAL_TIMEOUT_S,
    help="Seconds to wait for each hop.",
    show_default=True,
)
OTLP_URL: Final = "http://127.0.0.1:4318"
GRAFANA_URL: Final = "http://127.0.0.1:3000"


@contextmanager
def report_errors() -> Iterator[None]:
    """Print errors as one message with a remedy, instead of a traceback."""
    try:
        yield
    except (stack_folder.StackError, stack_queries.BackendQueryError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error


@click.group(
    epilog="""\b
Examples:
  ttft-otel stack init             write its files to ./ttft-otel-stack
  ttft-otel stack up               start it: http://127.0.0.1:3000
  ttft-otel stack smoke            send a trace through it, say which hop lost it
  ttft-otel stack up --profile sampling --with alerts
Every command takes another FOLDER.
"""
)
def stack() -> None:
    """Run collector, Tempo, Prometheus and Grafana in containers."""


@stack.command()
@FOLDER_ARGUMENT
@click.option("--force", is_flag=True, help="Replace files that were edited, too.")
def init(folder: Path, force: bool) -> None:
    """Write compose file and configurations, or bring them to this version; edited files are kept."""
    with report_errors():
        kept = stack_folder.write_folder(folder, force)
    click.echo(f"{folder} has the stack of ttft-otel {__version__}. Settings: {folder / '.env'}")
    for name in kept:
        click.echo(f"kept, because it was edited: {name}", err=True)


@stack.command()
@FOLDER_ARGUMENT
@click.option("--profile", "profiles", multiple=True, help="Profile of docker-compose.yml.")
@click.option(
    "--with",
    "overlays",
    multiple=True,
    type=click.Choice(stack_folder.OVERLAYS),
    help="Add deploy/docker-compose.NAME.yml.",
)
def up(folder: Path, profiles: tuple[str, ...], overlays: tuple[str, ...]) -> None:
    """Start the containers, and wait until they are ready."""
    with report_errors():
        stack_folder.read_stamp(folder)
        # Running already, it has the ports itself.
        if not any(map(stack_folder.is_ready, stack_folder.list_services(folder))):
            stack_folder.require_free_ports()
        words = ("up", "--detach", "--wait")
        stack_folder.run_compose(folder, *words, profiles=profiles, overlays=overlays)
    click.echo(
        f"Dashboards: {GRAFANA_URL}   servers send to {OTLP_URL}   next: ttft-otel stack smoke"
    )


@stack.command()
@FOLDER_ARGUMENT
def down(folder: Path) -> None:
    """Stop and remove the containers; data are kept."""
    with report_errors():
        stack_folder.read_stamp(folder)
        # All profiles and overlays: compose leaves alone what belongs to one that is not named.
        stack_folder.run_compose(folder, "down", "--remove-orphans", profiles=("*",))


@stack.command()
@FOLDER_ARGUMENT
@JSON_OPTION
def status(folder: Path, as_json: bool) -> None:
    """Say which containers are ready, and whether the files are of this version; exit code 1 if not."""
    with report_errors():
        version, outdated, edited = stack_folder.compare_folder(folder)
        services = stack_folder.list_services(folder)
    ready = bool(services) and all(map(stack_folder.is_ready, services))
    # Not only that it runs: that a server's spans would be taken.
    takes_otlp = ready and stack_queries.takes_traces(OTLP_URL)
    if as_json:
        parts = {each["Service"]: stack_folder.is_ready(each) for each in services}
        document = {"ready": ready and takes_otlp, "parts": parts, "version": version}
        click.echo(json.dumps({**document, "outdated": outdated, "edited": edited}))
    else:
        for each in services:
            mark = "ready  " if stack_folder.is_ready(each) else "not yet"
            click.echo(f"{mark}  {each['Service']:<20} {each.get('Status', '')}")
        if not services:
            click.echo(f"Nothing runs. Start it: ttft-otel stack up {folder}")
        elif not takes_otlp:
            click.echo(f"not yet  {OTLP_URL} takes no traces")
        if outdated:
            click.echo(
                f"The files are of ttft-otel {version}, and {len(outdated)} differ in "
                f"{__version__}: ttft-otel stack init {folder}, then up"
            )
    sys.exit(0 if ready and takes_otlp and not outdated else 1)


@stack.command()
@click.option("--otlp", metavar="URL", default=OTLP_URL, show_default=True, help="The collector.")
@click.option(
    "--grafana",
    metavar="URL",
    default=GRAFANA_URL,
    show_default=True,
    help="Its data sources are asked.",
)
@SMOKE_TIMEOUT_OPTION
@JSON_OPTION
def smoke(otlp: str, grafana: str, timeout: float, as_json: bool) -> None:
    """Send one trace through the collector; find it in Tempo, and its metric in Prometheus."""
    endpoints = stack_queries.get_container_endpoints(otlp.rstrip("/"), grafana.rstrip("/"))
    sys.exit(0 if stack_queries.print_hops(endpoints, timeout, as_json) else 1)


@click.command(
    epilog="""\b
Examples:
  ttft-otel dashboards --grafana https://grafana.example.org --token-file token.txt
  ttft-otel dashboards --grafana http://admin@127.0.0.1:3000 --token-file password.txt
"""
)
@click.option("--grafana", metavar="URL", required=True, help="A running Grafana.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File with a service account's token, or the password of a user named in the URL.",
)
def dashboards(grafana: str, token_file: Path | None) -> None:
    """Import the dashboards into a Grafana; those of another version are replaced."""
    token = token_file.read_text("utf-8").strip() if token_file else ""
    grafana = grafana.rstrip("/")
    with report_errors():
        for url in stack_queries.import_dashboards(grafana, token):
            click.echo(url)
        missing = stack_queries.list_missing_sources(grafana, token)
    if missing:
        click.echo(
            f"It has no data source of type {' or '.join(missing)}: add one, or panels stay empty",
            err=True,
        )
