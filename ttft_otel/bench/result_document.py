# SPDX-License-Identifier: Apache-2.0
"""Runs as a JSON document, whose schema is docs/bench.schema.json; comparison.py reads it back."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final, TextIO

import numpy as np

from ttft_otel import __version__
from ttft_otel.bench import request_statistics
from ttft_otel.bench.bench_session import BenchSide
from ttft_otel.bench.limit_search import CONFIDENCE, LimitSearch
from ttft_otel.bench.load_driver import LoadRun
from ttft_otel.bench.request_statistics import BATCH, MIN_BATCHES, RequestRow, round_ms
from ttft_otel.model.statistics import compute_quantile

# To be counted up when a field changes its meaning: `bench compare` refuses other formats.
RESULT_FORMAT: Final = "ttft-otel-bench/2"
PERCENTILES: Final = (50, 95, 99)
MAX_FAILURES_PER_KIND: Final = 10  # failures of a kind that are listed with their IDs
GROWTH_SHARE: Final = 0.1  # of a limit by which a stage has to grow to be named
MAX_GENERATOR_LAG_MS: Final = 5.0  # p99 beyond which a run is not valid
# The usual reason: the server's threads keep the benchmark from running in time.
LAG_REMEDY: Final = "run it on a CPU core of its own"
SLICES: Final = 10  # of a run, by the time of sending
SLOWEST_SHARE: Final = 0.05  # of requests whose stages stand for the slowest, without conditions


def build_document(
    load: Mapping[str, Any],
    sides: Sequence[BenchSide],
    slo_ms: Mapping[str, float],
    sweep: Mapping[str, Any] | None = None,
) -> Any:
    """The result document: the load's flags, and each target's summary, runs and requests.

    load: flags of the load. slo_ms: metric -> limit for goodput, {} without. sweep: of describe_sweep().
    """
    return {
        "format": RESULT_FORMAT,
        "version": __version__,
        # The flags, so that comparisons can name those that differ.
        "load": dict(load),
        "targets": [describe_target(side, slo_ms) for side in sides],
        # Set by commands/bench.py for --ab; the keys are always there for readers of the schema.
        "comparison": None,
        "uncompared": None,
        "sweep": sweep,
    }


def write_csv(document: Mapping[str, Any], file: TextIO) -> None:
    """Write one line for each request: its target and round, its figures, and a column for each stage."""
    rows = [
        {"url": target["url"], "rate": target["rate"], "round": number}
        | {name: value for name, value in row.items() if name != "stages_ms"}
        | {f"{name}_ms": ms for name, ms in row["stages_ms"].items()}
        for target in document["targets"]
        for number, run in enumerate(target["runs"], 1)
        for row in run["requests"]
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(names))
    writer.writeheader()
    writer.writerows(rows)


def describe_sweep(probes: Sequence[BenchSide], search: LimitSearch | None) -> dict[str, Any]:
    """Every rate that was tried, from the lowest on, the knee, and the stage that grows first.

    search: of --find, None where the rates were given.
    """
    tail = min((each.tail for each in search.conditions), default=0.0) if search else SLOWEST_SHARE
    rows = [_describe_probe(probe, tail, search) for probe in probes]
    return {
        "unit": probes[0].unit,
        "rates": rows,
        "knee": find_knee(rows),
        "explanation": explain_growth(rows, search.conditions[0].limit_ms if search else None),
        "whatif": None,
        "limit": search
        and {
            "conditions": [each.text for each in search.conditions],
            # The limit is between them with this confidence; null: no rate was found that fails.
            "low": search.low,
            "high": None if search.high == math.inf else search.high,
            "estimate": search.estimate and float(f"{search.estimate:.3g}"),
            "confidence": CONFIDENCE,
            "ended": search.ended,
        },
    }


def _describe_probe(probe: BenchSide, tail: float, search: LimitSearch | None) -> dict[str, Any]:
    rows = [row for run in probe.runs for row in request_statistics.collect_rows(run)]
    seconds = sum(run.end_ns - run.start_ns for run in probe.runs) / 1e9
    found = search.evidence.get(probe.rate, []) if search else []
    return {
        "rate": probe.rate,
        **_describe_part(rows, seconds, tail),
        "verdict": search.judge_rate(probe.rate) if search else None,
        "rounds": len(probe.runs),
        "overloaded": sum(run.overloaded for run in probe.runs),
        "beyond": [round_ms(each.beyond / max(1, each.counted)) for each in found],
    }


def _describe_part(rows: Sequence[RequestRow], seconds: float, tail: float) -> dict[str, Any]:
    """Requests of a rate or of a slice of time. tail: share of the slowest, whose stages are averaged."""
    ranked = request_statistics.rank_traced(rows)
    slowest = ranked[-max(1, round(tail * len(ranked))) :]
    names = request_statistics.order_stages(ranked)
    return {
        "requests": len(rows),
        "requests_per_s": round_ms(len(rows) / seconds) if seconds else 0.0,
        "ttft_ms": _describe_values([row["ttft_ms"] for row in rows]),
        # They add up to the mean TTFT of these requests.
        "slowest_stages_ms": request_statistics.average_stages(slowest, names),
    }


def find_knee(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The rate with the greatest power, throughput per mean TTFT (Kleinrock, 1979).

    None where it is the highest that was tried, beyond which it may still grow.
    """
    power = {
        row["rate"]: row["requests_per_s"] / row["ttft_ms"]["mean"]
        for row in rows
        if row["requests"]
    }
    knee = max(power, key=lambda rate: power[rate], default=None)
    return knee if power and knee != max(power) else None


