# SPDX-License-Identifier: Apache-2.0
"""Terminal output of demo.py and compat.py: progress while servers start, then a table of requests."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from ttft_otel.model import stages
from ttft_otel.report.show.terminal import remove_controls

# Wide enough for the table of requests; Rich would assume 80.
DEFAULT_WIDTH: Final = 144  # columns of output that is not a terminal
PROGRESS_INTERVAL_S: Final = 10.0  # seconds between two progress lines without a terminal
# vLLM's "(EngineCore pid=1) INFO 01-31 12:00:00 [core.py:1] ", which is cut off.
LOG_PREFIX = re.compile(r"^(\(.*?\) )?([A-Z]+ [\d-]+ [\d:]+ \[[^]]*\] )?")


class ProgressScreen:
    """Progress on a terminal as one changing line, elsewhere as a line every ten seconds."""

    def __init__(self, console: Console, status: Status) -> None:
        """Made by `open_screen`."""
        self.console = console
        self.status = status
        self.started_at = self.last_printed_at = time.monotonic()

    def print_line(self, text: str | Text = "", style: str = "") -> None:
        """Print a line that stays."""
        # No markup: brackets in a log line are not Rich's tags.
        self.console.print(text, style=style, highlight=False, markup=False)

    def begin_step(self, text: str) -> None:
        """Print the name of the next step, with the time since the start."""
        self.print_line(f"{time.monotonic() - self.started_at:6.1f} s  {text}", "bold")
        self.update_status(text)

    def update_status(self, text: str) -> None:
        """Replace the progress line by `text`."""
        # Control characters of a log would move the cursor or change colours.
        self.status.update(Text(remove_controls(text), overflow="ellipsis", no_wrap=True))
        if (
            not self.console.is_terminal
            and time.monotonic() - self.last_printed_at > PROGRESS_INTERVAL_S
        ):
            self.last_printed_at = time.monotonic()
            self.print_line(
                f"{time.monotonic() - self.started_at:6.1f} s    {remove_controls(text)}"
            )

    def report_waiting(self, name: str, seconds: float, line: str) -> None:
        """A local_servers.ProgressCallback: shows the server, the time, and its last log line."""
        # 70 columns: the line must fit on a narrow terminal, since a wrapped one cannot be redrawn.
        doing = LOG_PREFIX.sub("", "".join(filter(str.isprintable, line)).strip())[:70]
        self.update_status(f"waiting for {name}, {seconds:.0f} s · {doing}")


@contextmanager
def open_screen(stderr: bool = False) -> Iterator[ProgressScreen]:
    """A ProgressScreen for a block; stderr: write there, so that stdout holds only results."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console = Console(stderr=stderr, width=DEFAULT_WIDTH)
    # Where there is no terminal Rich draws no spinner; update_status() prints lines instead.
    with console.status("") as status:
        yield ProgressScreen(console, status)


def build_requests_table(rows: list[dict[str, Any]], failed: Collection[str]) -> Table:
    """A table of report.json's requests; `failed` are the IDs of those with faults."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    # A minimum for all but the stages, so that a narrow terminal cuts these alone.
    for word, width in (("request", 7), ("kind", 24)):
        table.add_column(word, no_wrap=True, min_width=width)
    # Right-justified: digits of one place stand below each other.
    for word in ("client", "ttft ms", "differ"):
        table.add_column(word, justify="right", no_wrap=True, min_width=7)
    table.add_column("largest stages, ms", overflow="ellipsis")
    table.add_column("unattr.", justify="right", no_wrap=True, min_width=7)
    table.add_column("closed", no_wrap=True, min_width=6)
    for row in rows:
        client_ms = row["client_ttft_ms"]
        closed = row["closed"] and row["request_id"] not in failed
        table.add_row(
            row["request_id"],
            row["kind"],
            "–" if client_ms is None else f"{client_ms:.1f}",
            f"{row['ttft_ms']:.1f}",
            "–" if client_ms is None else f"{client_ms - row['ttft_ms']:.2f}",
            format_largest_stages(row["stages"]),
            f"{row['unattributed_ms']:.3f}",
            Text("yes", "green") if closed else Text("NO", "bold red"),
        )
    return table


def format_largest_stages(parts: Mapping[str, float], count: int = 3) -> Text:
    """The largest stages, in the order in which they happen, each in its colour."""
    # The largest by time, then shown in the order in which they happen.
    chosen = sorted(parts, key=lambda name: parts[name], reverse=True)[:count]
    text = Text(no_wrap=True, overflow="ellipsis")
    for name in sorted(chosen, key=stages.rank_stage):
        leg = stages.find_leg(name)
        word = "hop" if name.startswith("router.hop.") else stages.split_stage(name)[1]
        text.append("■ ", style=stages.find_color(name))
        text.append(f"{stages.ROLE_SHORT.get(leg, leg)} {word}".strip() + f" {parts[name]:.1f}  ")
    return text
