# SPDX-License-Identifier: Apache-2.0
"""Terminal output of a benchmark: progress while it runs, then tables of the result document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ttft_otel.bench.comparison import MIN_ROUNDS
from ttft_otel.bench.load_driver import LoadRun

KNEE_STAGES: Final = 3  # columns of the table of --find
COLUMNS: Final = ("p50", "p95", "p99", "mean")
METRIC_TITLES: Final = {
    "ttft": "TTFT",
    "queue_wait": "Queue wait",
    "prefill_to_first_token": "Prefill → first token",
    "tpot": "TPOT",
    "itl": "ITL",
    "latency": "Latency",
}


FEW_ROUNDS: Final = (
    f"No intervals and no marks: how much rounds differ is known from {MIN_ROUNDS} on (--repeat)."
)


class ProgressLine:
    """A progress line on a terminal; nothing elsewhere.

    Drawn from the benchmark's own loop, because a drawing thread would delay sends.
    """

    def __init__(self, console: Console) -> None:
        self.live = Live(
            console=console,
            # No thread of rich's, which would take the interpreter from the sends.
            auto_refresh=False,
            transient=True,
            # Results go to stdout, which may be a pipe: rich must not wrap it.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def report_prepared(self, title: str, count: int, total: int) -> None:
        """Draw the number of prompts made."""
        self._draw_line(f"{count} of {total} prompts made · {title}")

    def report_sent(self, title: str, run: LoadRun) -> None:
        """Draw the state of `run`, with the median TTFT of its last 100 requests."""
        done = len(run.results)
        # Only the last 100, so that each update takes the same time in a long run.
        ttfts_ms = [result.ttft_us / 1000 for result in run.results[-100:] if not result.error]
        failed = sum(bool(result.error) for result in run.results)
        median = f" · TTFT p50 {sorted(ttfts_ms)[len(ttfts_ms) // 2]:.1f} ms" if ttfts_ms else ""
        self._draw_line(
            f"{done} done, {run.unfinished} under way, {failed} failed{median} · {title}"
        )

    def close(self) -> None:
        """Remove the line."""
        self.live.stop()

    def _draw_line(self, text: str) -> None:
        # In a log file each update would be a line.
        if self.live.console.is_terminal:
            self.live.start()
            self.live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def print_document(document: Mapping[str, Any], out: Console) -> None:
    """Print a result document."""
    if document["limit"]:
        _print_limit(document["limit"], out)
    for target in document["targets"]:
        out.print(Text(f"{target['url']}  {target['model']}", style="bold"))
        _print_target(target, out)
        out.print()
    if document["comparison"]:
        print_comparison(document["comparison"], out)
    if document["uncompared"]:
        out.print(Text(f"✗ No comparison: {document['uncompared']}", style="bold red"))


def _print_limit(limit: Mapping[str, Any], out: Console) -> None:
    """The interval of --find, and a table of the rates tried: the knee."""
    low, high = f"{limit['low']:g}", limit["high"]
    place = f"above {low}" if high is None else f"between {low} and {high:g}"
    conditions = " and ".join(limit["conditions"])
    out.print(
        Text(
            f"{conditions}: the limit is {place} {limit['unit']} ({limit['confidence']:.0%})",
            style="bold",
        )
    )
    likely = f"likeliest {limit['estimate']:g}; " if limit["estimate"] else ""
    out.print(Text(f"{likely}the search ended: {limit['ended']}", style="dim"))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    names = _choose_knee_stages(limit["probes"])
    metrics = [each.partition("<")[0] for each in limit["conditions"]]
    for title in ("rate", "verdict", "in", *metrics, *names):
        is_word = title == "verdict"
        table.add_column(title, justify="left" if is_word else "right", overflow="fold")
    for row in limit["probes"]:
        verdict = f"{row['verdict']}{', overloaded' if row['overloaded'] else ''}"
        shares = [f"{share:.1%}" for share in row["beyond"]] or ["–"] * len(metrics)
        stages_ms = [_format_ms(row["slowest_stages_ms"].get(name, 0.0)) for name in names]
        style = {"holds": "green", "fails": "red"}.get(row["verdict"], "yellow")
        table.add_row(
            f"{row['rate']:g}", Text(verdict, style), str(row["requests"]), *shares, *stages_ms
        )
    out.print(table)
    out.print(
        Text(
            f"{', '.join(metrics)}: requests beyond the limit; stages: ms of the slowest requests",
            "dim",
        )
    )
    out.print(Text("\n".join(filter(None, (limit["explanation"], limit["whatif"]))) + "\n"))


def _choose_knee_stages(probes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The stages that differ most between rates."""
    names = dict.fromkeys(name for row in probes for name in row["slowest_stages_ms"])
    values = {name: [row["slowest_stages_ms"].get(name, 0.0) for row in probes] for name in names}
    ranked = sorted(names, key=lambda name: min(values[name]) - max(values[name]))
    return ranked[:KNEE_STAGES]


