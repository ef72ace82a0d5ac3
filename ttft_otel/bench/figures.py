# SPDX-License-Identifier: Apache-2.0
"""Turn Results into numbers: percentiles, throughput, goodput, failures, and the stage behind the slowest.

drive.py gives the Results; document.py writes the numbers, screen.py shows them. Milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ttft_otel import stages
from ttft_otel.bench.drive import Result, Run

OUTSIDE: Final = "outside"  # client's TTFT minus the server's: connection, network, this process
QUEUE: Final = "queue_wait"
PREFILL: Final = "prefill_to_first_token"
LIMIT_MS: Final = 5.0  # a generator that is later than this says nothing about the server
FEW: Final = 20
KEPT: Final = 10  # failures of a kind that are told one by one
PREFILLS: Final = ("", "prefill", "prefill_decode", "mono")
AFTER: Final = stages.NAMES[stages.NAMES.index("prefill.queue") + 1 :]


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity over many requests."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Line | None:
        """The figures of some values; None when there is none."""
        found = np.fromiter(values, dtype=float)
        if not found.size:
            return None
        p50, p95, p99 = np.percentile(found, (50, 95, 99))
        return cls(int(found.size), float(found.mean()), float(p50), float(p95), float(p99))


@dataclass(frozen=True, slots=True)
class Sample:
    """One successful request in milliseconds; `stages` are {} where the server sent none."""

    request_id: str
    trace_id: str
    sent_ms: float
    ttft: float
    latency: float
    tpot: float | None
    gaps: tuple[float, ...]
    input: int | None
    output: int
    cached: int | None
    stages: Mapping[str, float]

    @property
    def figures(self) -> dict[str, float]:
        """What an SLO may name."""
        tpot = {} if self.tpot is None else {"tpot": self.tpot}
        return {"ttft": self.ttft, "latency": self.latency, **tpot}


def sample(result: Result, start_ns: int) -> Sample:
    """A successful Result as numbers."""
    story, times = result.story, result.story.tokens_ns
    output = story.answer if story.answer is not None else len(times)
    tpot = (times[-1] - times[0]) / 1e6 / (output - 1) if output > 1 else None
    return Sample(
        request_id=result.request_id,
        trace_id=result.trace_id,
        sent_ms=(result.reply.sent_ns - start_ns) / 1e6,
        ttft=result.ttft_us / 1000,
        latency=result.latency_us / 1000,
        tpot=tpot,
        gaps=tuple((b - a) / 1e6 for a, b in zip(times, times[1:], strict=False)),
        input=story.prompt,
        output=output,
        cached=story.cached,
        stages=_stages(result),
    )


def _stages(result: Result) -> dict[str, float]:
    """The client's TTFT cut into the server's stages, unattributed and what was outside."""
    found = result.timing
    if found is None:
        return {}
    parts = {name: us / 1000 for name, us in found.stages.items()}
    rest = {
        stages.UNATTRIBUTED: found.unattributed / 1000,
        OUTSIDE: (result.ttft_us - found.ttft) / 1000,
    }
    return {**parts, **rest}


def samples(run: Run) -> list[Sample]:
    """All successful requests of a run, in the order in which they were sent."""
    start = began(run)
    found = [sample(each, start) for each in run.results if not each.error]
    return sorted(found, key=lambda each: each.sent_ms)


def began(run: Run) -> int:
    """The first write."""
    return min((each.reply.sent_ns for each in run.results), default=0)


def seconds(run: Run) -> float:
    """From the first write to the last byte."""
    if not run.results:
        return 0.0
    return (max(each.reply.end_ns for each in run.results) - began(run)) / 1e9


def failures(run: Run) -> dict[str, int]:
    """How many requests failed, by kind."""
    kinds = Counter(each.error for each in run.results if each.error)
    return dict(kinds.most_common())


def complaints(run: Run) -> dict[str, str]:
    """What a server said of each kind of failure, the first time."""
    said: dict[str, str] = {}
    for each in run.results:
        if each.error and each.says:
            said.setdefault(each.error, each.says)
    return said


def failed(run: Run) -> dict[str, list[Result]]:
    """The first failures of each kind, in the order in which they were sent."""
    found: dict[str, list[Result]] = {kind: [] for kind in failures(run)}
    for each in sorted(run.results, key=lambda each: each.reply.sent_ns):
        if each.error and len(found[each.error]) < KEPT:
            found[each.error].append(each)
    return found


def lag(run: Run) -> dict[str, float]:
    """How late this process was: p99 of its sends and of its event loop, in milliseconds."""
    sends = Line.of(each.reply.lag_ns / 1e6 for each in run.results)
    beats = Line.of(each / 1e6 for each in run.beats_ns)
    return {"send_p99": sends.p99 if sends else 0.0, "loop_p99": beats.p99 if beats else 0.0}


def order(found: Sequence[Sample]) -> list[str]:
    """All stages of some samples, in the order in which they happen."""
    names = dict.fromkeys(name for each in found for name in each.stages)
    last = {stages.UNATTRIBUTED: 1, OUTSIDE: 2}
    return sorted(names, key=lambda name: last.get(name, 0))


def lines(found: Sequence[Sample]) -> dict[str, Line]:
    """Every figure over some samples; those of which there is nothing are left out."""
    told = [each for each in found if each.stages]
    every = {
        "ttft": Line.of(each.ttft for each in found),
        QUEUE: Line.of(queued(each.stages) for each in told),
        PREFILL: Line.of(prefilled(each.stages) for each in told),
        "tpot": Line.of(each.tpot for each in found if each.tpot is not None),
        "itl": Line.of(gap for each in found for gap in each.gaps),
        "latency": Line.of(each.latency for each in found),
    }
    return {name: line for name, line in every.items() if line is not None}


def stage_lines(found: Sequence[Sample]) -> dict[str, Line]:
    """Every stage over the samples that have a breakdown; one that a sample lacks took 0."""
    told = [each for each in found if each.stages]
    every = {name: Line.of(each.stages.get(name, 0.0) for each in told) for name in order(told)}
    return {name: line for name, line in every.items() if line is not None}


def queued(parts: Mapping[str, float]) -> float:
    """Queue wait: what the engines' schedulers let a request wait, for its encoding and its prefill."""
    queues = ("encoder.queue", "prefill.queue")
    return sum(value for name, value in parts.items() if stages.split(name)[1] in queues)


