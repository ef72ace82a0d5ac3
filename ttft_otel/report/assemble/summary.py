# SPDX-License-Identifier: Apache-2.0
"""p50, p95, p99 and mean of every stage over many requests, and what a reader should know of them.

Percentiles interpolate linearly between the two nearest ranks (numpy's default method, "linear").
A stage's percentiles are over the requests that had it; its mean is over all requests, so that the
means of all stages and of the unattributed time add up to the mean TTFT. Three sentences stand below the
figures of pages and terminal: by how much marks may be off that were not taken by a server's own clock, and
which media items were encoded again although an encoder had encoded them for the same request; and which
requests other products have told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ttft_otel.model import stages
from ttft_otel.model.names import keys
from ttft_otel.model.stages import UNATTRIBUTED
from ttft_otel.model.statistics import compute_quantiles
from ttft_otel.report.report_types import Request

NOTABLE_ERROR_US: Final = 200
REMEDY_PAGE: Final = "docs/router.md#encoder-cache-parameters"
MAX_NAMED_INSTANCES: Final = 4  # instances named in the sentence, those with the most items
# Media items that an instance encoded although an encoder had done so, by its role and service.instance.id.
Recomputed: TypeAlias = Counter[tuple[str, str]]
# Sentences of describe_notes(): media encoded again, clock errors, who has told the requests; "" for none.
Notes: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class SummaryLine:
    """One stage over many requests, in milliseconds."""

    name: str
    count: int  #: number of requests that had it
    p50: float
    p95: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures over many requests: TTFT, then all stages in order, unattributed time last."""

    count: int  #: requests with a first token
    #: Requests that ended without one; servers failed those that are not in the next two.
    failed: int
    left: int  #: of these, given up by their clients
    refused: int  #: of these, refused with 4xx
    closed: bool  #: in all requests the stages add up to the TTFT
    ttft: SummaryLine
    stages: tuple[SummaryLine, ...]
    #: Over the requests behind a foreign router that sends spans; not in any sum.
    before: SummaryLine | None = None
    recomputed: Recomputed = field(default_factory=Counter)  #: also those of failed requests
    notes: Notes = ("", "", "")


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
        for name in sorted(lengths, key=stages.rank_stage)
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
        notes=describe_notes(requests, complete),
    )


def summarize_values(name: str, values: Sequence[int], requests: int = 0) -> SummaryLine:
    """One line of the summary.

    values: microseconds. requests: number by which the sum is divided for the mean, 0: len(values).
    """
    p50, p95, p99 = (round(each / 1000, 3) for each in compute_quantiles(values, (0.5, 0.95, 0.99)))
    mean = round(sum(values) / max(1, requests or len(values)) / 1000, 3)
    return SummaryLine(name, len(values), p50, p95, p99, mean)


def find_clock_error(requests: Iterable[Request]) -> int:
    """The greatest clock error of `requests`, in microseconds; 0 when none is worth a word."""
    # The worst of all: the sentence is about any boundary on the page.
    error_us = max((leg.clock_error_us for each in requests for leg in each.legs), default=0)
    return error_us if error_us > NOTABLE_ERROR_US else 0


def describe_notes(requests: Sequence[Request], shown: Sequence[Request]) -> Notes:
    """What stands below the figures of `shown`, those of `requests` that have them."""
    clock = foreign = ""
    if error_us := find_clock_error(shown):
        clock = (
            f"boundaries of the workers' stages are up to {error_us / 1000:.1f} ms off "
            "(ttft.clock_error_us): see docs/reference/device-clock.md"
        )
    if told := Counter(leg.foreign for each in shown for leg in each.legs[-1:] if leg.foreign):
        names = ", ".join(f"{count} by {name}" for name, count in told.most_common())
        foreign = (
            f"{told.total()} of {len(shown)} requests are told by others' spans ({names}): times of a host, "
            "waits without reasons, what they do not say is unattributed: see docs/reference/vocabulary.md"
        )
    return describe_recomputed(collect_recomputed(requests)), clock, foreign


def collect_recomputed(requests: Iterable[Request]) -> Recomputed:
    """Add up the items of `requests` by instance."""
    items = Recomputed()
    for leg in (leg for request in requests for leg in request.legs if leg.recomputed_items):
        items[leg.role, leg.instance] += leg.recomputed_items
    return items


def describe_recomputed(items: Recomputed) -> str:
    """`items` in one sentence, with the page that has the remedy; "" when there are none."""
    if not items:
        return ""
    total = items.total()
    instances = [
        f"{role} ({instance})" if instance else role
        for (role, instance), _ in items.most_common(MAX_NAMED_INSTANCES)
    ]
    if len(items) > MAX_NAMED_INSTANCES:
        instances.append(f"{len(items) - MAX_NAMED_INSTANCES} more")
    what, them = ("media item was", "it") if total == 1 else ("media items were", "them")
    return (
        f"{total} {what} encoded again on {', '.join(instances)} although an encoder had encoded {them}: "
        f"see {REMEDY_PAGE}"
    )
