# SPDX-License-Identifier: Apache-2.0
"""Which parts of a stack are ready, and how command.py shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lab.progress_screen import DEFAULT_WIDTH
from lab.stack import stack_parts
from lab.stack.grafana_server import GRAFANA_REMEDY
from lab.stack.native_stack import PartStatus, StatusCallback
from lab.stack.native_state import NativeState
from ttft_otel.stack import stack_queries


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
        ready = answers_health(base + path)
        note = (
            f"pid {running_stack.programs[name][0]}"
            # A Grafana of the user's has no process of ours.
            if name in running_stack.programs
            else "not ours"
        )
        rows.append(PartStatus(name, url, ready, note if ready else f"{note}: no answer"))
    return rows


def answers_health(url: str) -> bool:
    """Whether a health check answers 200."""
    try:
        stack_queries.fetch_json(url)
    except stack_queries.BackendQueryError:
        return False
    return True


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