def prefilled(parts: Mapping[str, float]) -> float:
    """From the end of the prefill's queue to the first token leaving the server that prefills."""
    found = ((stages.split(name), value) for name, value in parts.items())
    return sum(value for (leg, stage), value in found if leg in PREFILLS and stage in AFTER)


def good(found: Sequence[Sample], slo: Mapping[str, float]) -> int:
    """How many requests kept every limit."""
    return sum(
        all(each.figures.get(name, 0.0) <= limit for name, limit in slo.items()) for each in found
    )


def ends(found: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Mean stages of the middle tenth and of the slowest hundredth; each adds up to its mean TTFT."""
    told = [each for each in found if each.stages]
    if len(told) < FEW:
        return {}
    slow, usual = _ends(told)
    return {
        title: {name: _mean(part, name) for name in order(told)}
        for title, part in (("p50", usual), ("p99", slow))
    }


def blame(found: Sequence[Sample]) -> str:
    """In a sentence: the stage that separates the slowest hundredth from the middle tenth."""
    told = [each for each in found if each.stages]
    if not found:
        return "No request succeeded, so there is nothing to explain."
    if not told:
        return (
            "No breakdown: no answer had a Server-Timing of ttft-otel and there is no /ttft_report "
            "(a server without ttft-otel), so nothing is said about stages."
        )
    if len(told) < FEW:
        return f"{len(told)} requests with a breakdown are too few to explain the slowest (from {FEW})."
    slow, usual = _ends(told)
    more = _mean(slow, "") - _mean(usual, "")
    excess = {name: _mean(slow, name) - _mean(usual, name) for name in order(told)}
    name = max(excess, key=lambda each: excess[each])
    who = f"The slowest {len(slow)} requests are" if len(slow) > 1 else "The slowest request is"
    said = f"{who} {more:.1f} ms slower than the middle tenth on average"
    if excess[name] > more:  # no share of it: other stages were quicker
        return f"{said}; {name} alone takes {excess[name]:.1f} ms more."
    share = 100 * excess[name] / more if more > 0 else 0.0
    return f"{said}, {excess[name]:.1f} ms of it ({share:.0f} %) in {name}."


def _ends(told: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The slowest hundredth (at least one request), and the middle tenth."""
    ranked = sorted(told, key=lambda each: each.ttft)
    count, middle = len(ranked), len(ranked) // 2
    half = max(1, count // 20)
    return ranked[-max(1, count // 100) :], ranked[middle - half : middle + half]


def _mean(found: Sequence[Sample], name: str) -> float:
    """The mean of a stage, or of the TTFT for ""."""
    values = [each.stages.get(name, 0.0) if name else each.ttft for each in found]
    return sum(values) / len(values)
