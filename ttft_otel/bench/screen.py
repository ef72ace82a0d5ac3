# SPDX-License-Identifier: Apache-2.0
"""Show a benchmark: progress while it runs, then document.py's numbers as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ttft_otel.bench.drive import Run

COLUMNS: Final = ("p50", "p95", "p99", "mean")
WIDE: Final = 110
TITLES: Final = {
    "ttft": "TTFT",
    "queue_wait": "Queue wait",
    "prefill_to_first_token": "Prefill → first token",
    "tpot": "TPOT",
    "itl": "ITL",
    "latency": "Latency",
}


def console() -> Console:
    """Where results are written; a pipe is wide enough for whole numbers."""
    out = Console()
    return out if out.is_terminal else Console(width=max(WIDE, out.width))


class Progress:
    """One line on a terminal; nothing elsewhere.

    Drawn when the benchmark's own loop asks for it, since a thread that draws would delay sends.
    """

    def __init__(self, console: Console) -> None:
        """Nothing is drawn yet."""
        self.live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def made(self, title: str, count: int, of: int) -> None:
        """Draw how many prompts there are."""
        self._draw(f"{count} of {of} prompts made · {title}")

    def sent(self, title: str, run: Run) -> None:
        """Draw how far a run is."""
        done = len(run.results)
        ttft = [each.ttft_us / 1000 for each in run.results[-100:] if not each.error]
        failed = sum(bool(each.error) for each in run.results)
        middle = f" · TTFT p50 {sorted(ttft)[len(ttft) // 2]:.1f} ms" if ttft else ""
        self._draw(f"{done} done, {run.unfinished} under way, {failed} failed{middle} · {title}")

    def close(self) -> None:
        """Take the line away."""
        self.live.stop()

    def _draw(self, text: str) -> None:
        if self.live.console.is_terminal:
            self.live.start()
            self.live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def show(found: Mapping[str, Any], out: Console) -> None:
    """The whole document."""
    for target in found["targets"]:
        out.print(Text(f"{target['url']}  {target['model']}", style="bold"))
        _target(target, out)
        out.print()
    if found["comparison"]:
        compared(found["comparison"], out)
    if found["uncompared"]:
        out.print(Text(f"✗ No comparison: {found['uncompared']}", style="bold red"))


def _target(target: Mapping[str, Any], out: Console) -> None:
    summary = target["summary"]
    for number, run in enumerate(target["runs"], 1):
        out.print(_headline(run, number if len(target["runs"]) > 1 else 0))
        for kind, first in run["failed"].items():
            said = f"{words}; " if (words := run["complaints"].get(kind)) else ""
            out.print(Text(f"  {kind}: {said}first trace {first[0]['trace_id']}", style="red"))
    out.print()
    named = {TITLES[name]: line for name, line in summary["figures_ms"].items()}
    if named:
        out.print(_table("figure", named))
    if summary["stages_ms"]:
        out.print(_table("stage", summary["stages_ms"]))
    out.print(_rates(summary))
    out.print(Text(summary["explanation"]))
    for run in target["runs"]:
        for why in run["why"]:
            out.print(Text(f"✗ NOT VALID: {why}", style="bold red"))


def _headline(run: Mapping[str, Any], number: int) -> Text:
    text = Text(f"round {number}: " if number else "")
    text.append(f"{run['succeeded']} of {run['started']} requests in {run['seconds']:.2f} s")
    for kind, count in run["failures"].items():
        text.append(f", {count} {kind}", style="red")
    if run["unfinished"]:
        text.append(f", {run['unfinished']} not finished")
    if run["held"]:
        text.append(f", {run['held']} held back by --max-unfinished")
    if run["stopped"]:
        text.append(", stopped", style="yellow")
    late = run["lag_ms"]
    lag = f"; own lag p99: sends {late['send_p99']:.2f} ms, loop {late['loop_p99']:.2f} ms"
    return text.append(lag, style="dim")


def _table(kind: str, lines: Mapping[str, Any]) -> Table:
    found = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    found.add_column(f"{kind}, ms", no_wrap=True, min_width=32)
    for word in ("in", *COLUMNS):
        found.add_column(word, justify="right", no_wrap=True)
    for name, line in lines.items():
        numbers = (_ms(line[column]) for column in COLUMNS)
        found.add_row(name, str(line["count"]), *numbers)
    return found


def _ms(value: float, sign: str = "") -> str:
    """Microseconds where they can matter; a column keeps its width."""
    return f"{value:{sign}.{3 if abs(value) < 1000 else 1}f}"


def _rates(summary: Mapping[str, Any]) -> Text:
    rates = summary["throughput"]
    text = Text(f"{rates['requests_per_s']:.2f} requests/s, ")
    if summary["counted"]:
        text.append(f"{rates['input_tokens_per_s']:.0f} tokens/s in, ")
    text.append(f"{rates['output_tokens_per_s']:.0f} tokens/s out")
    if not summary["counted"]:
        text.append(" (the server reports no usage: answer tokens are counted as events)")
    if goodput := summary["goodput"]:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in goodput["slo_ms"].items())
        text.append(f"\ngoodput {goodput['requests_per_s']:.2f} requests/s, ")
        text.append(f"{100 * goodput['share']:.1f} % of all ({limits})")
    return text


def compared(found: Mapping[str, Any], out: Console) -> None:
    """A comparison, line by line; ● marks a difference whose interval does not contain 0."""
    out.print(Text(f"A {found['a']}\nB {found['b']}", style="bold"))
    rows = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    rows.add_column("ms", no_wrap=True, min_width=32)
    for word in ("A", "B", "B − A", "95 % interval", ""):
        rows.add_column(word, justify="right", no_wrap=True)
    for row in found["rows"]:
        interval = f"{_ms(row['low'], '+')} … {_ms(row['high'], '+')}"
        values = (_ms(row["a"]), _ms(row["b"]), _ms(row["difference"], "+"))
        rows.add_row(row["name"], *values, interval, "●" if row["clear"] else "")
    out.print(rows)
    if not found["valid"]:
        out.print(Text("✗ NOT VALID: one of the runs compared is not valid", style="bold red"))
