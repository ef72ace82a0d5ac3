# SPDX-License-Identifier: Apache-2.0
"""What is measured of each request of a run, and what follows: the steady part, failures, the slowest stage.

A request is a row of the result document. Times are in milliseconds, except where the name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from time import monotonic_ns
from typing import Any, Final, TypeAlias

import numpy as np

from ttft_otel.bench.limit_search import (
    MAX_OVERLOAD_TAIL,
    OVERLOAD_SHARE,
    WARMUP_SHARE,
    LimitCondition,
)
from ttft_otel.bench.load_driver import LoadRun, RequestResult
from ttft_otel.model import stages
from ttft_otel.model.stages import PREFILLING_ROLES
from ttft_otel.model.statistics import compute_quantile

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


def find_lateness(run: LoadRun) -> float:
    """How late the last requests of `run` left (median), as a share of the time planned for all."""
    responses = sorted((each.response for each in run.results), key=lambda each: each.due_ns)
    if not responses:
        return 0.0
    last = responses[-max(1, len(responses) // 4) :]
    late_ns = compute_quantile((each.sent_ns - each.due_ns for each in last), 0.5)
    return late_ns / max(1, responses[-1].due_ns - responses[0].due_ns)


def list_waits(run: LoadRun, metric: str, now_ns: float = math.inf) -> list[float]:
    """Milliseconds of `metric` (ttft, tpot or latency), in the order of sending.

    Infinite for a request that failed; 0 where it has no value, such as the TPOT of a single token. One that
    is unanswered has waited until `now_ns`, in a run that has ended for ever.
    """
    waits = [
        (each.response.sent_ns, math.inf if each.error else getattr(each, f"{metric}_ms") or 0.0)
        for each in run.results
    ]
    if metric != "tpot":
        # Of those with a first piece nobody knows how they would have ended.
        waits += [
            (each.sent_ns, (now_ns - each.sent_ns) / 1e6)
            for each in run.in_flight.values()
            if each.sent_ns and not each.pieces
        ]
    return [wait_ms for _, wait_ms in sorted(waits)]


def is_overloaded(run: LoadRun, conditions: Sequence[LimitCondition], planned: int) -> bool:
    """Whether a run in progress already has far too many first tokens beyond a limit: the queue grows.

    planned: requests of the whole run.
    """
    # The first ones do not count; what is left is to prove something.
    waits_ms = list_waits(run, "ttft", monotonic_ns())[int(WARMUP_SHARE * planned) :]
    return any(
        sum(wait_ms > each.limit_ms for wait_ms in waits_ms) > OVERLOAD_SHARE * planned
        for each in conditions
        if each.metric == "ttft" and each.tail <= MAX_OVERLOAD_TAIL
    )


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
