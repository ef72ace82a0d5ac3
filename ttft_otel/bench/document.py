# SPDX-License-Identifier: Apache-2.0
"""Runs as the JSON of docs/bench.schema.json: session.py gives them, compare.py reads them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from ttft_otel import __version__
from ttft_otel.bench import figures
from ttft_otel.bench.drive import Run
from ttft_otel.bench.figures import LIMIT_MS, Line, Sample
from ttft_otel.bench.session import Side

FORMAT: Final = "ttft-otel-bench/1"
REMEDY: Final = "give it a processor that nobody else uses"


def document(load: Mapping[str, Any], sides: Sequence[Side], slo: Mapping[str, float]) -> Any:
    """All of it: what was asked for, and every target's summary, runs and requests."""
    return {
        "format": FORMAT,
        "version": __version__,
        "load": dict(load),
        "targets": [target(side, slo) for side in sides],
        "comparison": None,
        "uncompared": None,
    }


def target(side: Side, slo: Mapping[str, float]) -> dict[str, Any]:
    """One target: its runs, and a summary over all of them."""
    found = [figures.samples(run) for run in side.runs]
    rows = [_run(run, each) for run, each in zip(side.runs, found, strict=True)]
    every = [each for one in found for each in one]
    span = sum(figures.seconds(run) for run in side.runs)
    return {
        "url": side.target.url,
        "model": side.form.model,
        "valid": bool(rows) and all(row["valid"] for row in rows),
        "summary": _summary(every, span, slo, sum(len(run.results) for run in side.runs)),
        "runs": rows,
    }


def _summary(
    found: Sequence[Sample], span: float, slo: Mapping[str, float], answered: int
) -> dict[str, Any]:
    per = 1 / span if span else 0.0
    kept = figures.good(found, slo)
    return {
        "figures_ms": _lines(figures.lines(found)),
        "stages_ms": _lines(figures.stage_lines(found)),
        "breakdowns": sum(bool(each.stages) for each in found),
        "explanation": figures.blame(found),
        "ends_ms": {
            title: {name: _round(value) for name, value in parts.items()}
            for title, parts in figures.ends(found).items()
        },
        "throughput": {
            "requests_per_s": _round(len(found) * per),
            "input_tokens_per_s": _round(sum(each.input or 0 for each in found) * per),
            "output_tokens_per_s": _round(sum(each.output for each in found) * per),
        },
        "counted": all(each.input is not None for each in found),
        "goodput": {
            "slo_ms": dict(slo),
            "requests_per_s": _round(kept * per),
            "share": _round(kept / max(1, answered)),
        }
        if slo
        else None,
    }


def _run(run: Run, found: Sequence[Sample]) -> dict[str, Any]:
    late = figures.lag(run)
    why = [
        f"the generator itself was late: {name} {value:.1f} ms > {LIMIT_MS:g} ms; {REMEDY}"
        for name, value in late.items()
        if value > LIMIT_MS
    ]
    if not found:
        why.append("no request succeeded")
    return {
        "valid": not why,
        "why": why,
        "stopped": run.stopped,
        "seconds": _round(figures.seconds(run)),
        "lag_ms": {name: _round(value) for name, value in late.items()},
        "started": run.started,
        "succeeded": len(found),
        "unfinished": run.unfinished,
        "held": run.held,
        "failures": figures.failures(run),
        "complaints": figures.complaints(run),
        "failed": _failed(run),
        "requests": [_request(each) for each in found],
    }


def _failed(run: Run) -> dict[str, list[dict[str, Any]]]:
    """What finds the first failures of each kind in traces and logs."""
    start = figures.began(run)
    return {
        kind: [
            {
                "request_id": each.request_id,
                "trace_id": each.trace_id,
                "sent_ms": _round((each.reply.sent_ns - start) / 1e6),
            }
            for each in first
        ]
        for kind, first in figures.failed(run).items()
    }


def _request(found: Sample) -> dict[str, Any]:
    return {
        "request_id": found.request_id,
        "trace_id": found.trace_id,
        "sent_ms": _round(found.sent_ms),
        "ttft_ms": _round(found.ttft),
        "latency_ms": _round(found.latency),
        "tpot_ms": None if found.tpot is None else _round(found.tpot),
        "itl_ms": _round(sum(found.gaps) / len(found.gaps)) if found.gaps else None,
        "itl_count": len(found.gaps),
        "input_tokens": found.input,
        "output_tokens": found.output,
        "cached_tokens": found.cached,
        "stages_ms": {name: _round(value) for name, value in found.stages.items()},
    }


def _lines(found: Mapping[str, Line]) -> dict[str, Any]:
    return {
        name: {
            key: value if key == "count" else _round(value) for key, value in asdict(line).items()
        }
        for name, line in found.items()
    }


def _round(value: float) -> float:
    return round(value, 3)