def _print_target(target: Mapping[str, Any], out: Console) -> None:
    summary = target["summary"]
    for number, run in enumerate(target["runs"], 1):
        out.print(_build_headline(run, number if len(target["runs"]) > 1 else 0))
        for kind, first_failures in run["failed"].items():
            complaint = f"{words}; " if (words := run["complaints"].get(kind)) else ""
            out.print(
                Text(
                    f"  {kind}: {complaint}first trace {first_failures[0]['trace_id']}", style="red"
                )
            )
    out.print()
    named = {METRIC_TITLES[name]: line for name, line in summary["figures_ms"].items()}
    if named:
        out.print(_build_table("figure", named))
    if summary["stages_ms"]:
        out.print(_build_table("stage", summary["stages_ms"]))
    out.print(_describe_rates(summary))
    out.print(Text(summary["explanation"]))
    for run in target["runs"]:
        for why in run["why"]:
            out.print(Text(f"✗ NOT VALID: {why}", style="bold red"))


def _build_headline(run: Mapping[str, Any], number: int) -> Text:
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
    lags_ms = run["lag_ms"]
    lag_text = (
        f"; own lag p99: sends {lags_ms['send_p99']:.2f} ms, loop {lags_ms['loop_p99']:.2f} ms"
    )
    return text.append(lag_text, style="dim")


def _build_table(kind: str, distributions: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(f"{kind}, ms", no_wrap=True)
    for word in ("in", *COLUMNS):
        table.add_column(word, justify="right", no_wrap=True)
    for name, line in distributions.items():
        numbers = (_format_ms(line[column]) for column in COLUMNS)
        table.add_row(name, str(line["count"]), *numbers)
    return table


def _format_ms(value: float, sign: str = "") -> str:
    """Milliseconds with three decimals, or one from 1000 ms on, so that columns keep their width."""
    return f"{value:{sign}.{3 if abs(value) < 1000 else 1}f}"


def _describe_rates(summary: Mapping[str, Any]) -> Text:
    rates = summary["throughput"]
    text = Text(f"{rates['requests_per_s']:.2f} requests/s, ")
    # Without the server's usage nobody knows how long a chat's prompt was.
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


def print_comparison(comparison: Mapping[str, Any], out: Console) -> None:
    """Print a comparison as a table; ● marks differences whose interval does not contain 0."""
    out.print(Text(f"A {comparison['a']}\nB {comparison['b']}", style="bold"))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("ms", no_wrap=True)
    for word in ("A", "B", "B − A", "± 95 %", ""):
        table.add_column(word, justify="right", no_wrap=True)
    for row in comparison["rows"]:
        # Symmetric: half of it beside the difference is enough.
        interval = "–" if row["low"] is None else _format_ms((row["high"] - row["low"]) / 2)
        values = (_format_ms(row["a"]), _format_ms(row["b"]), _format_ms(row["difference"], "+"))
        table.add_row(row["name"], *values, interval, "●" if row["clear"] else "")
    out.print(table)
    if comparison["rounds"] < MIN_ROUNDS:
        out.print(Text(FEW_ROUNDS, style="yellow"))
    if not comparison["valid"]:
        out.print(Text("✗ NOT VALID: one of the runs compared is not valid", style="bold red"))
