# SPDX-License-Identifier: Apache-2.0
"""What `scripts/stack` puts on the screen: a table of what is ready, verdicts; command.py calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ttft_otel.lab.screen import WIDE
from ttft_otel.lab.stack.grafana import REMEDY
from ttft_otel.lab.stack.native import Look, Row
from ttft_otel.lab.stack.smoke import Verdict
from ttft_otel.lab.stack.status import Status

WITH: Final = "http://NAME:PASSWORD@HOST:PORT of somebody who may change it"
READY: Final = Text("ready", "green")
NOT: Final = Text("not yet", "yellow")


def console() -> Console:
    """Stdout, wide where nobody says how wide."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDE)


@contextmanager
def table() -> Iterator[Look]:
    """A table that changes in place on a terminal; elsewhere a line for each part that gets ready."""
    out = console()
    if not out.is_terminal:
        yield lines(out)
        return
    with Live(console=out, refresh_per_second=4) as live:
        yield lambda rows: live.update(drawn(rows))


def lines(out: Console) -> Look:
    """Each part once, when it is ready."""
    told: set[str] = set()

    def look(rows: list[Row]) -> None:
        for row in rows:
            if row.ready and row.name not in told:
                told.add(row.name)
                out.print(f"{row.name:<11} {row.url:<24} {row.note}", markup=False)

    return look


def drawn(rows: Sequence[Row]) -> Table:
    """One line for each part."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for word in ("part", "", "where", ""):
        made.add_column(word, no_wrap=True)
    for row in rows:
        made.add_row(row.name, READY if row.ready else NOT, row.url, Text(row.note, "dim"))
    return made


def ready(grafana: str, ours: bool) -> None:
    """What to do next, once everything is up; ours: whether that Grafana shows our dashboards."""
    out = console()
    out.print(f"Dashboards: {grafana}" if grafana else f"No Grafana found: {REMEDY}", markup=False)
    if not ours:
        out.print(f"It has our dashboards once GRAFANA_URL is {WITH}.", markup=False)
    out.print("In another terminal: scripts/stack smoke. Ctrl-C stops everything.", markup=False)


def status(found: Status) -> None:
    """The table, or that nothing runs."""
    out = console()
    if found.mode == "none":
        out.print("Nothing runs. Start it: scripts/stack up, or scripts/stack up --native")
    else:
        out.print(f"The stack runs as {found.mode}.", style="dim")
        out.print(drawn(found.parts))


def verdict(found: Verdict) -> None:
    """One hop: passed, or what to do."""
    mark = Text("ok  ", "green") if found.passed else Text("FAIL", "bold red")
    line = Text.assemble(mark, f"  {found.hop}, {found.seconds:.1f} s")
    said = line if found.passed else Text.assemble(line, f": {found.why}")
    console().print(said, soft_wrap=True)