def explain_growth(rows: Sequence[Mapping[str, Any]], limit_ms: float | None) -> str:
    """A sentence that names the stage of the slowest requests that grows first with the rate; "" for none.

    rows: from the lowest rate to the highest. limit_ms: None: what they take at the lowest rate.
    """
    described = [each for each in rows if each["slowest_stages_ms"]]
    for row in described[1:]:
        base, stages_ms = described[0]["slowest_stages_ms"], row["slowest_stages_ms"]
        growth_ms = {name: ms - base.get(name, 0.0) for name, ms in stages_ms.items()}
        name = max(growth_ms, key=lambda each: growth_ms[each])
        if growth_ms[name] > GROWTH_SHARE * (limit_ms or sum(base.values())):
            return (
                f"{name} grows first: among the slowest requests from {base.get(name, 0.0):.1f} ms at "
                f"{described[0]['rate']:g} to {stages_ms[name]:.1f} ms at {row['rate']:g}, of "
                f"{sum(growth_ms.values()):.1f} ms by which they are slower."
            )
    return ""


def describe_target(side: BenchSide, slo_ms: Mapping[str, float]) -> dict[str, Any]:
    """One target: its runs, and a summary over all of them. slo_ms: as in build_document()."""
    rows_by_run = [request_statistics.collect_rows(run) for run in side.runs]
    summary = _build_summary(side.runs, [row for rows in rows_by_run for row in rows], slo_ms)
    is_ramp = side.plan.last_rate is not None
    runs = [
        _build_run(run, rows, is_ramp) for run, rows in zip(side.runs, rows_by_run, strict=True)
    ]
    return {
        "url": side.target.url,
        "model": side.factory.model,
        "rate": side.rate or None,
        # An interrupted benchmark may have no run of this side at all.
        "valid": bool(runs) and all(run["valid"] for run in runs),
        "summary": summary,
        "runs": runs,
    }


def _build_summary(
    runs: Sequence[LoadRun], rows: Sequence[RequestRow], slo_ms: Mapping[str, float]
) -> dict[str, Any]:
    # Sum of the runs: pauses and the other side's rounds between them are no load.
    duration_s = sum(run.end_ns - run.start_ns for run in runs) / 1e9
    # 0 without a result: then there is no rate either.
    per_second = 1 / duration_s if duration_s else 0.0
    good_count = sum(
        all((row[f"{name}_ms"] or 0.0) <= limit for name, limit in slo_ms.items()) for row in rows
    )
    # Unknown counts are left out here; `counted` tells that there were some.
    input_tokens = sum(row["input_tokens"] or 0 for row in rows)
    ends_ms = request_statistics.average_tail_stages(rows)
    return {
        "figures_ms": _describe_all(request_statistics.list_metrics(rows)),
        "stages_ms": _describe_all(request_statistics.list_stages(rows)),
        "breakdowns": sum(bool(row["stages_ms"]) for row in rows),
        "explanation": request_statistics.explain_tail(rows, ends_ms),
        "ends_ms": ends_ms,
        "throughput": {
            "requests_per_s": round_ms(len(rows) * per_second),
            "input_tokens_per_s": round_ms(input_tokens * per_second),
            "output_tokens_per_s": round_ms(sum(row["output_tokens"] for row in rows) * per_second),
        },
        "counted": all(row["input_tokens"] is not None for row in rows),
        "goodput": {
            "slo_ms": dict(slo_ms),
            "requests_per_s": round_ms(good_count * per_second),
            # Of all answers, failures included: who fails fast must not look good.
            "share": round_ms(good_count / max(1, sum(len(run.results) for run in runs))),
        }
        if slo_ms
        else None,
    }


