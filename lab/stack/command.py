# SPDX-License-Identifier: Apache-2.0
"""The command `scripts/stack`: build, start, inspect, test and stop the observability stack."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from lab import progress_screen
from lab.local_servers import LocalServerError, exit_on_sigterm
from lab.stack import (
    binaries,
    go_builds,
    grafana_import,
    native_stack,
    native_state,
    program_pins,
    stack_parts,
    stack_status,
)
from lab.stack.go_builds import GoBuildError
from lab.stack.stack_parts import StackAddresses
from ttft_otel.commands.stack import JSON_OPTION, SMOKE_TIMEOUT_OPTION
from ttft_otel.stack import stack_queries
from ttft_otel.stack.stack_queries import BackendQueryError

CONTEXT_SETTINGS: Final = {"help_option_names": ["-h", "--help"]}
# The same folder for all subcommands: it has the state file by which they find a running stack.
DATA_OPTION = click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=native_state.DEFAULT_DATA_FOLDER,
    help="Where a native stack keeps traces, metrics and logs.  [default: out/stack]",
)


@contextmanager
def report_errors() -> Iterator[None]:
    """Print errors as one message with a remedy, instead of a traceback."""
    try:
        yield
    # Only errors whose text is for users; a fault of ours keeps its traceback.
    except (BackendQueryError, GoBuildError, LocalServerError, LookupError) as error:
        raise click.ClickException(str(error)) from error


@click.group(
    context_settings=CONTEXT_SETTINGS,
    epilog="""\b
Examples:
  scripts/stack up                 in this terminal, until Ctrl-C; http://127.0.0.1:3000
  scripts/stack smoke              send a trace through it, say which hop lost it
  scripts/stack status --json | jq .ready
  scripts/stack down
Exit code 1 when something did not work; the last line says what to do.
""",
)
def main() -> None:
    """Run collector, Tempo, Prometheus and Grafana without containers (with them: ttft-otel stack)."""


@main.command(
    epilog="""\b
Examples:
  scripts/stack build              what is missing; 10 minutes the first time, then nothing
  TTFT_STACK_TEMPO=/opt/tempo scripts/stack up    use your own
"""
)
@click.option("--resolve", is_flag=True, help="Regenerate the collector's go.mod and go.sum first.")
@click.option("--quiet", is_flag=True, help="Print nothing for programs that are built already.")
def build(resolve: bool, quiet: bool) -> None:
    """Build the programs with Go (1.25 or newer), once, into the user's cache."""
    with report_errors(), exit_on_sigterm(), progress_screen.open_screen() as progress:
        if resolve:
            progress.begin_step("resolving what collector/builder.yaml names")
            go_builds.resolve_modules(program_pins.COLLECTOR_TOOL, progress.update_status)
        for role, (tool, program) in binaries.PROGRAMS_BY_ROLE.items():
            # Asked before, because obtain_program() builds what is missing.
            is_present = go_builds.is_built(tool) or binaries.find_named_program(program)
            if not is_present:
                progress.begin_step(f"building {role}")
            path = binaries.obtain_program(role, progress.update_status)
            if not (is_present and quiet):
                progress.print_line(f"{role:<11} {path}")


@main.command(
    epilog="""\b
Examples:
  scripts/stack up --sampling                     tail sampling by TTFT
  scripts/stack up --free-ports                   beside another stack
  GRAFANA_HOME=/opt/grafana scripts/stack up
"""
)
@click.option(
    "--sampling", is_flag=True, help="Keep slow and failed traces, and a share of the rest."
)
@click.option("--free-ports", is_flag=True, help="Use free ports instead of the default ones.")
@DATA_OPTION
def up(sampling: bool, free_ports: bool, data: Path) -> None:
    """Build what is missing, and run the stack in this terminal until Ctrl-C."""
    addresses = StackAddresses.choose_free() if free_ports else StackAddresses()
    with report_errors():
        run_native(sampling, addresses, data.absolute())


