# SPDX-License-Identifier: Apache-2.0
"""Draw in the terminal: a waterfall for one request, percentiles and a mean bar for many.

command.py gives what query.py found; `rich` decides about colours and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ttft_otel import palette, stages
from ttft_otel.report import tree
from ttft_otel.report.query import Trace
from ttft_otel.report.shape import Request
from ttft_otel.report.summary import Summary, summarize

EIGHTHS: Final = " ▏▎▍▌▋▊▉"
SHOWN: Final = 400  # rows of one waterfall


def table(requests: Sequence[Request], console: Console | None = None) -> None:
    """Percentiles of every stage, with the mean request as one bar."""
    out = console or Console()
    summary = summarize(requests)
    if not summary.count:
        out.print(f"{len(requests)} requests, none of which reached a first token")
        return
    out.print(_headline(summary))
    out.print()
    out.print(_bar([(line.name, line.mean) for line in summary.stages], out.width))
    out.print()
    out.print(_percentiles(summary))
    out.print(_verdict(summary))


def waterfall(trace: Trace, one: Request | None = None, console: Console | None = None) -> None:
    """Every span of a trace on one time axis, then the sum of each of its requests."""
    out = console or Console()
    start, end = tree.window(trace.spans)
    left = min(44, max(24, out.width // 3))
    room = max(10, out.width - left - 12)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=left, no_wrap=True, overflow="ellipsis")
    grid.add_column(width=room, no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    rows = tree.rows(trace.spans)
    for row in rows[:SHOWN]:
        name = Text("  " * row.depth + clean(row.span.name), style=_style(row))
        place = (
            (row.span.start_ns - start) / (end - start),
            (row.span.end_ns - start) / (end - start),
        )
        color = palette.color(row.stage) if row.what == "stage" else _service(row.role)
        grid.add_row(name, _track(place, room, color, row.what), Text(short(row.us), style="dim"))
    out.print(grid)
    if len(rows) > SHOWN:
        out.print(Text(f"… {len(rows) - SHOWN} more spans; --json has them all", style="dim"))
    for request in [one] if one else trace.requests:
        out.print(_sum(request, out.width))


def _headline(summary: Summary) -> Text:
    line = summary.ttft
    text = Text()
    text.append(f"{summary.count} requests", style="bold")
    if summary.failed:
        text.append(f", {summary.failed} failed", style="red")
    text.append("\nTTFT", style="dim")
    for word, value in (
        ("p50", line.p50),
        ("p95", line.p95),
        ("p99", line.p99),
        ("mean", line.mean),
    ):
        text.append(f" {word} ", style="dim")
        text.append(short(value * 1000), style="bold")
    return text


def _percentiles(summary: Summary) -> Table:
    found = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    found.add_column("stage", no_wrap=True, min_width=32)
    for word in ("in", "p50 ms", "p95 ms", "p99 ms", "mean ms", "share"):
        found.add_column(word, justify="right", no_wrap=True)
    for line in (*summary.stages, summary.ttft):
        last = line is summary.ttft
        share = 100 * line.mean / summary.ttft.mean if summary.ttft.mean else 0.0
        numbers = (f"{value:.3f}" for value in (line.p50, line.p95, line.p99, line.mean))
        name = Text("ttft") if last else _swatch(line.name)
        style = "bold" if last else ""
        found.add_row(name, str(line.count), *numbers, f"{share:.0f} %", style=style)
    return found


def _verdict(summary: Summary) -> Text:
    if summary.closed:
        return Text("✓ Σ stages + unattributed = ttft, in every request", style="green")
    return Text("✗ Σ stages + unattributed ≠ ttft in some request", style="red")


def _sum(request: Request, width: int) -> Panel:
    """One request's stages as a bar and as a sum that the reader can check."""
    parts = sorted(request.stages.items(), key=lambda part: palette.order(part[0]))
    found = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    found.add_column()
    found.add_column(justify="right")
    found.add_column(justify="right", style="dim")
    for name, us in (*parts, (stages.UNATTRIBUTED, request.unattributed_us)):
        share = 100 * us / request.ttft_us if request.ttft_us else 0.0
        found.add_row(_swatch(name), f"{us / 1000:,.3f}", f"{share:.1f} %")
    mark = "✓" if request.closed else "✗"
    sentence = f"{mark} Σ stages + unattributed = ttft"
    found.add_row("ttft, ms", f"{request.ttft_us / 1000:,.3f}", sentence, style="bold")
    bar = _bar([*parts, (stages.UNATTRIBUTED, request.unattributed_us)], width - 4)
    title = clean(request.request_id or request.trace_id)
    error = f" · {request.error} in {request.died or '?'}" if request.error else ""
    roles = " → ".join(request.roles)
    return Panel(
        Group(bar, Text(), found),
        title=Text(f"{title} · {roles}{clean(error)}", style="red" if error else "bold"),
        title_align="left",
        border_style="dim",
    )


def _bar(parts: Sequence[tuple[str, float]], width: int) -> Text:
    """A bar of full blocks; every piece ends where its running sum says, so none drifts."""
    whole = sum(value for _, value in parts) or 1.0
    text = Text(no_wrap=True)
    at, done = 0.0, 0
    for name, value in parts:
        at += value
        upto = round(width * at / whole)
        glyph = "░" if name == stages.UNATTRIBUTED else "█"
        text.append(glyph * (upto - done), style=palette.color(name))
        done = max(done, upto)
    return text


def _track(place: tuple[float, float], room: int, color: str, what: str) -> Text:
    """One span's place on the axis, to an eighth of a cell; longer than the window is cut."""
    low = min(max(place[0], 0.0), 1.0) * room
    high = max(min(place[1], 1.0) * room, low + 0.125)
    glyph = {"stage": "█", "trunk": "━", "part": "─"}.get(what, "─")
    cells = max(1, round(high) - int(low))
    text = Text(" " * min(int(low), room - 1))
    if glyph == "█" and high - low < 1:
        text.append(EIGHTHS[max(1, int((high - low) * 8))], style=color)
    else:
        text.append(glyph * min(cells, room - min(int(low), room - 1)), style=color)
    return text


def _swatch(name: str) -> Text:
    text = Text("■ ", style=palette.color(name))
    text.append(clean(name), style="default")
    return text


def _style(row: tree.Row) -> str:
    if row.span.status == 2:
        return "red"
    return "bold" if row.what in ("server", "trunk") else "" if row.what == "stage" else "dim"


def _service(role: str) -> str:
    return palette.ROLE_COLORS.get(role, "#9a9a9a")


def clean(text: str) -> str:
    """Foreign text without control characters: a span's name must not steer the terminal."""
    return "".join(each if each.isprintable() else "�" for each in text)


def short(us: float) -> str:
    """Microseconds for people."""
    if us < 1000:
        return f"{us:.0f} µs"
    return f"{us / 1000:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"
