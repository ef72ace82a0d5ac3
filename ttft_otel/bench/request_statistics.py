# SPDX-License-Identifier: Apache-2.0
"""What is measured of each request of a run, and what follows: goodput, failures, the stage behind slow ones.

All times are in milliseconds, except where the name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import monotonic_ns, time_ns
from typing import Final

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
MAX_GENERATOR_LAG_MS: Final = 5.0  # p99 beyond which a run is not valid
# Below it the middle tenth is less than two requests.
MIN_EXPLAINED_REQUESTS: Final = 20
# "": the stages of a server that was asked directly carry no leg.
PREFILL_ROLES: Final = ("", *PREFILLING_ROLES)
STAGES_AFTER_QUEUE: Final = stages.STAGE_NAMES[stages.STAGE_NAMES.index("prefill.queue") + 1 :]


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One successful request."""

    request_id: str
    trace_id: str
    sent_ms: float  #: after the run's first request
    ttft_ms: float
    latency_ms: float
    tpot_ms: float | None  #: mean time per output token after the first; None for a single one
    gaps_ms: tuple[float, ...]  #: between successive token events
    input_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    stages_ms: Mapping[str, float]  #: {} when there is no breakdown

    @property
    def slo_metrics(self) -> dict[str, float]:
        """The metrics that --slo can limit."""
        tpot = {} if self.tpot_ms is None else {"tpot": self.tpot_ms}
        return {"ttft": self.ttft_ms, "latency": self.latency_ms, **tpot}


def measure_request(result: RequestResult, start_ns: int) -> RequestSample:
    """The sample of a successful RequestResult. start_ns: the run's first write."""
    content = result.content
    token_times_ns = content.token_times_ns
    output_tokens = (
        content.completion_tokens if content.completion_tokens is not None else len(token_times_ns)
    )
    tpot_ms = (
        # By tokens, not by events: a server may send several tokens in one event.
        (token_times_ns[-1] - token_times_ns[0]) / 1e6 / (output_tokens - 1)
        if output_tokens > 1
        else None
    )
    return RequestSample(
        request_id=result.request_id,
        trace_id=result.trace_id,
        sent_ms=(result.response.sent_ns - start_ns) / 1e6,
        ttft_ms=result.ttft_us / 1000,
        latency_ms=result.latency_us / 1000,
        tpot_ms=tpot_ms,
        gaps_ms=tuple(
            (b - a) / 1e6 for a, b in zip(token_times_ns, token_times_ns[1:], strict=False)
        ),
        input_tokens=content.prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=content.cached_tokens,
        stages_ms=_split_ttft(result),
    )


def _split_ttft(result: RequestResult) -> dict[str, float]:
    """The client's TTFT as the server's stages, unattributed time, and time outside of the server."""
    breakdown = result.timing
    if breakdown is None:
        return {}
    parts = {name: us / 1000 for name, us in breakdown.stages.items()}
    rest = {
        stages.UNATTRIBUTED: breakdown.unattributed / 1000,
        # A difference of two lengths: no offset between the hosts' clocks is needed.
        stages.OUTSIDE: (result.ttft_us - breakdown.ttft) / 1000,
    }
    return {**parts, **rest}


def collect_samples(run: LoadRun) -> list[RequestSample]:
    """Samples of all successful requests of `run`, in the order in which they were sent."""
    # The first request is the start of the run, even if it failed.
    start_ns = find_start_ns(run)
    unsorted_samples = [measure_request(each, start_ns) for each in run.results if not each.error]
    return sorted(unsorted_samples, key=lambda each: each.sent_ms)


def find_start_ns(run: LoadRun) -> int:
    """Time of the first write in `run`, CLOCK_MONOTONIC; 0 without results."""
    return min((result.response.sent_ns for result in run.results), default=0)


def find_window(run: LoadRun) -> tuple[int, int]:
    """Unix nanoseconds between which `run` sent its requests and got its answers."""
    offset_ns = time_ns() - monotonic_ns()
    end_ns = max((each.response.end_ns for each in run.results), default=0)
    return find_start_ns(run) + offset_ns, end_ns + offset_ns