def run_native(sampling: bool, addresses: StackAddresses, data: Path) -> None:
    """Build and run a native stack until Ctrl-C."""
    # Before anything is built, which may take minutes.
    refuse_second_stack(addresses, data)
    # Its line must be gone before the table of parts is drawn.
    with exit_on_sigterm(), progress_screen.open_screen() as progress:
        commands = native_stack.build_native_commands(
            addresses, data, sampling, progress.update_status
        )
    try:
        with native_stack.run_native_parts(commands, addresses, data) as servers:
            with stack_status.show_live_table() as look:
                native_stack.wait_for_parts(servers, look)
            # Once all parts are up: dashboards over a stack that is not there show errors.
            named = os.environ.get("GRAFANA_URL", "")
            stack_status.print_next_steps(
                native_stack.get_dashboards_url(servers),
                not named or grafana_import.import_dashboards(named, addresses),
            )
            native_stack.watch_parts(servers)
    except KeyboardInterrupt:
        click.echo("Stopped.")


def refuse_second_stack(addresses: StackAddresses, data: Path) -> None:
    """Refuse to start while another stack uses the same data folder or ports."""
    # A crashed stack's programs may still run, and hold ports and the data folder's locks.
    if running_stack := native_state.read_state(data):
        if running_stack.is_alive:
            raise LookupError(f"a stack runs on {data} already; scripts/stack down stops it")
        running_stack.stop()
    # All of them at once, before the first program fails on one.
    if taken := addresses.find_taken():
        busy_ports = ", ".join(f"{port} ({name})" for name, port in taken.items())
        raise LookupError(
            f"ports in use: {busy_ports}; stop the other programs, or choose other ports with --free-ports"
        )
    data.mkdir(parents=True, exist_ok=True)


@main.command()
@DATA_OPTION
def down(data: Path) -> None:
    """Stop the stack of this data folder; data are kept."""
    with report_errors():
        if running_stack := native_state.read_state(data):
            running_stack.stop()
            native_state.remove_state(data)
            click.echo("The stack is down.")
        else:
            click.echo("Nothing to stop: no stack on these data.")


@main.command("status")
@JSON_OPTION
@DATA_OPTION
def report_status(as_json: bool, data: Path) -> None:
    """Say which parts are ready; exit code 1 unless all are."""
    running_stack = native_state.read_state(data)
    parts = stack_status.check_native_parts(running_stack) if running_stack else []
    ready = bool(parts) and all(part.ready for part in parts)
    if as_json:
        click.echo(
            json.dumps({"parts": [asdict(part) for part in parts], "ready": ready}, indent=2)
        )
    elif parts:
        stack_status.make_console().print(stack_status.build_parts_table(parts))
    else:
        click.echo("Nothing runs. Start it: scripts/stack up")
    # For scripts that wait until the stack is up.
    sys.exit(0 if ready else 1)


@main.command(
    "smoke",
    epilog="""\b
Examples:
  scripts/stack smoke                    ok or FAIL for every hop, and what to do
  scripts/stack smoke --json | jq '.[] | select(.passed | not)'
""",
)
@SMOKE_TIMEOUT_OPTION
@JSON_OPTION
@DATA_OPTION
def run_smoke_check(timeout: float, as_json: bool, data: Path) -> None:
    """Send one trace through the collector; find it in Tempo, and its metric in Prometheus."""
    running_stack = native_state.read_state(data)
    if running_stack is None:
        raise click.ClickException("no stack on these data; scripts/stack up starts one")
    at = running_stack.addresses
    # Without containers everything can be asked directly.
    endpoints = stack_queries.StackEndpoints(
        stack_parts.format_loopback_url(at.collector_http),
        stack_parts.format_loopback_url(at.tempo),
        stack_parts.format_loopback_url(at.prometheus),
        running_stack.grafana,
    )
    sys.exit(0 if stack_queries.print_hops(endpoints, timeout, as_json) else 1)
