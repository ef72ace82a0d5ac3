# SPDX-License-Identifier: Apache-2.0
"""Runs as a JSON document (docs/bench.schema.json): what is measured of each request, and what follows.

A request is a row of the document. What follows: percentiles, the steady part, failures, the slowest stage,
the knee. Times are in milliseconds, except where the name says otherwise.

Two targets, from one run with --ab or from two files, are compared metric by metric and stage by stage, with
95 % intervals. Requests of one round are correlated, so the sample is the rounds: each gives one figure, and
rounds of --ab are paired. How much rounds differ is unknown from fewer than three: there is no interval then.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, Final, TextIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ttft_otel import __version__
from ttft_otel.bench.limit_search import CONFIDENCE, LimitSearch
from ttft_otel.bench.load_driver import LoadRun, RequestResult
from ttft_otel.bench.load_plan import BenchSide
from ttft_otel.model import stages
from ttft_otel.model.stages import PREFILLING_ROLES
from ttft_otel.model.statistics import compute_quantile, compute_t_quantile

QUEUE_WAIT: Final = "queue_wait"
PREFILL_TO_FIRST_TOKEN: Final = "prefill_to_first_token"
# Below it the middle tenth is less than two requests.
MIN_EXPLAINED_REQUESTS: Final = 20
# "": the stages of a server that was asked directly carry no leg.
PREFILL_ROLES: Final = ("", *PREFILLING_ROLES)
STAGES_AFTER_QUEUE: Final = stages.STAGE_NAMES[stages.STAGE_NAMES.index("prefill.queue") + 1 :]
BATCH: Final = 5  # requests of a batch, the 5 of MSER-5
MIN_BATCHES: Final = 10  # of a run in which a steady part is looked for
TREND_BATCHES: Final = 10
MAX_TREND: Final = 3.36  # standard errors of a slope: the 99.5 % quantile of Student's t

RequestRow: TypeAlias = Mapping[str, Any]
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
MIN_ROUNDS: Final = 3  # with fewer the differences between rounds are unknown
# These need no breakdown, so they compare servers without ttft-otel, too.
CLIENT_METRICS: Final = ("ttft", "tpot", "itl", "latency")
TRACED: Final = f"{QUEUE_WAIT} mean"  # of rounds with breakdowns
MONO_PREFIX: Final = "mono."  # of stages of the only server behind a router
# Of the TTFT only: percentiles of stages do not add up to one of it.
TTFT_PERCENTILES: Final = (50, 95, 99)

Table: TypeAlias = NDArray[np.float64]


def measure_request(result: RequestResult, start_ns: int) -> dict[str, Any]:
    """The row of a successful RequestResult, and `gaps_ms`; its stages add up to the client's TTFT.

    start_ns: the run's first write.
    """
    breakdown, stages_ms = result.timing, {}
    if breakdown is not None:
        rest = {
            stages.UNATTRIBUTED: breakdown.unattributed / 1000,
            # A difference of two lengths: no offset between the hosts' clocks is needed.
            stages.OUTSIDE: result.ttft_ms - breakdown.ttft / 1000,
        }
        stages_ms = {name: us / 1000 for name, us in breakdown.stages.items()} | rest
    gaps_ms = [(b - a) / 1e6 for a, b in pairwise(result.token_times_ns)]
    return {
        "request_id": result.request_id,
        "trace_id": result.trace_id,
        "sent_ms": round_ms((result.response.sent_ns - start_ns) / 1e6),
        "ttft_ms": round_ms(result.ttft_ms),
        "latency_ms": round_ms(result.latency_ms),
        "tpot_ms": None if result.tpot_ms is None else round_ms(result.tpot_ms),
        # None with a single token event: there is no gap then.
        "itl_ms": round_ms(fmean(gaps_ms)) if gaps_ms else None,
        # The weight of `itl_ms` when all gaps of a round are averaged.
        "itl_count": len(gaps_ms),
        "input_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "cached_tokens": result.cached_tokens,
        "stages_ms": {name: round_ms(ms) for name, ms in stages_ms.items()},
        "gaps_ms": gaps_ms,
    }


def round_ms(value: float) -> float:
    """Round to microseconds: further digits of the clock are noise."""
    return round(float(value), 3)


def collect_rows(run: LoadRun) -> list[dict[str, Any]]:
    """Rows of all successful requests of `run`, in the order in which they were sent."""
    # The first request is the start of the run, even if it failed.
    start_ns = run.start_ns
    rows = [measure_request(each, start_ns) for each in run.results if not each.error]
    return sorted(rows, key=lambda row: float(row["sent_ms"]))


def find_steady_start(values: Sequence[float]) -> int | None:
    """Number of `values` before the steady part, which begins in the first half; None without one.

    It begins where the standard error of the mean of the rest is smallest: MSER-5 (White, Cobb and Spratt,
    2000). Then ten batch means must have no trend (Student's t of their slope).
    """
    series = np.array(values, dtype=np.float64)
    batches = series[: len(series) // BATCH * BATCH].reshape(-1, BATCH).mean(axis=1)
    errors = [batches[cut:].var() / (len(batches) - cut) for cut in range(len(batches) // 2 + 1)]
    first = int(np.argmin(errors)) * BATCH
    means = np.array([each.mean() for each in np.array_split(series[first:], TREND_BATCHES)])
    places = np.arange(TREND_BATCHES) - (TREND_BATCHES - 1) / 2
    squares = float(places @ places)
    slope = float(places @ means) / squares
    rest = means - means.mean() - slope * places
    error = float(rest @ rest / (TREND_BATCHES - 2) / squares) ** 0.5
    return None if abs(slope) > MAX_TREND * error else first


def group_failures(run: LoadRun) -> dict[str, list[RequestResult]]:
    """Failed requests of `run` by kind, the most frequent kind first, in the order of sending."""
    by_kind: dict[str, list[RequestResult]] = {}
    for result in sorted(run.results, key=lambda each: each.response.sent_ns):
        if result.error:
            by_kind.setdefault(result.error, []).append(result)
    return dict(sorted(by_kind.items(), key=lambda item: -len(item[1])))


def order_stages(rows: Sequence[RequestRow]) -> list[str]:
    """All stages in `rows`, in order; unattributed and outside last."""
    names = dict.fromkeys(name for row in rows for name in row["stages_ms"])
    last = {stages.UNATTRIBUTED: 1, stages.OUTSIDE: 2}
    return sorted(names, key=lambda name: last.get(name, 0))


def list_metrics(rows: Sequence[RequestRow]) -> dict[str, list[float]]:
    """The values of all metrics over `rows`, also of those in a file; of some there may be none."""
    traced = [row["stages_ms"] for row in rows if row["stages_ms"]]
    return {
        "ttft": [row["ttft_ms"] for row in rows],
        QUEUE_WAIT: list(map(sum_queue_wait, traced)),
        PREFILL_TO_FIRST_TOKEN: list(map(sum_prefill, traced)),
        "tpot": [row["tpot_ms"] for row in rows if row["tpot_ms"] is not None],
        # A file has the mean of a request's gaps, which stands for as many.
        "itl": [
            gap
            for row in rows
            for gap in row.get("gaps_ms") or [row.get("itl_ms")] * row.get("itl_count", 0)
        ],
        "latency": [row["latency_ms"] for row in rows],
    }


def list_stages(rows: Sequence[RequestRow]) -> dict[str, list[float]]:
    """The lengths of all stages over the rows with a breakdown; a missing stage counts as 0."""
    traced = [row["stages_ms"] for row in rows if row["stages_ms"]]
    return {name: [parts.get(name, 0.0) for parts in traced] for name in order_stages(rows)}


def sum_queue_wait(parts: Mapping[str, float]) -> float:
    """Time in the schedulers' queues, for encoding and prefill. parts: stage -> milliseconds."""
    queues = ("encoder.queue", "prefill.queue")
    return sum(value for name, value in parts.items() if stages.split_stage(name)[1] in queues)


def sum_prefill(parts: Mapping[str, float]) -> float:
    """Time from the end of the prefill's queue until that server sends the first token.

    parts: stage -> milliseconds; stages of encoders and of decode instances do not count.
    """
    split_parts = ((stages.split_stage(name), value) for name, value in parts.items())
    return sum(
        value
        for (leg, stage), value in split_parts
        if leg in PREFILL_ROLES and stage in STAGES_AFTER_QUEUE
    )


def average_tail_stages(rows: Sequence[RequestRow]) -> dict[str, dict[str, float]]:
    """Mean stages of the middle tenth ("p50") and of the slowest hundredth ("p99").

    Each adds up to the mean TTFT of its requests. {} when there are too few `rows`.
    """
    ranked = rank_traced(rows)
    if len(ranked) < MIN_EXPLAINED_REQUESTS:
        return {}
    # Half of the middle tenth lies on each side of the median.
    middle, half_width = len(ranked) // 2, max(1, len(ranked) // 20)
    usual = ranked[middle - half_width : middle + half_width]
    slow, names = ranked[-max(1, len(ranked) // 100) :], order_stages(ranked)
    return {"p50": average_stages(usual, names), "p99": average_stages(slow, names)}


def rank_traced(rows: Sequence[RequestRow]) -> list[RequestRow]:
    """The rows with a breakdown, by their TTFT."""
    return sorted((row for row in rows if row["stages_ms"]), key=lambda row: float(row["ttft_ms"]))


def average_stages(rows: Sequence[RequestRow], names: Iterable[str]) -> dict[str, float]:
    """The mean of each of the stages `names` over `rows`."""
    return {
        name: round_ms(fmean(row["stages_ms"].get(name, 0.0) for row in rows)) for name in names
    }


def explain_tail(rows: Sequence[RequestRow], ends: Mapping[str, Mapping[str, float]]) -> str:
    """A sentence that names the stage by which the slowest hundredth differs most from the middle tenth.

    ends: of average_tail_stages().
    """
    traced = sum(bool(row["stages_ms"]) for row in rows)
    if not rows:
        return "No request succeeded, so there is nothing to explain."
    if not traced:
        return (
            "No breakdown: no answer had a Server-Timing of ttft-otel (a server without it, or a proxy "
            "that removes the header), so nothing is said about stages."
        )
    if not ends:
        return (
            f"{traced} requests with a breakdown are too few to explain the slowest (from "
            f"{MIN_EXPLAINED_REQUESTS})."
        )
    excess_by_stage = {name: ms - ends["p50"][name] for name, ms in ends["p99"].items()}
    excess_ms = sum(excess_by_stage.values())
    name = max(excess_by_stage, key=lambda each: excess_by_stage[each])
    count = max(1, traced // 100)
    subject = f"The slowest {count} requests are" if count > 1 else "The slowest request is"
    sentence = f"{subject} {excess_ms:.1f} ms slower than the middle tenth on average"
    if excess_by_stage[name] > excess_ms:  # no share of it: other stages were quicker
        return f"{sentence}; {name} alone takes {excess_by_stage[name]:.1f} ms more."
    share = 100 * excess_by_stage[name] / excess_ms if excess_ms > 0 else 0.0
    return f"{sentence}, {excess_by_stage[name]:.1f} ms of it ({share:.0f} %) in {name}."


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
    rows = [row for run in probe.runs for row in collect_rows(run)]
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
    ranked = rank_traced(rows)
    slowest = ranked[-max(1, round(tail * len(ranked))) :]
    names = order_stages(ranked)
    return {
        "requests": len(rows),
        "requests_per_s": round_ms(len(rows) / seconds) if seconds else 0.0,
        "ttft_ms": _describe_values([row["ttft_ms"] for row in rows]),
        # They add up to the mean TTFT of these requests.
        "slowest_stages_ms": average_stages(slowest, names),
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
    rows_by_run = [collect_rows(run) for run in side.runs]
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
    ends_ms = average_tail_stages(rows)
    return {
        "figures_ms": _describe_all(list_metrics(rows)),
        "stages_ms": _describe_all(list_stages(rows)),
        "breakdowns": sum(bool(row["stages_ms"]) for row in rows),
        "explanation": explain_tail(rows, ends_ms),
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
    failures = group_failures(run)
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
    first = find_steady_start([row["ttft_ms"] for row in rows])
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


def compare_targets(a: Mapping[str, Any], b: Mapping[str, Any], paired: bool) -> dict[str, Any]:
    """B minus A in milliseconds, with 95 % intervals.

    a, b: targets of result documents. paired: round i of A was measured right beside round i of B.
    Raises ValueError when there is nothing to compare.
    """
    rounds_a, rounds_b = _estimate_rounds(a), _estimate_rounds(b)
    for name, rounds in (("A", rounds_a), ("B", rounds_b)):
        if not any(rounds):
            raise ValueError(f"{name} has no successful request")
    if paired:
        # An interrupted benchmark has a round on one side only: not strict. Rounds without a
        # successful request on both sides are left out.
        pairs = [pair for pair in zip(rounds_a, rounds_b, strict=False) if all(pair)]
        rounds_a, rounds_b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    rounds_a, rounds_b = list(filter(None, rounds_a)), list(filter(None, rounds_b))
    if not rounds_a or not rounds_b:
        raise ValueError("A and B have no round in which both have a successful request")
    # Rounds weigh alike from here on, however many requests each of them had.
    names, figures_a, figures_b = _build_tables(rounds_a, rounds_b)
    averages_a, averages_b, margins = compute_margins(figures_a, figures_b, paired)
    columns = zip(names, averages_a, averages_b, margins, strict=True)
    return {
        "a": a["url"],
        "b": b["url"],
        # One late generator spoils the difference, whichever side it was on.
        "valid": bool(a["valid"] and b["valid"]),
        "rounds": min(len(rounds_a), len(rounds_b)),
        "paired": paired,
        "rows": [_build_row(*values) for values in columns],
    }


def list_load_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The flags in which the loads of two documents differ; slos, repeat and model may differ."""
    # slos and repeat change nothing of what is sent; the model may be what is compared.
    ignored = ("slos", "repeat", "model")
    names = dict.fromkeys((*a["load"], *b["load"]))
    return [
        name for name in names if name not in ignored and a["load"].get(name) != b["load"].get(name)
    ]


def compute_margins(figures_a: Table, figures_b: Table, paired: bool) -> tuple[Table, Table, Table]:
    """Averages of A's and of B's rounds, and the half width of the 95 % interval of their difference.

    figures_a, figures_b: a row for each round, a column for each quantity, NaN where it is unknown.
    paired: row i of A belongs to row i of B, so that what both have in common cancels out. Else the
    variances of A and B may differ (Welch). The margin is NaN with fewer than MIN_ROUNDS rounds.
    """
    if paired:
        # A pair with one unknown side must drop out of both averages, or they would be of different rounds.
        unknown = np.isnan(figures_a) | np.isnan(figures_b)
        figures_a, figures_b = (np.where(unknown, np.nan, each) for each in (figures_a, figures_b))
        _, variance, rounds = _describe_rounds(figures_b - figures_a)
        degrees = rounds - 1
        averages_a, averages_b = (_describe_rounds(each)[0] for each in (figures_a, figures_b))
    else:
        averages_a, variance_a, rounds_a = _describe_rounds(figures_a)
        averages_b, variance_b, rounds_b = _describe_rounds(figures_b)
        rounds, variance = np.minimum(rounds_a, rounds_b), variance_a + variance_b
        # Welch-Satterthwaite: degrees of freedom of a difference with two variances.
        spread = variance_a**2 / np.maximum(1, rounds_a - 1)
        spread += variance_b**2 / np.maximum(1, rounds_b - 1)
        # Without spread, rounds were equal: the margin is 0 whatever the degrees are.
        degrees = np.divide(variance**2, spread, out=np.ones_like(variance), where=spread > 0)
        # Welch's degrees are too many by up to 2 % of marks where three rounds meet many.
        degrees = np.where(rounds_a == rounds_b, degrees, rounds - 1)
    quantiles = np.array([compute_t_quantile(max(1.0, float(each))) for each in degrees])
    margins = np.where(rounds >= MIN_ROUNDS, quantiles * np.sqrt(variance), np.nan)
    return averages_a, averages_b, margins


def _describe_rounds(figures: Table) -> tuple[Table, Table, Table]:
    """Mean of each column, the variance of that mean, and the number of rounds that have it."""
    known = ~np.isnan(figures)
    rounds = known.sum(axis=0)
    mean = np.where(known, figures, 0.0).sum(axis=0) / np.maximum(1, rounds)
    squares = (np.where(known, figures - mean, 0.0) ** 2).sum(axis=0)
    # Bessel's correction, then the variance of a mean; one round has neither and is masked later.
    return mean, squares / np.maximum(1, rounds - 1) / np.maximum(1, rounds), rounds


def _build_row(name: str, a: float, b: float, margin: float) -> dict[str, Any]:
    numbers = {"a": a, "b": b, "difference": b - a}
    row: dict[str, Any] = {key: round(float(number), 3) for key, number in numbers.items()}
    # null: unknown. A difference below a microsecond is none.
    low, high = (
        None if math.isnan(margin) else round(float(b - a + sign * margin), 3) for sign in (-1, 1)
    )
    # Strictly beyond 0: an interval that touches it does not exclude it.
    clear = low is not None and high is not None and bool(low > 0 or high < 0)
    return {"name": name, **row, "low": low, "high": high, "clear": clear}


def _estimate_rounds(target: Mapping[str, Any]) -> list[dict[str, float]]:
    """Of each round the means of all quantities, then the percentiles of the TTFT; {} of a failed one."""
    found = []
    for rows in (run["requests"] for run in target["runs"]):
        figures = {
            # A server's stages are named alike with a router in front of it and without.
            f"{name.removeprefix(MONO_PREFIX)} mean": fmean(values)
            for name, values in (list_metrics(rows) | list_stages(rows)).items()
            if values
        }
        if rows:
            percentiles = np.percentile([row["ttft_ms"] for row in rows], TTFT_PERCENTILES)
            names = (f"ttft p{q}" for q in TTFT_PERCENTILES)
            figures |= zip(names, percentiles.tolist(), strict=True)
        found.append(figures)
    return found


def _build_tables(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]]
) -> tuple[list[str], Table, Table]:
    """The quantities that both sides have, and of each side a row for each round."""
    # Percentiles last, as in a round.
    names = sorted(
        dict.fromkeys(name for figures in (*a, *b) for name in figures),
        key=lambda name: not name.endswith(" mean"),
    )
    tables = [np.array([_list_figures(figures, names) for figures in rounds]) for rounds in (a, b)]
    # Without breakdowns on one side the difference of every stage would be unknown.
    shared = ~(np.isnan(tables[0]).all(axis=0) | np.isnan(tables[1]).all(axis=0))
    kept = [name for name, is_shared in zip(names, shared, strict=True) if is_shared]
    return kept, tables[0][:, shared], tables[1][:, shared]


def _list_figures(figures: Mapping[str, float], names: Iterable[str]) -> list[float]:
    """A round's quantities. A stage that is not in its breakdowns took 0; without any it is unknown."""
    stage_ms = 0.0 if TRACED in figures else math.nan
    return [
        figures.get(name, math.nan if name.removesuffix(" mean") in CLIENT_METRICS else stage_ms)
        for name in names
    ]
