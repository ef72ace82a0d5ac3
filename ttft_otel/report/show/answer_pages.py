# SPDX-License-Identifier: Apache-2.0
"""The pages "Why?" and "Before and after": the answers of explain/ and diff/ with bars and tables.

Both are made of the documents that the commands print as JSON (docs/explain.schema.json, diff.schema.json).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ttft_otel.report.breakdown_source import ComparedWindows, ExplainAnswer, ExplainQuestion
from ttft_otel.report.show.pages import (
    Segment,
    build_segments,
    compute_share,
    format_duration,
    format_iso,
    link_dashboard,
    render_template,
)

MAX_STAGES: Final = 6  # in a table, those that differ most
Bar = tuple[str, float, list[Segment]]  # what it is of, microseconds, its pieces
Row = tuple[str, ...]


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


def _build_bars(stages: Iterable[Mapping[str, Any]], labels: Mapping[str, str]) -> dict[str, Any]:
    """One bar for each field of `labels`, to one scale; whole: what the longest is, in microseconds."""
    parts = {
        field: {each["name"]: round(each[field] * 1000) for each in stages if each[field] > 0}
        for field in labels
    }
    whole = max(sum(each.values()) for each in parts.values())
    bars: list[Bar] = [
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
