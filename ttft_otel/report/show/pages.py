# SPDX-License-Identifier: Apache-2.0
"""Render requests, traces and answers as HTML, for report_server.py and for the file of scripts/demo.

"Why?" and "Before and after" are made of what `explain` and `diff` print as JSON (docs/*.schema.json).
All values are escaped. Bars are SVG with percentages, so that no inline style is needed, which the
server's Content-Security-Policy forbids.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ttft_otel import __version__
from ttft_otel.model import stages
from ttft_otel.model.names import keys
from ttft_otel.report.assemble import request_assembly
from ttft_otel.report.assemble.summary import Summary, describe_notes, summarize
from ttft_otel.report.breakdown_source import ComparedWindows, ExplainAnswer, ExplainQuestion
from ttft_otel.report.receive.otlp_decoder import read_holders
from ttft_otel.report.report_types import SPAN_KINDS, STATUS_ERROR, Request
from ttft_otel.report.store.database_reader import RequestFilter, StoredTrace

PACKAGE_FOLDER: Final = Path(__file__).parent
PERCENT_PER_LETTER: Final = 0.56  # width of one letter of a label, in percent of the bar
MIN_LABEL_PERCENT: Final = 6.5  # width of a label's number, in percent of the bar
MAX_INDENT: Final = 12  # levels of indentation in the style sheet
MIN_DOTS: Final = 3  # requests without which there is nothing to see over time
MAX_STAGES: Final = 6  # in the table of an answer, those that differ most
MAX_ROWS: Final = 2000  # spans drawn per trace
DASHBOARD: Final = "ttft"  # the uid of grafana/dashboards/ttft.json
AROUND_NS: Final = 300 * 10**9  # what a dashboard shows before and after a trace

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One coloured piece of a bar; x and width in percent of the bar's box."""

    name: str
    us: float
    x: float
    width: float

    @property
    def css(self) -> str:
        return stages.get_css_class(self.name)

    @property
    def word(self) -> str:
        """Its label, the stage without its leg; "" where it is too narrow for the text."""
        word = stages.strip_leg(self.name)
        # SVG does not clip text to its bar: it would run into the next one.
        return word if self.width >= max(MIN_LABEL_PERCENT, PERCENT_PER_LETTER * len(word)) else ""


def render_index(
    requests: Sequence[Request],
    wanted: RequestFilter,
    models: Sequence[str],
    is_explained: bool = False,
) -> str:
    """The page with the list of requests, their percentiles, and their TTFTs over time.

    wanted, models: current values and choices of the filter form. is_explained: as in render_trace().
    """
    longest = max((each.ttft_us for each in requests), default=0)
    summary = summarize(requests)
    return render_template(
        "index.html",
        requests=requests,
        longest=longest,
        summary=summary,
        dots=build_scatter(requests, summary.ttft.p95 * 1000),
        is_explained=is_explained,
        wanted=wanted,
        models=models,
        roles=stages.ROLES,
    )


def render_trace(
    stored_trace: StoredTrace, is_explained: bool = False, grafana_url: str = ""
) -> str:
    """The page of one trace: its requests with their legs, and the waterfall of all spans.

    is_explained: requests have a link "Why?". grafana_url: "" without a link to the dashboard.
    """
    start_ns, end_ns = request_assembly.find_window(stored_trace.spans)
    dashboard = link_dashboard(
        grafana_url, start_ns - AROUND_NS, end_ns + AROUND_NS, {"var-trace": stored_trace.trace_id}
    )
    return render_template(
        "trace.html", trace=stored_trace, is_explained=is_explained, dashboard=dashboard
    )


