# SPDX-License-Identifier: Apache-2.0
"""Runs as a JSON document, whose schema is docs/bench.schema.json; comparison.py reads it back."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final, TextIO

from ttft_otel import __version__
from ttft_otel.bench import request_statistics
from ttft_otel.bench.bench_session import BenchSide
from ttft_otel.bench.limit_search import CONFIDENCE, LimitSearch
from ttft_otel.bench.load_driver import LoadRun
from ttft_otel.bench.request_statistics import MAX_GENERATOR_LAG_MS, RequestSample
from ttft_otel.model.statistics import compute_quantiles

# To be counted up when a field changes its meaning: `bench compare` refuses other formats.
RESULT_FORMAT: Final = "ttft-otel-bench/1"
PERCENTILES: Final = ("p50", "p95", "p99")
SHARES: Final = (0.5, 0.95, 0.99)
MAX_FAILURES_PER_KIND: Final = 10  # failures of a kind that are listed with their IDs
# The usual reason: the server's threads keep the benchmark from running in time.
GROWTH_SHARE: Final = 0.1  # of a limit by which a stage has to grow to be named
LAG_REMEDY: Final = "run it on a CPU core of its own"


def build_document(
    load: Mapping[str, Any],
    sides: Sequence[BenchSide],
    slo_ms: Mapping[str, float],
    limit: Mapping[str, Any] | None = None,
) -> Any:
    """The result document: the load's flags, and each target's summary, runs and requests.

    load: flags of the load. slo_ms: metric -> limit for goodput, {} without. limit: of --find.
    """
    return {
        "format": RESULT_FORMAT,
        "version": __version__,
        # The flags, so that comparisons can name those that differ.
        "load": dict(load),
        "targets": [describe_target(side, slo_ms) for side in sides],
        # Set by command.py for --ab; the keys are always there for readers of the schema.
        "comparison": None,
        "uncompared": None,
        "limit": limit,
    }


def describe_limit(search: LimitSearch, probes: Mapping[float, BenchSide]) -> dict[str, Any]:
    """What --find has found: the interval, every rate that was tried, and the stage that grows first.

    probes: the runs at each rate.
    """
    rows = [_describe_probe(search, rate, probes[rate]) for rate in sorted(probes)]
    estimate = search.estimate
    return {
        "unit": search.unit,
        "conditions": [each.text for each in search.conditions],
        # The limit is between them with this confidence; null: no rate was found that fails.
        "low": search.low,
        "high": None if search.high == math.inf else search.high,
        "estimate": estimate and float(f"{estimate:.3g}"),
        "confidence": CONFIDENCE,
        "ended": search.ended,
        "probes": rows,
        "explanation": explain_growth(rows, search.conditions[0].limit_ms),
        "whatif": None,
    }


def write_csv(document: Mapping[str, Any], file: TextIO) -> None:
    """Write one line for each request: its target and round, its figures, and a column for each stage."""
    rows = [
        {"url": target["url"], "round": number}
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


def choose_probe(search: LimitSearch, probes: Mapping[float, BenchSide]) -> BenchSide:
    """The runs at the highest rate that holds; without one, at the lowest that was tried."""
    return probes.get(search.low) or probes[min(probes)]


def _describe_probe(search: LimitSearch, rate: float, probe: BenchSide) -> dict[str, Any]:
    samples = [each for run in probe.runs for each in request_statistics.collect_samples(run)]
    tail = min(each.tail for each in search.conditions)
    stages_ms = request_statistics.average_slowest_stages(samples, tail)
    found = search.evidence.get(rate, [])
    return {
        "rate": rate,
        "verdict": search.judge_rate(rate),
        "rounds": len(probe.runs),
        "requests": sum(run.started for run in probe.runs),
        "overloaded": sum(run.overloaded for run in probe.runs),
        "beyond": [_round_value(each.beyond / max(1, each.counted)) for each in found],
        # Of the slowest, as many as the strictest percentile leaves out; they add up to their mean TTFT.
        "slowest_stages_ms": {name: _round_value(value) for name, value in stages_ms.items()},
    }


def explain_growth(probes: Sequence[Mapping[str, Any]], limit_ms: float) -> str:
    """A sentence that names the stage of the slowest requests that grows first with the rate; "" for none.

    probes: from the lowest rate to the highest.
    """
    described = [each for each in probes if each["slowest_stages_ms"]]
    for row in described[1:]:
        base, stages_ms = described[0]["slowest_stages_ms"], row["slowest_stages_ms"]
        growth_ms = {name: ms - base.get(name, 0.0) for name, ms in stages_ms.items()}
        name = max(growth_ms, key=lambda each: growth_ms[each])
        if growth_ms[name] > GROWTH_SHARE * limit_ms:
            return (
                f"{name} grows first: among the slowest requests from {base.get(name, 0.0):.1f} ms at "
                f"{described[0]['rate']:g} to {stages_ms[name]:.1f} ms at {row['rate']:g}, of "
                f"{sum(growth_ms.values()):.1f} ms by which they are slower."
            )
    return ""


def describe_target(side: BenchSide, slo_ms: Mapping[str, float]) -> dict[str, Any]:
    """One target: its runs, and a summary over all of them. slo_ms: as in build_document()."""
    samples_by_run = [request_statistics.collect_samples(run) for run in side.runs]
    rows = [_build_run(run, sample) for run, sample in zip(side.runs, samples_by_run, strict=True)]
    all_samples = [sample for run_samples in samples_by_run for sample in run_samples]
    # Sum of the runs: pauses and the other side's rounds between them are no load.
    duration_s = sum(request_statistics.compute_duration_s(run) for run in side.runs)
    return {
        "url": side.target.url,
        "model": side.factory.model,
        # An interrupted benchmark may have no run of this side at all.
        "valid": bool(rows) and all(row["valid"] for row in rows),
        "summary": _build_summary(
            all_samples, duration_s, slo_ms, sum(len(run.results) for run in side.runs)
        ),
        "runs": rows,
    }


def _build_summary(
    samples: Sequence[RequestSample],
    duration_s: float,
    slo_ms: Mapping[str, float],
    answered_count: int,
) -> dict[str, Any]:
    # 0 without a result: then there is no rate either.
    per_second = 1 / duration_s if duration_s else 0.0
    good_count = request_statistics.count_good(samples, slo_ms)
    return {
        "figures_ms": _describe_distributions(request_statistics.list_metrics(samples)),
        "stages_ms": _describe_distributions(request_statistics.list_stages(samples)),
        "breakdowns": sum(bool(sample.stages_ms) for sample in samples),
        "explanation": request_statistics.explain_tail(samples),
        "ends_ms": {
            title: {name: _round_value(value) for name, value in parts.items()}
            for title, parts in request_statistics.average_tail_stages(samples).items()
        },
        "throughput": {
            "requests_per_s": _round_value(len(samples) * per_second),
            "input_tokens_per_s": _round_value(
                # Unknown counts are left out here; `counted` tells that there were some.
                sum(sample.input_tokens or 0 for sample in samples) * per_second
            ),
            "output_tokens_per_s": _round_value(
                sum(sample.output_tokens for sample in samples) * per_second
            ),
        },
        "counted": all(sample.input_tokens is not None for sample in samples),
        "goodput": {
            "slo_ms": dict(slo_ms),
            "requests_per_s": _round_value(good_count * per_second),
            # Of all answers, failures included: who fails fast must not look good.
            "share": _round_value(good_count / max(1, answered_count)),
        }
        if slo_ms
        else None,
    }


def _build_run(run: LoadRun, samples: Sequence[RequestSample]) -> dict[str, Any]:
    failures = request_statistics.group_failures(run)
    start_ns = request_statistics.find_start_ns(run)
    lags_ms = request_statistics.measure_lag(run)
    reasons = [
        f"the generator itself was late: {name} {value:.1f} ms > {MAX_GENERATOR_LAG_MS:g} ms; {LAG_REMEDY}"
        for name, value in lags_ms.items()
        if value > MAX_GENERATOR_LAG_MS
    ]
    if not samples:
        reasons.append("no request succeeded")
    return {
        "valid": not reasons,
        "why": reasons,
        "stopped": run.stopped,
        "seconds": _round_value(request_statistics.compute_duration_s(run)),
        "lag_ms": {name: _round_value(value) for name, value in lags_ms.items()},
        "started": run.started,
        "succeeded": len(samples),
        "unfinished": run.unfinished,
        "held": run.delayed,
        "failures": {kind: len(results) for kind, results in failures.items()},
        # The server's first words about each kind.
        "complaints": {
            kind: messages[0]
            for kind, results in failures.items()
            if (messages := [each.server_message for each in results if each.server_message])
        },
        # IDs by which the first failures of each kind can be found in traces and logs.
        "failed": {
            kind: [
                {
                    "request_id": result.request_id,
                    "trace_id": result.trace_id,
                    "sent_ms": _round_value((result.response.sent_ns - start_ns) / 1e6),
                }
                for result in results[:MAX_FAILURES_PER_KIND]
            ]
            for kind, results in failures.items()
        },
        "requests": [_build_request_row(sample) for sample in samples],
    }


def _build_request_row(sample: RequestSample) -> dict[str, Any]:
    return {
        "request_id": sample.request_id,
        "trace_id": sample.trace_id,
        "sent_ms": _round_value(sample.sent_ms),
        "ttft_ms": _round_value(sample.ttft_ms),
        "latency_ms": _round_value(sample.latency_ms),
        "tpot_ms": None if sample.tpot_ms is None else _round_value(sample.tpot_ms),
        "itl_ms": _round_value(sum(sample.gaps_ms) / len(sample.gaps_ms))
        # None with a single token event: there is no gap then.
        if sample.gaps_ms
        else None,
        # The weight of `itl_ms` when all gaps of a round are averaged.
        "itl_count": len(sample.gaps_ms),
        "input_tokens": sample.input_tokens,
        "output_tokens": sample.output_tokens,
        "cached_tokens": sample.cached_tokens,
        "stages_ms": {name: _round_value(value) for name, value in sample.stages_ms.items()},
    }


def _describe_distributions(
    values_by_name: Mapping[str, Sequence[float]],
) -> dict[str, dict[str, float]]:
    """Number, mean and percentiles of what has values."""
    return {
        name: {"count": len(values), "mean": _round_value(fmean(values))}
        | dict(zip(PERCENTILES, map(_round_value, compute_quantiles(values, SHARES)), strict=True))
        for name, values in values_by_name.items()
        if values
    }


def _round_value(value: float) -> float:
    # Microseconds: further digits of the clock are noise.
    return round(value, 3)
