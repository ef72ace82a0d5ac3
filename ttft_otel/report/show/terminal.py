# SPDX-License-Identifier: Apache-2.0
"""Terminal output of `ttft-otel report`: a waterfall for one request, percentiles for many; what all commands
format alike.

`rich` determines the width and colours: the terminal's, or $COLUMNS, else 80 columns.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ttft_otel.model import stages
from ttft_otel.report.assemble import request_assembly
from ttft_otel.report.assemble.summary import Notes, Summary, SummaryLine, describe_notes, summarize
from ttft_otel.report.report_types import Request, TimeBefore
from ttft_otel.report.store.database_reader import StoredTrace

EIGHTHS: Final = " ▏▎▍▌▋▊▉"
QUANTILES: Final = ("p50", "p95", "p99", "mean")  # of a SummaryLine
MAX_SHOWN_ROWS: Final = 400  # spans shown in one waterfall
UNIT_GAP: Final = re.compile(r"(?<=\d) (?=(?:µs|ms|s|%|tokens|requests)(?!\w))")


def print_summary(requests: Sequence[Request], console: Console | None = None) -> None:
    """Print percentiles of every stage over `requests`, and the means of the stages as a bar."""
    out = console or Console()
    summary = summarize(requests)
    # Percentiles of nothing would be printed as zeros.
    if not summary.count:
        out.print(f"{len(requests)} requests, none of which reached a first token")
        return
    out.print(_format_headline(summary))
    out.print()
    out.print(_draw_bar([(line.name, line.mean) for line in summary.stages], out.width))
    out.print()
    out.print(_build_percentile_table(summary))
    _print_notes(summary.notes, out)
    if summary.closed:
        out.print(Text("✓ Σ stages + unattributed = ttft, in every request", style="green"))
    else:
        out.print(Text("✗ Σ stages + unattributed ≠ ttft in some request", style="red"))


def print_waterfall(
    trace: StoredTrace, only_request: Request | None = None, console: Console | None = None
) -> None:
    """Print every span of `trace` on one time axis, then the sum of stages of its requests.

    only_request: the request whose sum is printed; by default all of the trace.
    """
    out = console or Console()
    requests = [only_request] if only_request else list(trace.requests)
    for request in requests:
        if request.before:
            out.print(_format_before(request.before))
    start, end = request_assembly.find_window(trace.spans)
    # Room for indented names, but never most of the screen.
    left = min(44, max(24, out.width // 3))
    axis_width = max(10, out.width - left - 12)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=left, no_wrap=True, overflow="ellipsis")
    grid.add_column(width=axis_width, no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    rows = request_assembly.build_rows(trace.spans)
    # A trace may have thousands: the terminal would scroll the request away.
    for row in rows[:MAX_SHOWN_ROWS]:
        name = Text("  " * row.depth + remove_controls(row.span.name), style=_choose_style(row))
        place = (
            # find_window() never returns an empty range.
            (row.span.start_ns - start) / (end - start),
            (row.span.end_ns - start) / (end - start),
        )
        color = (
            stages.find_color(row.stage)
            if row.what == "stage"
            else stages.ROLE_COLORS.get(row.role, "#9a9a9a")
        )
        grid.add_row(
            name,
            _draw_track(place, axis_width, color, row.what),
            Text(format_short(row.us), style="dim"),
        )
    out.print(grid)
    if len(rows) > MAX_SHOWN_ROWS:
        out.print(
            Text(f"… {len(rows) - MAX_SHOWN_ROWS} more spans; --json has them all", style="dim")
        )
    for request in requests:
        out.print(_build_sum_panel(request, out.width))
    _print_notes(describe_notes(requests, requests), out)


def _print_notes(notes: Notes, out: Console) -> None:
    for mark, said, style in zip("!±!", notes, ("yellow", "dim", "yellow"), strict=True):
        if said:
            out.print(Text(f"{mark} {remove_controls(said)}", style=style))


def _format_before(before: TimeBefore) -> Text:
    text = Text(
        f'before (router "{remove_controls(before.caller)}", not in the sum)  ', style="dim"
    )
    text.append(format_short(before.us), style="bold")
    if before.error_us is None:
        text.append(" ± unknown: its clock is another host's")
    else:
        text.append(f" ± {format_short(before.error_us)}")
    return text


def _format_headline(summary: Summary) -> Text:
    line = summary.ttft
    text = Text()
    text.append(f"{summary.count} requests", style="bold")
    if summary.failed:
        text.append(f", {summary.failed} failed", style="red")
        text.append(f" ({summary.left} clients left, {summary.refused} refused)", style="dim")
    text.append("\nTTFT", style="dim")
    for word in QUANTILES:
        text.append(f" {word} ", style="dim")
        text.append(format_short(getattr(line, word) * 1000), style="bold")
    return text


def _build_percentile_table(summary: Summary) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("stage, ms", no_wrap=True)
    for word in ("in", *QUANTILES, "share"):
        table.add_column(word, justify="right", no_wrap=True)
    for line in (*summary.stages, summary.ttft):
        last = line is summary.ttft
        # Of means, which add up; percentiles do not.
        share = 100 * line.mean / summary.ttft.mean if summary.ttft.mean else 0.0
        numbers = _list_quantiles(line)
        name = Text("ttft") if last else _draw_swatch(line.name)
        style = "bold" if last else ""
        table.add_row(name, str(line.count), *numbers, f"{share:.0f} %", style=style)
    if before := summary.before:
        numbers = _list_quantiles(before)
        table.add_row("before, not in the sum", str(before.count), *numbers, "", style="dim")
    return table


def _list_quantiles(line: SummaryLine) -> list[str]:
    return [format_ms(1000 * getattr(line, word)) for word in QUANTILES]


def _build_sum_panel(request: Request, width: int) -> Panel:
    """One request's stages as a bar, and as a sum that the reader can check."""
    parts = request.ordered_stages
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    for name, us in (*parts, (stages.UNATTRIBUTED, request.unattributed_us)):
        share = 100 * us / request.ttft_us if request.ttft_us else 0.0
        table.add_row(_draw_swatch(name), f"{us / 1000:,.3f}", f"{share:.1f} %")
        for reason, length in request.list_wait_reasons(name):
            table.add_row(f"    {reason}", f"{length / 1000:,.3f}", style="dim")
        for kind, length in request.list_holding_kinds(name):
            table.add_row(f"    held by: {kind}", f"{length / 1000:,.3f}", style="dim")
    mark = "✓" if request.closed else "✗"
    table.add_row("ttft, ms", f"{request.ttft_us / 1000:,.3f}", style="bold")
    sentence = Text(f"{mark} Σ stages + unattributed = ttft", style="bold")
    bar = _draw_bar([*parts, (stages.UNATTRIBUTED, request.unattributed_us)], width - 4)
    title = remove_controls(request.request_id or request.trace_id)
    error = f" · {request.error} in {request.died or '?'}" if request.error else ""
    roles = remove_controls(" → ".join(request.roles))
    return Panel(
        Group(bar, Text(), table, sentence),
        title=Text(f"{title} · {roles}{remove_controls(error)}", style="red" if error else "bold"),
        title_align="left",
        border_style="dim",
    )