def _build_run(run: LoadRun, rows: Sequence[RequestRow], is_ramp: bool) -> dict[str, Any]:
    failures = request_statistics.group_failures(run)
    start_ns = run.start_ns
    # How late this process was: its sends and its event loop.
    lags_ns = {
        "send_p99": [each.response.lag_ns for each in run.results],
        "loop_p99": run.loop_lags_ns,
    }
    lags_ms = {name: round_ms(compute_quantile(each, 0.99) / 1e6) for name, each in lags_ns.items()}
    reasons = [
        f"the generator itself was late: {name} {value:.1f} ms > {MAX_GENERATOR_LAG_MS:g} ms; {LAG_REMEDY}"
        for name, value in lags_ms.items()
        if value > MAX_GENERATOR_LAG_MS
    ]
    if not rows:
        reasons.append("no request succeeded")
    slices = _slice_run(rows)
    return {
        "valid": not reasons,
        "why": reasons,
        "stopped": run.stopped,
        "seconds": round_ms((run.end_ns - start_ns) / 1e9),
        "lag_ms": lags_ms,
        "started": run.started,
        "succeeded": len(rows),
        "unfinished": run.unfinished,
        # A ramp is not to become steady.
        "steady": None if is_ramp else _describe_steady(rows),
        "slices": slices,
        "growth": explain_growth(slices, None) if is_ramp else "",
        "failures": {kind: len(results) for kind, results in failures.items()},
        # The server's first words about each kind.
        "complaints": {
            kind: messages[0]
            for kind, results in failures.items()
            if (messages := [text for each in results if (text := each.server_message)])
        },
        # IDs by which the first failures of each kind can be found in traces and logs.
        "failed": {
            kind: [
                {
                    "request_id": result.request_id,
                    "trace_id": result.trace_id,
                    "sent_ms": round_ms((result.response.sent_ns - start_ns) / 1e6),
                }
                for result in results[:MAX_FAILURES_PER_KIND]
            ]
            for kind, results in failures.items()
        },
        "requests": [
            {name: value for name, value in row.items() if name != "gaps_ms"} for row in rows
        ],
    }


def _slice_run(rows: Sequence[RequestRow]) -> list[dict[str, Any]]:
    """Equal parts of the time in which a run's requests were sent."""
    width_ms = (rows[-1]["sent_ms"] if rows else 0.0) / SLICES
    # Less than a batch in a slice says nothing.
    if len(rows) < SLICES * BATCH or not width_ms:
        return []
    places = [min(SLICES - 1, int(row["sent_ms"] / width_ms)) for row in rows]
    slices = []
    for place in range(SLICES):
        inside = [row for row, at in zip(rows, places, strict=True) if at == place]
        part = _describe_part(inside, width_ms / 1000, SLOWEST_SHARE)
        # Answered later or not: a slice has the requests that were sent in it.
        rate = part.pop("requests_per_s")
        slices.append({"from_s": round_ms(place * width_ms / 1000), "rate": rate, **part})
    return slices


def _describe_steady(rows: Sequence[RequestRow]) -> dict[str, Any] | None:
    """From when on a run's TTFTs are steady, and what they are then; null with too few requests."""
    if len(rows) < MIN_BATCHES * BATCH:
        return None
    first = request_statistics.find_steady_start([row["ttft_ms"] for row in rows])
    kept = [] if first is None else rows[first:]
    return {
        "from_s": kept[0]["sent_ms"] / 1000 if kept else None,
        "ttft_ms": _describe_values([row["ttft_ms"] for row in kept]),
    }


def _describe_all(values_by_name: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {name: _describe_values(values) for name, values in values_by_name.items() if values}


def _describe_values(values: Sequence[float]) -> dict[str, float]:
    """Number, mean and percentiles; {} without values."""
    if not values:
        return {}
    found = map(round_ms, np.percentile(values, PERCENTILES).tolist())
    percentiles = {f"p{q}": value for q, value in zip(PERCENTILES, found, strict=True)}
    return {"count": len(values), "mean": round_ms(fmean(values)), **percentiles}
