# SPDX-License-Identifier: Apache-2.0
"""Terminal output of a benchmark: progress while it runs, then tables of the result document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ttft_otel.bench.load_driver import LoadRun
from ttft_otel.bench.result_document import MIN_ROUNDS

# Stages of a bar, the one that differs most first; blocks of other heights are hard to tell apart.
BAR_PARTS: Final = (("█", "red"), ("▒", "blue"), ("░", "green"))
BAR_WIDTH: Final = 20
VERDICT_SIGNS: Final = {
    "holds": (" ✓", "green"),
    "fails": (" ✗", "red"),
    "undecided": (" ?", "yellow"),
}
COLUMNS: Final = ("p50", "p95", "p99", "mean")
METRIC_TITLES: Final = {
    "ttft": "TTFT",
    "queue_wait": "Queue wait",
    "prefill_to_first_token": "Prefill → first token",
    "tpot": "TPOT",
    "itl": "ITL",
    "latency": "Latency",
}


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
        ttfts_ms = [result.ttft_ms for result in run.results[-100:] if not result.error]
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
    if sweep := document["sweep"]:
        _print_sweep(sweep, out)
    # Of a sweep the table has the figures; of --find there is one target, a rate that holds.
    is_brief = bool(sweep) and not sweep["limit"]
    for target in document["targets"]:
        rate = f"  at {target['rate']:g}" if is_brief else ""
        out.print(Text(f"{target['url']}  {target['model']}{rate}", style="bold"))
        _print_target(target, out, is_brief)
        out.print()
    if document["comparison"]:
        print_comparison(document["comparison"], out)
    if document["uncompared"]:
        out.print(Text(f"✗ No comparison: {document['uncompared']}", style="bold red"))


def _print_sweep(sweep: Mapping[str, Any], out: Console) -> None:
    """The interval of --find, the rates tried, the knee and what grows first."""
    if limit := sweep["limit"]:
        low, high = f"{limit['low']:g}", limit["high"]
        place = f"above {low}" if high is None else f"between {low} and {high:g}"
        conditions = " and ".join(limit["conditions"])
        said = f"{conditions}: the limit is {place} {sweep['unit']} ({limit['confidence']:.0%})"
        out.print(Text(said, style="bold"))
        likely = f"likeliest {limit['estimate']:g}; " if limit["estimate"] else ""
        out.print(Text(f"{likely}the search ended: {limit['ended']}", style="dim"))
    metrics = [each.partition("<")[0] for each in limit["conditions"]] if limit else []
    _print_parts(sweep["rates"], metrics, out)
    knee = "No knee: throughput per TTFT is greatest at the highest rate."
    if sweep["knee"]:
        place = f"{sweep['knee']:g} {sweep['unit']}"
        knee = f"The knee is at {place}, where throughput per TTFT is greatest."
    out.print(Text("\n".join(filter(None, (knee, sweep["explanation"], sweep["whatif"]))) + "\n"))


def _print_parts(parts: Sequence[Mapping[str, Any]], metrics: Sequence[str], out: Console) -> None:
    """A table of rates, or of the slices of a ramp; a bar is the TTFT of the slowest, by stage."""
    from_title = ["from s"] * ("from_s" in parts[0])
    table = _create_table(*from_title, "rate", "in", "p50", "p95", *metrics, "slowest")
    table.add_column("by stage", no_wrap=True)
    names = _choose_stages(parts)
    longest = max(sum(row["slowest_stages_ms"].values()) for row in parts)
    for row in parts:
        first = [f"{row['from_s']:.1f}"] if from_title else []
        mark, style = VERDICT_SIGNS.get(row.get("verdict") or "", ("", ""))
        ttfts = [
            _format_ms(row["ttft_ms"][each]) if row["ttft_ms"] else "–" for each in ("p50", "p95")
        ]
        beyond = row.get("beyond") or [None] * len(metrics)
        shares = ["–" if share is None else f"{share:.1%}" for share in beyond]
        stages_ms = row["slowest_stages_ms"]
        slowest = _format_ms(sum(stages_ms.values())) if stages_ms else "–"
        bar = _draw_bar(stages_ms, names, longest)
        rate = Text(f"{row['rate']:g}{'!' * bool(row.get('overloaded'))}{mark}", style)
        table.add_row(*first, rate, str(row["requests"]), *ttfts, *shares, slowest, bar)
    out.print(table)
    legend = Text("ms; ", "dim")
    for name, (sign, color) in names.items():
        legend.append(f"{sign} ", color).append(f"{name} ", "dim")
    if metrics:
        legend.append(
            f"\n{', '.join(metrics)}: requests beyond the limit; !: a round ended early", "dim"
        )
    out.print(legend)


def _choose_stages(parts: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """The stages that differ most between rows, each with its sign and colour in a bar."""
    names = dict.fromkeys(name for row in parts for name in row["slowest_stages_ms"])
    values = {name: [row["slowest_stages_ms"].get(name, 0.0) for row in parts] for name in names}
    ranked = sorted(names, key=lambda name: min(values[name]) - max(values[name]))
    # Signs differ, because a log has no colours.
    return dict(zip(ranked, BAR_PARTS, strict=False))


def _draw_bar(
    stages_ms: Mapping[str, float], parts: Mapping[str, tuple[str, str]], longest_ms: float
) -> Text:
    """The named stages as parts of a bar, then the others; of BAR_WIDTH where they take `longest_ms`."""
    bar, ms, end = Text(), 0.0, 0
    rest = sum(value for name, value in stages_ms.items() if name not in parts)
    lengths = [(stages_ms.get(name, 0.0), *parts[name]) for name in parts]
    for length, sign, color in (*lengths, (rest, "·", "dim")):
        # Ends are rounded and not lengths, so that the whole bar is right.
        ms += max(0.0, length)
        begin, end = end, round(BAR_WIDTH * ms / longest_ms) if longest_ms else 0
        bar.append(sign * (end - begin), color)
    return bar


def _print_target(target: Mapping[str, Any], out: Console, is_brief: bool) -> None:
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
    if not is_brief:
        _print_summary(summary, out)
    for run in target["runs"]:
        if run["slices"] and not run["steady"]:  # a ramp
            _print_parts(run["slices"], (), out)
            out.print(Text(run["growth"]))
        for why in run["why"]:
            out.print(Text(f"✗ NOT VALID: {why}", style="bold red"))


def _print_summary(summary: Mapping[str, Any], out: Console) -> None:
    out.print()
    named = {METRIC_TITLES[name]: line for name, line in summary["figures_ms"].items()}
    if named:
        out.print(_build_table("figure", named))
    if summary["stages_ms"]:
        out.print(_build_table("stage", summary["stages_ms"]))
    out.print(_describe_rates(summary))
    out.print(Text(summary["explanation"]))


def _build_headline(run: Mapping[str, Any], number: int) -> Text:
    text = Text(f"round {number}: " if number else "")
    text.append(f"{run['succeeded']} of {run['started']} requests in {run['seconds']:.2f} s")
    for kind, count in run["failures"].items():
        text.append(f", {count} {kind}", style="red")
    if run["unfinished"]:
        text.append(f", {run['unfinished']} not finished")
    if run["stopped"]:
        text.append(", stopped", style="yellow")
    lags_ms = run["lag_ms"]
    lag_text = (
        f"; own lag p99: sends {lags_ms['send_p99']:.2f} ms, loop {lags_ms['loop_p99']:.2f} ms"
    )
    text.append(lag_text, style="dim")
    if not (steady := run["steady"]):
        return text
    if steady["from_s"] is None:
        return text.append("\n! not steady: send more requests, or fewer a second", "yellow")
    figures = ", ".join(f"{name} {_format_ms(steady['ttft_ms'][name])}" for name in ("p50", "p95"))
    count = f"{steady['ttft_ms']['count']} requests"
    said = f"\nwarm-up until {steady['from_s']:.1f} s; {count} later: TTFT {figures} ms"
    return text.append(said if steady["from_s"] else "", "dim")


def _create_table(*titles: str) -> Table:
    """A table of numbers, beside names where the first title says that they are in ms."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(title, justify="left" if title.endswith("ms") else "right", no_wrap=True)
    return table


def _build_table(kind: str, distributions: Mapping[str, Any]) -> Table:
    table = _create_table(f"{kind}, ms", "in", *COLUMNS)
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
    table = _create_table("ms", "A", "B", "B − A", "± 95 %", "")
    for row in comparison["rows"]:
        # Symmetric: half of it beside the difference is enough.
        interval = "–" if row["low"] is None else _format_ms((row["high"] - row["low"]) / 2)
        values = (_format_ms(row["a"]), _format_ms(row["b"]), _format_ms(row["difference"], "+"))
        table.add_row(row["name"], *values, interval, "●" if row["clear"] else "")
    out.print(table)
    if comparison["rounds"] < MIN_ROUNDS:
        said = "No intervals and no marks: how much rounds differ is known from"
        out.print(Text(f"{said} {MIN_ROUNDS} on (--repeat).", style="yellow"))
    if not comparison["valid"]:
        out.print(Text("✗ NOT VALID: one of the runs compared is not valid", style="bold red"))