def _draw_bar(parts: Sequence[tuple[str, float]], width: int) -> Text:
    """A bar of full blocks; each piece ends at its rounded running sum, so that errors don't add up."""
    total = sum(value for _, value in parts) or 1.0
    text = Text(no_wrap=True)
    at, done = 0.0, 0
    for name, value in parts:
        at += value
        upto = round(width * at / total)
        glyph = "░" if name == stages.UNATTRIBUTED else "█"
        text.append(glyph * (upto - done), style=stages.find_color(name))
        done = max(done, upto)
    return text


def _draw_track(place: tuple[float, float], axis_width: int, color: str, kind: str) -> Text:
    """One span on the axis, to an eighth of a cell.

    place: start and end as shares of the window; parts outside of 0 to 1 are cut off.
    """
    low = min(max(place[0], 0.0), 1.0) * axis_width
    # At least an eighth of a cell: the shortest span is still seen.
    high = max(min(place[1], 1.0) * axis_width, low + 0.125)
    # Different glyphs: without colours the kinds still differ.
    glyph = {"stage": "█", "trunk": "━", "part": "─"}.get(kind, "─")
    cells = max(1, round(high) - int(low))
    text = Text(" " * min(int(low), axis_width - 1))
    if glyph == "█" and high - low < 1:
        text.append(EIGHTHS[max(1, int((high - low) * 8))], style=color)
    else:
        text.append(glyph * min(cells, axis_width - min(int(low), axis_width - 1)), style=color)
    return text


def _draw_swatch(name: str) -> Text:
    text = Text("■ ", style=stages.find_color(name))
    text.append(remove_controls(name), style="default")
    return text


def _choose_style(row: request_assembly.WaterfallRow) -> str:
    if row.span.status == 2:
        return "red"
    return "bold" if row.what in ("server", "trunk") else "" if row.what == "stage" else "dim"


def remove_controls(text: str) -> str:
    """Replace control characters: a span's name must not be able to control the terminal."""
    return "".join(each if each.isprintable() else "�" for each in text)


def round_ms(us: float) -> float:
    """Milliseconds with the marks' three decimals; a float, as numpy's scalars are no JSON."""
    return round(float(us) / 1000, 3)


def format_ms(us: float, sign: str = "") -> str:
    """Milliseconds with three decimals, or one from 1000 ms on, so that columns keep their width."""
    return f"{us / 1000:{sign}.{3 if abs(us) < 1e6 else 1}f}"


def format_short(us: float) -> str:
    """Microseconds as text in µs, ms or s."""
    if us < 1000:
        return f"{us:.0f} µs"
    return f"{us / 1000:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def format_signed(us: float) -> str:
    return f"{'-' if us < 0 else '+'}{format_short(abs(us))}"


def print_sentence(out: Console, sentence: str, mark: str = "", style: str = "") -> None:
    """Print a sentence, wrapped below its mark; numbers stay beside their units."""
    wrapped = textwrap.fill(
        mark + UNIT_GAP.sub("\N{NO-BREAK SPACE}", sentence),
        out.width,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        # Flags are full of hyphens.
        break_on_hyphens=False,
    )
    out.print(Text(wrapped.replace("\N{NO-BREAK SPACE}", " "), style=style), soft_wrap=True)


def print_sentences(out: Console, sentences: Sequence[str], verbose: bool) -> None:
    """Print an answer, of which the first sentence is the answer in short; `verbose`: nothing is left out."""
    first, *rest = sentences
    print_sentence(out, first, style="bold")
    for sentence in rest:
        print_sentence(out, sentence, "• ")
    if not verbose:
        out.print(Text("more: --verbose", style="dim"))


def to_local_time(unix_ns: int) -> datetime:
    """A moment in the reader's time zone, as commands show it."""
    return datetime.fromtimestamp(unix_ns / 1e9).astimezone()
