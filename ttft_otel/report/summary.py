# SPDX-License-Identifier: Apache-2.0
"""Many requests -> p50, p95, p99 and mean per stage; page, terminal and export show the same.

Percentiles interpolate linearly between the two nearest ranks (numpy's default, "inclusive").
A stage's percentiles are over the requests that had it; its mean is over all requests, so that the
means of all stages and of the remainder add up to the mean TTFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttft_otel import palette
from ttft_otel.report.shape import Request
from ttft_otel.stages import UNATTRIBUTED


@dataclass(frozen=True, slots=True)
class Line:
    """One stage over many requests, milliseconds; count: in how many it occurred."""

    name: str
    count: int
    p50: float
    p95: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The TTFT, then every stage in the order in which they happen, then the remainder."""

    count: int
    failed: int
    closed: bool
    ttft: Line
    stages: tuple[Line, ...]


def summarize(requests: Sequence[Request]) -> Summary:
    """Summarize the requests that reached a first token; the others are only counted."""
    good = [request for request in requests if not request.error and not request.pending]
    lengths: dict[str, list[int]] = {}
    for request in good:
        for name, value in request.stages.items():
            lengths.setdefault(name, []).append(value)
    lines = [line(name, lengths[name], len(good)) for name in sorted(lengths, key=palette.order)]
    lines.append(line(UNATTRIBUTED, [request.unattributed_us for request in good], len(good)))
    return Summary(
        count=len(good),
        failed=sum(bool(request.error) for request in requests),
        closed=bool(good) and all(request.closed for request in good),
        ttft=line("ttft", [request.ttft_us for request in good], len(good)),
        stages=tuple(lines),
    )


def percentile(ordered: Sequence[int], share: float) -> float:
    """The value below which `share` of the ordered values lie, interpolated; 0 of none."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def line(name: str, values: Sequence[int], requests: int = 0) -> Line:
    """One line over microseconds; requests: what the mean is over, by default all values."""
    ordered = sorted(values)
    p50, p95, p99 = (round(percentile(ordered, share) / 1000, 3) for share in (0.5, 0.95, 0.99))
    mean = round(sum(ordered) / max(1, requests or len(ordered)) / 1000, 3)
    return Line(name, len(ordered), p50, p95, p99, mean)
