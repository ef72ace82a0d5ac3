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

from ttft_otel.lab.recipes import Command
from ttft_otel.lab.servers import Server, ServerError, stop_all, terminable
from ttft_otel.lab.stack import adopt, binaries, grafana, parts, state
from ttft_otel.lab.stack.golang import Say
from ttft_otel.lab.stack.parts import Addresses
from ttft_otel.lab.stack.state import State

READY_S: Final = 120.0
LOOK_S: Final = 0.3
# Tempo needs 6; at times it then waits for ever for queries of its own, with everything written.
STOP_S: Final = 10.0


@dataclass(slots=True)
class Row:
    """One part on the screen and in `status --json`."""

    name: str
    url: str
    ready: bool
    note: str = ""


# Called several times while parts start, with all rows.
Look = Callable[[list[Row]], None]


def plan(at: Addresses, data: Path, sampling: bool, say: Say) -> list[Command]:
    """All parts, their programs built or found first."""
    configs = [parts.COLLECTOR_CONFIG, *([parts.SAMPLING] if sampling else [])]
    found = {role: binaries.obtain(role, say) for role in ("collector", "tempo", "prometheus")}
    commands = [
        parts.prometheus(found["prometheus"], at, data / "prometheus"),
        parts.tempo(found["tempo"], at, data / "tempo"),
        parts.collector(found["collector"], at, data / "collector", configs),
    ]
    home = None if os.environ.get("GRAFANA_URL") else grafana.home()
    return [*commands, grafana.command(home, at, data / "grafana")] if home else commands


@contextmanager
def running(commands: Sequence[Command], at: Addresses, data: Path) -> Iterator[list[Server]]:
    """Everything started when the block begins, and gone after it, however it ends."""
    logs = data / "logs"
    servers = [Server(command, logs / f"{command.name}.log") for command in commands]
    with terminable():
        try:
            for server in servers:
                server.start()
            programs = {each.name: (each.pid, each.command.argv[0]) for each in servers}
            State(os.getpid(), at, programs, browser(servers)).write(data)
            yield servers
        finally:
            stop_all(servers, STOP_S)
            state.forget(data)


def browser(servers: Sequence[Server]) -> str:
    """Where the dashboards are: our Grafana, or the one that was named, or nowhere."""
    own = [server.url for server in servers if server.name == "grafana"]
    return own[0] if own else adopt.public(os.environ.get("GRAFANA_URL", ""))


def await_ready(servers: Sequence[Server], look: Look) -> None:
    """Return once all answer; raise ServerError with a log's end when one does not."""
    began = time.monotonic()
    ready: dict[str, float] = {}
    while len(ready) < len(servers):
        for server in servers:
            spent = time.monotonic() - began
            if server.name in ready:
                continue
            if server.healthy():
                ready[server.name] = spent
            elif not server.alive or spent > READY_S:
                raise ServerError(server.obituary(spent))
        look([row(server, ready.get(server.name)) for server in servers])
        time.sleep(LOOK_S)


def row(server: Server, took: float | None) -> Row:
    """What is to be said of one part."""
    note = "starting" if took is None else f"ready after {took:.1f} s"
    return Row(server.name, address(server), took is not None, note)


def address(server: Server) -> str:
    """Where it is of use: OTLP of the collector, not its health check."""
    if server.name == "collector":
        return f"http://{server.command.env['TTFT_COLLECTOR_HTTP']}"
    return server.url


def watch(servers: Sequence[Server]) -> None:
    """Return never, unless a part ends: then raise ServerError with the end of its log."""
    while all(server.alive for server in servers):
        time.sleep(0.5)
    dead = next(server for server in servers if not server.alive)
    raise ServerError(dead.obituary(time.monotonic() - dead.started))
