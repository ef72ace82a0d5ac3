# SPDX-License-Identifier: Apache-2.0
"""p50, p95, p99 and mean of every stage over many requests; for pages, terminal and JSON.

Percentiles interpolate linearly between the two nearest ranks (numpy's default method, "linear").
A stage's percentiles are over the requests that had it; its mean is over all requests, so that the
means of all stages and of the unattributed time add up to the mean TTFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttft_otel.model import palette
from ttft_otel.model.names import keys
from ttft_otel.model.stages import UNATTRIBUTED
from ttft_otel.model.statistics import compute_quantiles
from ttft_otel.report.assemble.clock_errors import find_clock_error
from ttft_otel.report.assemble.recomputed_counts import RecomputedCount, collect_recomputed
from ttft_otel.report.report_types import Request


@dataclass(frozen=True, slots=True)
class SummaryLine:
    """One stage over many requests, in milliseconds; count: number of requests that had it."""

    name: str
    count: int
    p50: float
    p95: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures over many requests: TTFT, then all stages in order, unattributed time last.

    count: requests with a first token. closed: in all of them the stages add up to the TTFT.
    failed: requests that ended without one; of these the client of `left` gave up, `refused` were
        refused with 4xx, and servers failed the others.
    before: over the requests behind a foreign router that sends spans; not in any sum.
    recomputed: media items that were encoded twice, also those of failed requests.
    clock_error_us: the greatest error of a mark's place; 0 when it is not worth a word.
    """

    count: int
    failed: int
    left: int
    refused: int
    closed: bool
    ttft: SummaryLine
    stages: tuple[SummaryLine, ...]
    before: SummaryLine | None = None
    recomputed: tuple[RecomputedCount, ...] = ()
    clock_error_us: int = 0


def summarize(requests: Sequence[Request]) -> Summary:
    """Summarize the `requests` that reached a first token; failed ones are only counted."""
    # A failed request has no first token, and a pending one may still change.
    complete = [request for request in requests if not request.error and not request.pending]
    lengths: dict[str, list[int]] = {}
    for request in complete:
        for name, value in request.stages.items():
            lengths.setdefault(name, []).append(value)
    lines = [
        summarize_values(name, lengths[name], len(complete))
        for name in sorted(lengths, key=palette.get_sort_key)
    ]
    # Always last and always there: a sum without it could not be checked.
    lines.append(
        summarize_values(
            UNATTRIBUTED, [request.unattributed_us for request in complete], len(complete)
        )
    )
    before = [request.before.us for request in complete if request.before]
    return Summary(
        count=len(complete),
        # Over all requests, in contrast to the figures.
        failed=sum(bool(request.error) for request in requests),
        left=sum(request.error in keys.CLIENT_LEFT_ERRORS for request in requests),
        refused=sum(keys.is_refusal(request.error) for request in requests),
        closed=bool(complete) and all(request.closed for request in complete),
        ttft=summarize_values("ttft", [request.ttft_us for request in complete], len(complete)),
        stages=tuple(lines),
        before=summarize_values("before", before) if before else None,
        recomputed=collect_recomputed(requests),
        clock_error_us=find_clock_error(complete),
    )


def summarize_values(name: str, values: Sequence[int], requests: int = 0) -> SummaryLine:
    """One line of the summary.

    values: microseconds. requests: number by which the sum is divided for the mean, 0: len(values).
    """
    p50, p95, p99 = (round(each / 1000, 3) for each in compute_quantiles(values, (0.5, 0.95, 0.99)))
    mean = round(sum(values) / max(1, requests or len(values)) / 1000, 3)
    return SummaryLine(name, len(values), p50, p95, p99, mean)
