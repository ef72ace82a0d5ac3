# SPDX-License-Identifier: Apache-2.0
"""Count the requests of a window that ended without a first token, for explain and diff. Pure.

They have no TTFT, so that a window whose slowest requests are given up by their clients looks faster than it
was. Requests that were refused with 4xx are not among them: they were not served late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ttft_otel.model.names import keys
from ttft_otel.report.report_types import Request
from ttft_otel.report.show.terminal import format_short, round_ms


@dataclass(frozen=True, slots=True)
class LostRequests:
    """Requests of a window that ended without a first token."""

    total: int = 0
    left: int = 0  #: of these the client gave up
    died: Mapping[str, int] = field(default_factory=dict)  #: by the stage they were in
    lengths_us: tuple[int, ...] = ()  #: how long those that were read took

    @property
    def median_us(self) -> float:
        """How long they took."""
        return float(median(self.lengths_us)) if self.lengths_us else 0.0

    @property
    def sentence(self) -> str:
        """What became of them; "" where there are none."""
        if not self.total:
            return ""
        word = "request" if self.total == 1 else "requests"
        summary = (
            f"{self.total} {word} ended without a first token, after {format_short(self.median_us)}"
        )
        details = [f"given up by their clients: {self.left}"] if self.left else []
        if self.died:
            stage, count = max(self.died.items(), key=lambda each: (each[1], each[0]))
            details.append(f"most in {stage}: {count}")
        return (
            f"{summary} at the median ({'; '.join(details)})"
            if details
            else f"{summary} at the median"
        )


def count_lost(lost: Sequence[Request], weight: float = 1.0) -> LostRequests:
    """What became of requests without a first token; `weight` is how many each stands for."""
    died = Counter(each.died for each in lost if each.died)
    return LostRequests(
        total=round(weight * len(lost)),
        left=round(weight * sum(each.error in keys.CLIENT_LEFT_ERRORS for each in lost)),
        died={stage: round(weight * count) for stage, count in died.items()},
        lengths_us=tuple(each.ttft_us for each in lost),
    )


def describe_lost(lost: LostRequests) -> dict[str, Any]:
    """Their JSON."""
    return {
        "requests": lost.total,
        "left": lost.left,
        "died_in": dict(lost.died),
        "median_ms": round_ms(lost.median_us),
    }
