# SPDX-License-Identifier: Apache-2.0
"""`scripts/stack`: build, start, look at, try and stop the observability stack."""

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

from ttft_otel.lab import screen
from ttft_otel.lab.servers import ServerError, terminable
from ttft_otel.lab.stack import (
    adopt,
    binaries,
    docker,
    golang,
    native,
    pins,
    show,
    smoke,
    state,
    status,
)
from ttft_otel.lab.stack.ask import AskError
from ttft_otel.lab.stack.docker import DockerError
from ttft_otel.lab.stack.golang import GoError
from ttft_otel.lab.stack.parts import Addresses

CONTEXT: Final = {"help_option_names": ["-h", "--help"]}
DATA = click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=state.DATA,
    help="Where a native stack keeps traces, metrics and logs.  [default: out/stack]",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")


@contextmanager
def explained() -> Iterator[None]:
    """What went wrong as one message with its remedy, not as a traceback."""
    try:
        yield
    except (AskError, GoError, DockerError, ServerError, LookupError) as error:
        raise click.ClickException(str(error)) from error


@click.group(
    context_settings=CONTEXT,
    epilog="""\b
Examples:
  scripts/stack up                 containers, with docker compose; http://127.0.0.1:3000
  scripts/stack up --native        the same without containers, in this terminal, until Ctrl-C
  scripts/stack smoke              send a trace through it, say which hop lost it
  scripts/stack status --json | jq .ready
  scripts/stack down
Exit code 1 when something did not work; the last line says what to do.
""",
)
def main() -> None:
    """Run collector, Tempo, Prometheus and Grafana with the configurations of this checkout."""


@main.command(
    epilog="""\b
Examples:
  scripts/stack build              what is missing; 10 minutes the first time, then nothing
  TTFT_STACK_TEMPO=/opt/tempo scripts/stack up --native    use your own
"""
)
@click.option("--resolve", is_flag=True, help="Write the collector's go.mod and go.sum anew first.")
@click.option("--quiet", is_flag=True, help="Say nothing of what is there already.")
def build(resolve: bool, quiet: bool) -> None:
    """Build the programs with Go (1.25 or newer), once, into the user's cache."""
    with explained(), terminable(), screen.showing() as seen:
        if resolve:
            seen.step("resolving what collector/builder.yaml names")
            golang.resolve(pins.COLLECTOR, seen.now)
        for role, (tool, program) in binaries.ROLES.items():
            there = golang.built(tool) or binaries.named(program)
            if not there:
                seen.step(f"building {role}")
            path = binaries.obtain(role, seen.now)
            if not (there and quiet):
                seen.say(f"{role:<11} {path}")


@main.command(
    epilog="""\b
Examples:
  scripts/stack up --profile sampling             tail sampling by TTFT
  scripts/stack up --native --free-ports          beside another stack
  GRAFANA_HOME=/opt/grafana scripts/stack up --native
"""
)
@click.option("--native", "natively", is_flag=True, help="Without containers; needs Go, once.")
@click.option(
    "--profile", "profiles", multiple=True, help="Of docker-compose.yml; natively: sampling."
)
@click.option("--free-ports", is_flag=True, help="Natively: any ports, not the usual ones.")
@DATA
def up(natively: bool, profiles: tuple[str, ...], free_ports: bool, data: Path) -> None:
    """Start the stack: containers in the background, or programs in this terminal until Ctrl-C."""
    with explained():
        if natively:
            run(profiles, Addresses.free() if free_ports else Addresses(), data.absolute())
        else:
            docker.compose("up", "--detach", "--wait", profiles=profiles)
            click.echo("Dashboards: http://127.0.0.1:3000   next: scripts/stack smoke")


def run(profiles: tuple[str, ...], at: Addresses, data: Path) -> None:
    """A native stack, from its first build to Ctrl-C."""
    if odd := set(profiles) - {"sampling"}:
        raise LookupError(f"no profile {', '.join(sorted(odd))} without containers; only sampling")
    make_room(at, data)
    with terminable(), screen.showing() as seen:
        commands = native.plan(at, data, "sampling" in profiles, seen.now)
    try:
        with native.running(commands, at, data) as servers:
            with show.table() as look:
                native.await_ready(servers, look)
            named = os.environ.get("GRAFANA_URL", "")
            show.ready(native.browser(servers), not named or adopt.adopt(named, at))
            native.watch(servers)
    except KeyboardInterrupt:
        click.echo("Stopped.")


def make_room(at: Addresses, data: Path) -> None:
    """Nothing of an older stack may run on these data or these ports."""
    if older := state.read(data):
        if older.alive:
            raise LookupError(f"a stack runs on {data} already; scripts/stack down stops it")
        older.stop()
    if taken := at.taken():
        told = ", ".join(f"{port} ({name})" for name, port in taken.items())
        raise LookupError(
            f"somebody listens on {told}; stop them, or choose other ports with --free-ports"
        )
    data.mkdir(parents=True, exist_ok=True)


@main.command()
@DATA
def down(data: Path) -> None:
    """Stop the stack that runs: the native one on these data, else the containers; data are kept."""
    with explained():
        if older := state.read(data):
            older.stop()
            state.forget(data)
            click.echo("The native stack is down.")
        elif docker.there():
            docker.compose("--profile", "*", "down")
        else:
            click.echo("Nothing to stop: no native stack on these data, and no docker compose.")


@main.command("status")
@AS_JSON
@DATA
def say_status(as_json: bool, data: Path) -> None:
    """Say which parts are ready; exit code 1 unless all are."""
    with explained():
        found = status.look(data)
    if as_json:
        click.echo(json.dumps(asdict(found) | {"ready": found.ready}, indent=2))
    else:
        show.status(found)
    sys.exit(0 if found.ready else 1)


@main.command(
    "smoke",
    epilog="""\b
Examples:
  scripts/stack smoke                    ok or FAIL for every hop, and what to do
  scripts/stack smoke --json | jq '.[] | select(.passed | not)'
""",
)
@click.option(
    "--timeout", default=smoke.ARRIVES_S, help="Seconds until a hop is given up.", show_default=True
)
@AS_JSON
@DATA
def try_smoke(timeout: float, as_json: bool, data: Path) -> None:
    """Send one trace through the collector; find it in Tempo, and its metric in Prometheus."""
    older = state.read(data)
    doors = smoke.native(older.addresses, older.grafana) if older else smoke.contained(Addresses())
    verdicts = []
    for verdict in smoke.run(doors, timeout):
        verdicts.append(verdict)
        if not as_json:
            show.verdict(verdict)
    if as_json:
        click.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
    sys.exit(0 if all(verdict.passed for verdict in verdicts) else 1)