def compute_duration_s(run: LoadRun) -> float:
    """Seconds from the first write to the last byte of `run`."""
    if not run.results:
        return 0.0
    return (max(result.response.end_ns for result in run.results) - find_start_ns(run)) / 1e9


def find_lateness(run: LoadRun) -> float:
    """How late the last requests of `run` left (median), as a share of the time planned for all."""
    responses = sorted((each.response for each in run.results), key=lambda each: each.due_ns)
    if not responses:
        return 0.0
    last = responses[-max(1, len(responses) // 4) :]
    late_ns = compute_quantile((each.sent_ns - each.due_ns for each in last), 0.5)
    return late_ns / max(1, responses[-1].due_ns - responses[0].due_ns)


def list_waits(run: LoadRun, conditions: Sequence[LimitCondition]) -> dict[str, list[float]]:
    """Milliseconds of each metric of `conditions`, in the order of sending.

    Infinite for a request that failed, or was unanswered when the run ended early; 0 where it has no value,
    such as the TPOT of a single token.
    """
    waits = {each.metric: list[tuple[int, float]]() for each in conditions}
    for result in run.results:
        found = {} if result.error else measure_request(result, 0).slo_metrics
        for metric, rows in waits.items():
            rows.append(
                (result.response.sent_ns, found.get(metric, math.inf if result.error else 0.0))
            )
    for response in run.in_flight.values():
        # Of those with a first piece nobody knows how they would have ended.
        if response.sent_ns and not response.pieces:
            for metric in {"ttft", "latency"} & set(waits):
                waits[metric].append((response.sent_ns, math.inf))
    return {metric: [value for _, value in sorted(rows)] for metric, rows in waits.items()}


def is_overloaded(run: LoadRun, conditions: Sequence[LimitCondition], planned: int) -> bool:
    """Whether a run in progress already has far too many first tokens beyond a limit: the queue grows.

    planned: requests of the whole run.
    """
    now_ns = monotonic_ns()
    waits = [
        (each.sent_ns, (now_ns - each.sent_ns) / 1e6)
        for each in run.in_flight.values()
        if each.sent_ns and not each.pieces
    ]
    waits += [
        (each.response.sent_ns, math.inf if each.error else each.ttft_us / 1000)
        for each in run.results
    ]
    # The first ones do not count; what is left is to prove something.
    waits_ms = [wait_ms for _, wait_ms in sorted(waits)[int(WARMUP_SHARE * planned) :]]
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


def measure_lag(run: LoadRun) -> dict[str, float]:
    """How late this process was in `run`: p99 of its sends and of its event loop, in milliseconds."""
    return {
        "send_p99": compute_quantile((each.response.lag_ns / 1e6 for each in run.results), 0.99),
        "loop_p99": compute_quantile((each / 1e6 for each in run.loop_lags_ns), 0.99),
    }


def order_stages(samples: Sequence[RequestSample]) -> list[str]:
    """All stages in `samples`, in order; unattributed and outside last."""
    names = dict.fromkeys(name for sample in samples for name in sample.stages_ms)
    last = {stages.UNATTRIBUTED: 1, stages.OUTSIDE: 2}
    return sorted(names, key=lambda name: last.get(name, 0))


def list_metrics(samples: Sequence[RequestSample]) -> dict[str, list[float]]:
    """The values of all metrics over `samples`; of some there may be none."""
    traced = [sample.stages_ms for sample in samples if sample.stages_ms]
    return {
        "ttft": [sample.ttft_ms for sample in samples],
        QUEUE_WAIT: list(map(sum_queue_wait, traced)),
        PREFILL_TO_FIRST_TOKEN: list(map(sum_prefill, traced)),
        "tpot": [sample.tpot_ms for sample in samples if sample.tpot_ms is not None],
        "itl": [gap for sample in samples for gap in sample.gaps_ms],
        "latency": [sample.latency_ms for sample in samples],
    }


def list_stages(samples: Sequence[RequestSample]) -> dict[str, list[float]]:
    """The lengths of all stages over the samples with a breakdown; a missing stage counts as 0."""
    traced = [sample for sample in samples if sample.stages_ms]
    return {
        name: [sample.stages_ms.get(name, 0.0) for sample in traced]
        for name in order_stages(traced)
    }


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


def count_good(samples: Sequence[RequestSample], slo_ms: Mapping[str, float]) -> int:
    """Number of `samples` within all limits. slo_ms: metric -> limit."""
    return sum(
        all(sample.slo_metrics.get(name, 0.0) <= limit for name, limit in slo_ms.items())
        for sample in samples
    )


def average_tail_stages(samples: Sequence[RequestSample]) -> dict[str, dict[str, float]]:
    """Mean stages of the middle tenth ("p50") and of the slowest hundredth ("p99").

    Each adds up to the mean TTFT of its requests. {} when there are too few `samples`.
    """
    traced = [sample for sample in samples if sample.stages_ms]
    if len(traced) < MIN_EXPLAINED_REQUESTS:
        return {}
    ranked = sorted(traced, key=lambda sample: sample.ttft_ms)
    # Half of the middle tenth lies on each side of the median.
    middle, half_width = len(ranked) // 2, max(1, len(ranked) // 20)
    usual = ranked[middle - half_width : middle + half_width]
    slow = ranked[-_count_slowest(ranked) :]
    names = order_stages(traced)
    return {"p50": _average_stages(usual, names), "p99": _average_stages(slow, names)}


def average_slowest_stages(samples: Sequence[RequestSample], share: float) -> dict[str, float]:
    """Mean stages of the `share` of requests with the longest TTFT, one at least; {} without breakdowns."""
    traced = sorted((each for each in samples if each.stages_ms), key=lambda each: each.ttft_ms)
    slowest = traced[-max(1, round(share * len(traced))) :]
    return _average_stages(slowest, order_stages(traced)) if traced else {}


def _average_stages(samples: Sequence[RequestSample], names: Iterable[str]) -> dict[str, float]:
    return {name: fmean(each.stages_ms.get(name, 0.0) for each in samples) for name in names}


def _count_slowest(samples: Sequence[RequestSample]) -> int:
    """The number of the slowest hundredth of `samples`, one at least."""
    return max(1, len(samples) // 100)


def explain_tail(samples: Sequence[RequestSample]) -> str:
    """A sentence that names the stage by which the slowest hundredth differs most from the middle tenth."""
    traced = [each for each in samples if each.stages_ms]
    if not samples:
        return "No request succeeded, so there is nothing to explain."
    if not traced:
        return (
            "No breakdown: no answer had a Server-Timing of ttft-otel (a server without it, or a proxy "
            "that removes the header), so nothing is said about stages."
        )
    ends = average_tail_stages(traced)
    if not ends:
        return (
            f"{len(traced)} requests with a breakdown are too few to explain the slowest (from "
            f"{MIN_EXPLAINED_REQUESTS})."
        )
    excess_by_stage = {name: ms - ends["p50"][name] for name, ms in ends["p99"].items()}
    excess_ms = sum(excess_by_stage.values())
    name = max(excess_by_stage, key=lambda each: excess_by_stage[each])
    count = _count_slowest(traced)
    subject = f"The slowest {count} requests are" if count > 1 else "The slowest request is"
    sentence = f"{subject} {excess_ms:.1f} ms slower than the middle tenth on average"
    if excess_by_stage[name] > excess_ms:  # no share of it: other stages were quicker
        return f"{sentence}; {name} alone takes {excess_by_stage[name]:.1f} ms more."
    share = 100 * excess_by_stage[name] / excess_ms if excess_ms > 0 else 0.0
    return f"{sentence}, {excess_by_stage[name]:.1f} ms of it ({share:.0f} %) in {name}."