def link_dashboard(
    grafana_url: str, since_ns: int, until_ns: int, variables: Mapping[str, str]
) -> str:
    """The address of the dashboard TTFT at a time, 0 for its own; "" without Grafana."""
    ends = {"from": since_ns // 10**6, "to": until_ns // 10**6}
    asked = {name: str(ms) for name, ms in ends.items() if ms} | dict(variables)
    return f"{grafana_url}/d/{DASHBOARD}?{urlencode(asked)}" if grafana_url else ""


def render_why(question: ExplainQuestion, answer: ExplainAnswer, grafana_url: str = "") -> str:
    """The page that says why requests took so long; grafana_url: "" without a link to the dashboard."""
    wanted, document = question.wanted, answer.document
    variables = {"var-model": wanted.model} if wanted.model else {}
    held = document.get("held") or {}
    stages = document.get("stages", ())
    return render_template(
        "why.html",
        question=question,
        sentences=answer.sentences,
        document=document,
        **_build_bars(stages, {"typical_ms": "usual", "late_ms": "late"}),
        stage_rows=[
            (
                each["name"],
                _format_ms(each["typical_ms"]),
                _format_ms(each["late_ms"]),
                _format_change(each["late_ms"] - each["typical_ms"]),
                f"{each['share']:.0%}",
            )
            for each in stages[:MAX_STAGES]
        ],
        reason_rows=_list_shares(document.get("reasons") or {}),
        kind_rows=_list_shares(held.get("kinds") or {}),
        looked_rows=[
            (
                each["sentence"],
                f"{each['share']:.0%}",
                "refuted"
                if each["refuted"]
                else "holds"
                if each["share"] > 0
                else "explains nothing",
            )
            for each in document.get("looked_at", ())
        ],
        command=_name_command(question),
        dashboard=link_dashboard(grafana_url, wanted.since_ns, wanted.until_ns, variables),
    )


def render_diff(asked: ComparedWindows, answer: ExplainAnswer) -> str:
    document = answer.document
    stages = document.get("stages", ())
    largest = sorted(stages, key=lambda each: -abs(each["change_ms"]))
    words = {"--a": asked.a, "--b": asked.b, "--model": asked.model}
    return render_template(
        "diff.html",
        asked=asked,
        sentences=answer.sentences,
        document=document,
        **_build_bars(stages, {"a_ms": "before", "b_ms": "after"}),
        stage_rows=[
            (
                each["name"],
                _format_ms(each["a_ms"]),
                _format_ms(each["b_ms"]),
                _format_change(each["change_ms"]),
                f"{_format_change(each['low_ms'])} to {_format_change(each['high_ms'])}",
                "changed" if each["named"] else "within chance",
            )
            for each in largest[:MAX_STAGES]
        ],
        outcome_rows=[
            (each["name"], f"{each['a']:.4g}", f"{each['b']:.4g}")
            for each in document.get("outcomes", ())
        ],
        command=_write_command("diff", words),
    )


def build_segments(parts: dict[str, int], rest: int, whole_us: float) -> list[Segment]:
    """One request as a bar: `parts` (stage -> us) in order, then `rest`, the unattributed time.

    whole_us: microseconds of the bar's whole width; a list of requests uses the longest TTFT.
    """
    ordered: list[tuple[str, float]] = sorted(
        parts.items(), key=lambda part: stages.rank_stage(part[0])
    )
    return list(_lay_out([*ordered, (stages.UNATTRIBUTED, rest)], whole_us))


def build_mean_bar(summary: Summary) -> list[Segment]:
    parts = [(line.name, line.mean * 1000) for line in summary.stages]
    return list(_lay_out(parts, summary.ttft.mean * 1000))


def build_scatter(requests: Sequence[Request], late_us: float) -> list[dict[str, Any]]:
    """Each request with a first token as a dot; late are those above `late_us`.

    x, y: percent from the upper left corner of the picture of TTFTs over time.
    """
    shown = [each for each in requests if not each.error and not each.pending]
    if len(shown) < MIN_DOTS:
        return []
    begin = min(each.start_ns for each in shown)
    length = max(each.start_ns for each in shown) - begin
    longest = max(each.ttft_us for each in shown)
    return [
        {
            "request": each,
            "x": compute_share(each.start_ns - begin, length),
            "y": 100.0 - compute_share(each.ttft_us, longest),
            "is_late": each.ttft_us > late_us,
        }
        for each in shown
    ]


def build_waterfall(stored_trace: StoredTrace) -> dict[str, Any]:
    """The values that the template of a waterfall needs; `us` and `all` are lengths in us."""
    start, end = request_assembly.find_window(stored_trace.spans)
    rows = request_assembly.build_rows(stored_trace.spans)
    legs = {row.role for row in rows if row.what == "trunk" and row.role != "router"}
    last = max(span.end_ns for span in stored_trace.spans)
    return {
        "rows": rows[:MAX_ROWS],
        "legs": legs,
        "hidden": max(0, len(rows) - MAX_ROWS),
        "start": start,
        "us": (end - start) // 1000,
        "all": max(1, (last - start) // 1000),
        "services": list(dict.fromkeys((row.span.service, row.role) for row in rows)),
    }


def _build_bars(stages: Iterable[Mapping[str, Any]], labels: Mapping[str, str]) -> dict[str, Any]:
    """One bar for each field of `labels`, to one scale; whole: what the longest is, in microseconds."""
    parts = {
        field: {each["name"]: round(each[field] * 1000) for each in stages if each[field] > 0}
        for field in labels
    }
    whole = max(sum(each.values()) for each in parts.values())
    # What it is of, microseconds, its pieces.
    bars = [
        (label, sum(parts[field].values()), build_segments(parts[field], 0, whole))
        for field, label in labels.items()
    ]
    return {"bars": bars}


def _list_shares(shares: Mapping[str, float]) -> list[Row]:
    ordered = sorted(shares.items(), key=lambda each: -each[1])
    return [(name, f"{compute_share(share, 1.0):.0f} %") for name, share in ordered]


def _format_ms(ms: float) -> str:
    return format_duration(ms * 1000)


def _format_change(ms: float) -> str:
    return f"{'−' if ms < 0 else '+'}{format_duration(abs(ms) * 1000)}"


def _name_command(question: ExplainQuestion) -> str:
    """The same question in a terminal, safe to be copied into a shell."""
    wanted = question.wanted
    ends = [format_iso(ns) if ns else "" for ns in (wanted.since_ns, wanted.until_ns)]
    return _write_command(
        "explain",
        {
            "--request": question.request_id,
            "--trace": question.trace_id,
            "--since": "..".join(ends) if wanted.since_ns else "",
            "--model": wanted.model,
            "--slo": f"{question.slo_us / 1000:g}" if question.slo_us else "",
        },
    )


def _write_command(name: str, given: Mapping[str, str]) -> str:
    words = [f"{flag} {shlex.quote(value)}" for flag, value in given.items() if value]
    return " ".join([f"ttft-otel {name}", *words])


def format_duration(us: float) -> str:
    """Microseconds as text with three or four significant digits, in µs, ms or s."""
    if us < 1000:
        return f"{us:.0f} µs"
    if us < 100_000:
        return f"{us / 1000:.2f} ms"
    if us < 1_000_000:
        return f"{us / 1000:.1f} ms"
    return f"{us / 1e6:.2f} s"


def format_exact_ms(us: float) -> str:
    """Microseconds as milliseconds with three decimals, so that a reader can check sums."""
    return f"{us / 1000:,.3f}"


def compute_share(part: float, whole: float) -> float:
    """`part` of `whole` in percent, from 0 to 100; 0 when `whole` is 0."""
    return round(min(100.0, max(0.0, 100.0 * part / whole)), 3) if whole > 0 else 0.0


def list_legend() -> list[tuple[str, str, list[str]]]:
    """The legend: (kind, its label, its stages); each stage once."""
    words = [word for word in stages.STAGE_COLORS if word != stages.UNATTRIBUTED]
    groups = [
        (kind, says, [word for word in words if stages.find_kind(word) == kind])
        for kind, says in stages.KIND_LABELS.items()
    ]
    return [*groups, ("", "no mark accounts for it", [stages.UNATTRIBUTED])]


def _lay_out(parts: Iterable[tuple[str, float]], whole_us: float) -> Iterable[Segment]:
    at = 0.0
    for name, us in parts:
        if us > 0:
            yield Segment(name, us, compute_share(at, whole_us), compute_share(us, whole_us))
        at += us


def format_iso(ns: int) -> str:
    """A moment in Unix nanoseconds as ISO 8601."""
    # UTC: servers, readers and traces may be in different zones.
    return datetime.fromtimestamp(ns / 1e9, timezone.utc).isoformat(timespec="milliseconds")


def _format_clock(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, timezone.utc).strftime("%H:%M:%S")


def _create_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(PACKAGE_FOLDER / "templates"),
        # Names, IDs and attributes come from whoever sends spans.
        autoescape=True,
        # A misspelt name should end in an error and not in an empty cell.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions: tuple[Callable[..., Any], ...] = (
        format_duration, format_exact_ms, compute_share, build_segments, build_mean_bar, build_waterfall,
        list_legend, describe_notes, read_holders,
    )  # fmt: skip
    environment.globals.update(
        {each.__name__: each for each in functions},
        stages=stages,
        keys=keys,
        version=__version__,
        iso=format_iso,
        clock=_format_clock,
        kinds=SPAN_KINDS,
        failed=STATUS_ERROR,
        deep=MAX_INDENT,
    )
    return environment


# At import, so that no request pays for it.
_ENVIRONMENT: Final = _create_environment()


def render_template(name: str, **values: Any) -> str:
    """A page by its file in templates/, which escape values."""
    return _ENVIRONMENT.get_template(name).render(**values)
