# SPDX-License-Identifier: Apache-2.0
"""What demo.py and compat.py show: progress while servers start, then one line per request."""

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

from ttft_otel import palette, stages
from ttft_otel.report.terminal import clean

WIDE: Final = 144  # columns where nobody says how wide the output is
EVERY: Final = 10.0  # seconds between two lines where nothing can be overwritten
# vLLM's "(EngineCore pid=1) INFO 01-31 12:00:00 [core.py:1] ": of no interest while waiting.
PREFIX = re.compile(r"^(\(.*?\) )?([A-Z]+ [\d-]+ [\d:]+ \[[^]]*\] )?")


class Screen:
    """Progress on a terminal as one changing line, elsewhere as a line every ten seconds."""

    def __init__(self, console: Console, status: Status) -> None:
        """Made by `showing`."""
        self.console = console
        self.status = status
        self.began = self.told = time.monotonic()

    def say(self, text: str | Text = "", style: str = "") -> None:
        """A line that stays."""
        self.console.print(text, style=style, highlight=False, markup=False)

    def step(self, text: str) -> None:
        """The next part of the work begins."""
        self.say(f"{time.monotonic() - self.began:6.1f} s  {text}", "bold")
        self.now(text)

    def now(self, text: str) -> None:
        """What is going on at the moment."""
        self.status.update(Text(clean(text), overflow="ellipsis", no_wrap=True))
        if not self.console.is_terminal and time.monotonic() - self.told > EVERY:
            self.told = time.monotonic()
            self.say(f"{time.monotonic() - self.began:6.1f} s    {clean(text)}")

    def waiting(self, name: str, seconds: float, line: str) -> None:
        """servers.Progress: which server is waited for, how long, what it does."""
        doing = PREFIX.sub("", "".join(filter(str.isprintable, line)).strip())[:70]
        self.now(f"waiting for {name}, {seconds:.0f} s · {doing}")


@contextmanager
def showing(stderr: bool = False) -> Iterator[Screen]:
    """A Screen for the length of a block; stderr: leave stdout to machines."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console = Console(stderr=stderr, width=WIDE)
    with console.status("") as status:
        yield Screen(console, status)


def requests_table(rows: list[dict[str, Any]], failed: Collection[str]) -> Table:
    """report.json's requests, one line each; `failed` are the ids of those that did not close."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    # A minimum for all but the stages, so that a narrow terminal cuts these alone.
    for word, width in (("request", 7), ("kind", 24)):
        table.add_column(word, no_wrap=True, min_width=width)
    for word in ("client", "ttft ms", "differ"):
        table.add_column(word, justify="right", no_wrap=True, min_width=7)
    table.add_column("largest stages, ms", overflow="ellipsis")
    table.add_column("unattr.", justify="right", no_wrap=True, min_width=7)
    table.add_column("closed", no_wrap=True, min_width=6)
    for row in rows:
        theirs = row["client_ttft_ms"]
        closed = row["closed"] and row["request_id"] not in failed
        table.add_row(
            row["request_id"],
            row["kind"],
            "–" if theirs is None else f"{theirs:.1f}",
            f"{row['ttft_ms']:.1f}",
            "–" if theirs is None else f"{theirs - row['ttft_ms']:.2f}",
            largest(row["stages"]),
            f"{row['unattributed_ms']:.3f}",
            Text("yes", "green") if closed else Text("NO", "bold red"),
        )
    return table


def largest(parts: Mapping[str, float], count: int = 3) -> Text:
    """The largest stages, in the order in which they happen, each in its colour."""
    chosen = sorted(parts, key=lambda name: parts[name], reverse=True)[:count]
    text = Text(no_wrap=True, overflow="ellipsis")
    for name in sorted(chosen, key=palette.order):
        leg = palette.leg(name)
        word = "hop" if name.startswith("router.hop.") else stages.split(name)[1]
        text.append("■ ", style=palette.color(name))
        text.append(f"{palette.ROLE_SHORT.get(leg, leg)} {word}".strip() + f" {parts[name]:.1f}  ")
    return text
