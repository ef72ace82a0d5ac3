# SPDX-License-Identifier: Apache-2.0
"""Run the whole stack in one terminal on the loopback, without containers; command.py asks.

Same configurations as the containers, addresses by environment; Tempo's is its own (native.yaml).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.local_servers import LocalServer, LocalServerError, exit_on_sigterm, stop_servers
from lab.server_commands import ServerCommand
from lab.stack import binaries, grafana_server, native_state, stack_parts
from lab.stack.go_builds import LineCallback
from lab.stack.native_state import NativeState
from lab.stack.stack_parts import StackAddresses
from ttft_otel.stack import stack_queries

READY_TIMEOUT_S: Final = 120.0
POLL_INTERVAL_S: Final = 0.3
# Tempo needs 6; at times it then waits for ever for queries of its own, with everything written.
STOP_TIMEOUT_S: Final = 10.0


@dataclass(slots=True)
class PartStatus:
    """State of one program of the stack, as the screen and `status --json` show it.

    note: what it does, and how long its start took.
    """

    name: str
    url: str
    ready: bool
    note: str = ""


# Called several times while parts start, with all rows.
StatusCallback = Callable[[list[PartStatus]], None]


def build_native_commands(
    addresses: StackAddresses, data: Path, sampling: bool, say: LineCallback
) -> list[ServerCommand]:
    """The commands of all parts; builds or finds their programs first."""
    configs = [stack_parts.COLLECTOR_CONFIG, *([stack_parts.SAMPLING_CONFIG] if sampling else [])]
    program_paths = {
        role: binaries.obtain_program(role, say) for role in ("collector", "tempo", "prometheus")
    }
    commands = [
        stack_parts.build_prometheus_command(
            program_paths["prometheus"], addresses, data / "prometheus"
        ),
        stack_parts.build_tempo_command(program_paths["tempo"], addresses, data / "tempo"),
        stack_parts.build_collector_command(
            program_paths["collector"], addresses, data / "collector", configs
        ),
    ]
    # With GRAFANA_URL our dashboards are imported into a Grafana that runs already.
    home = None if os.environ.get("GRAFANA_URL") else grafana_server.find_grafana_home()
    return (
        [*commands, grafana_server.build_grafana_command(home, addresses, data / "grafana")]
        if home
        else commands
    )


@contextmanager
def run_native_parts(
    commands: Sequence[ServerCommand], addresses: StackAddresses, data: Path
) -> Iterator[list[LocalServer]]:
    """Start all parts; they are stopped when the block ends, however it ends."""
    logs = data / "logs"
    servers = [LocalServer(command, logs / f"{command.name}.log") for command in commands]
    with exit_on_sigterm():
        try:
            for server in servers:
                server.start()
            programs = {each.name: (each.pid, each.command.argv[0]) for each in servers}
            # Not before all have a process ID: `down` of another terminal reads process IDs from this file.
            NativeState(os.getpid(), addresses, programs, get_dashboards_url(servers)).write(data)
            yield servers
        finally:
            stop_servers(servers, STOP_TIMEOUT_S)
            native_state.remove_state(data)


def get_dashboards_url(servers: Sequence[LocalServer]) -> str:
    """URL of the dashboards: our Grafana, or the one in GRAFANA_URL, "" without either."""
    own = [server.url for server in servers if server.name == "grafana"]
    return own[0] if own else stack_queries.strip_credentials(os.environ.get("GRAFANA_URL", ""))


def wait_for_parts(servers: Sequence[LocalServer], show_rows: StatusCallback) -> None:
    """Return once all answer; raise LocalServerError with a log's end when one does not."""
    started = time.monotonic()
    ready: dict[str, float] = {}
    while len(ready) < len(servers):
        for server in servers:
            elapsed_s = time.monotonic() - started
            # Not asked again: a part that was healthy and ends later is seen by watch_parts().
            if server.name in ready:
                continue
            if server.is_healthy():
                ready[server.name] = elapsed_s
            elif not server.is_alive or elapsed_s > READY_TIMEOUT_S:
                raise LocalServerError(server.describe_failure(elapsed_s))
        show_rows([describe_part(server, ready.get(server.name)) for server in servers])
        time.sleep(POLL_INTERVAL_S)


def describe_part(server: LocalServer, took: float | None) -> PartStatus:
    """The status of one part."""
    note = "starting" if took is None else f"ready after {took:.1f} s"
    return PartStatus(server.name, get_public_url(server), took is not None, note)


def get_public_url(server: LocalServer) -> str:
    """The URL for users: the collector's OTLP endpoint rather than its health check."""
    if server.name == "collector":
        return f"http://{server.command.env['TTFT_COLLECTOR_HTTP']}"
    return server.url


def watch_parts(servers: Sequence[LocalServer]) -> None:
    """Return never, unless a part ends: then raise LocalServerError with the end of its log."""
    while all(server.is_alive for server in servers):
        time.sleep(0.5)
    dead = next(server for server in servers if not server.is_alive)
    raise LocalServerError(dead.describe_failure(time.monotonic() - dead.started_at))
