# SPDX-License-Identifier: Apache-2.0
"""Which parts of a stack are ready, native or in containers, and how command.py shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lab.progress_screen import DEFAULT_WIDTH
from lab.stack import backend_queries, docker_compose, native_state, stack_parts
from lab.stack.grafana_server import GRAFANA_REMEDY
from lab.stack.native_stack import PartStatus, StatusCallback
from lab.stack.native_state import NativeState
from lab.stack.smoke_check import HopVerdict


@dataclass(frozen=True, slots=True)
class StackStatus:
    """mode: "native", "containers" or "none"."""

    mode: str
    parts: list[PartStatus]

    @property
    def is_ready(self) -> bool:
        """Whether everything is."""
        return bool(self.parts) and all(part.ready for part in self.parts)


def read_stack_status(data: Path) -> StackStatus:
    """The status of the native stack on this data folder, else of the containers."""
    # The native one first: its state file says that it was started on this data folder.
    if running_stack := native_state.read_state(data):
        return StackStatus("native", check_native_parts(running_stack))
    if docker_compose.is_docker_available() and (
        rows := [describe_container(each) for each in docker_compose.list_services()]
    ):
        return StackStatus("containers", rows)
    return StackStatus("none", [])


def check_native_parts(running_stack: NativeState) -> list[PartStatus]:
    """Check the health of every program of a native stack."""
    addresses = running_stack.addresses
    health = {
        "collector": (
            stack_parts.format_loopback_url(addresses.collector_health),
            "/",
            stack_parts.format_loopback_url(addresses.collector_http),
        ),
        "tempo": (
            stack_parts.format_loopback_url(addresses.tempo),
            "/ready",
            stack_parts.format_loopback_url(addresses.tempo),
        ),
        "prometheus": (
            stack_parts.format_loopback_url(addresses.prometheus),
            "/-/ready",
            stack_parts.format_loopback_url(addresses.prometheus),
        ),
        "grafana": (running_stack.grafana, "/api/health", running_stack.grafana),
    }
    rows = []
    for name, (base, path, url) in health.items():
        # No Grafana in this stack, which is no fault.
        if not base:
            continue
        # Health, not the process: a program may run and still replay its log.
        ready = backend_queries.is_reachable(base + path)
        note = (
            f"pid {running_stack.programs[name][0]}"
            # A Grafana of the user's has no process of ours.
            if name in running_stack.programs
            else "not ours"
        )
        rows.append(PartStatus(name, url, ready, note if ready else f"{note}: no answer"))
    return rows


def describe_container(service: dict[str, Any]) -> PartStatus:
    """The status of one container; one without a health check is ready when it runs.

    Volumes get their owner from a service that then ends.
    """
    condition = service.get("Health") or service.get("State", "")
    done = (
        service.get("Service") == docker_compose.ONE_SHOT_SERVICE and service.get("ExitCode") == 0
    )
    ready = condition in ("healthy", "running") or done
    return PartStatus(service.get("Service", "?"), "", ready, service.get("Status") or condition)


GRAFANA_URL_HINT: Final = "http://NAME:PASSWORD@HOST:PORT of a user who may change it"
READY_TEXT: Final = Text("ready", "green")
NOT_READY_TEXT: Final = Text("not yet", "yellow")


def make_console() -> Console:
    """A console on stdout; wide when that is not a terminal."""
    output = Console(highlight=False)
    # Rich takes 80 columns where it finds no terminal, and would break URLs.
    return output if output.is_terminal else Console(highlight=False, width=DEFAULT_WIDTH)


@contextmanager
def show_live_table() -> Iterator[StatusCallback]:
    """A table that changes in place on a terminal; elsewhere a line for each part that gets ready."""
    out = make_console()
    # A live table in a log would be a copy of itself four times a second.
    if not out.is_terminal:
        yield print_ready_lines(out)
        return
    with Live(console=out, refresh_per_second=4) as live:
        yield lambda rows: live.update(build_parts_table(rows))


def print_ready_lines(out: Console) -> StatusCallback:
    """Each part once, when it is ready."""
    # Called with all rows several times a second: each part is printed once.
    printed: set[str] = set()

    def look(rows: list[PartStatus]) -> None:
        for row in rows:
            if row.ready and row.name not in printed:
                printed.add(row.name)
                out.print(f"{row.name:<11} {row.url:<24} {row.note}", markup=False)

    return look


def build_parts_table(rows: Sequence[PartStatus]) -> Table:
    """One line for each part."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for word in ("part", "", "where", ""):
        # A wrapped URL cannot be clicked.
        made.add_column(word, no_wrap=True)
    for row in rows:
        made.add_row(
            row.name, READY_TEXT if row.ready else NOT_READY_TEXT, row.url, Text(row.note, "dim")
        )
    return made


def print_next_steps(grafana: str, has_our_dashboards: bool) -> None:
    """What to do next, once everything is up; ours: whether that Grafana shows our dashboards."""
    out = make_console()
    out.print(
        f"Dashboards: {grafana}" if grafana else f"No Grafana found: {GRAFANA_REMEDY}", markup=False
    )
    if not has_our_dashboards:
        out.print(f"It has our dashboards once GRAFANA_URL is {GRAFANA_URL_HINT}.", markup=False)
    out.print("In another terminal: scripts/stack smoke. Ctrl-C stops everything.", markup=False)


def print_stack_status(found: StackStatus) -> None:
    """The table, or that nothing runs."""
    out = make_console()
    if found.mode == "none":
        out.print("Nothing runs. Start it: scripts/stack up, or scripts/stack up --native")
    else:
        out.print(f"The stack runs as {found.mode}.", style="dim")
        out.print(build_parts_table(found.parts))


def print_hop_verdict(hop_verdict: HopVerdict) -> None:
    """Print whether a hop passed, or what to do."""
    mark = Text("ok  ", "green") if hop_verdict.passed else Text("FAIL", "bold red")
    line = Text.assemble(mark, f"  {hop_verdict.hop}, {hop_verdict.seconds:.1f} s")
    said = line if hop_verdict.passed else Text.assemble(line, f": {hop_verdict.why}")
    # Soft: remedies are copied from the terminal, and line breaks would be copied, too.
    make_console().print(said, soft_wrap=True)
