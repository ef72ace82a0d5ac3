# SPDX-License-Identifier: Apache-2.0
"""Divide the difference between late and typical requests: by stage, reason of waiting and instance.

Input: ComparedRequests. Output: LateDifference, whose parts add up to the difference of the mean TTFT, and
the Finding of its largest stage, to which cause_rules.py has an answer. Intervals are a bootstrap by request,
as those of `diff`. Pure; needs numpy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Final

import numpy

from ttft_otel.explain.diff.stage_difference import LEVEL, RESAMPLES
from ttft_otel.explain.window.late_requests import ComparedRequests
from ttft_otel.explain.window.request_facts import (
    COUNTS,
    HOP,
    MEDIA,
    CannotTellError,
    RequestEvidence,
)
from ttft_otel.model import stages
from ttft_otel.model.stages import UNATTRIBUTED
from ttft_otel.model.statistics import average_draws, draw_weights, find_interval

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

MAX_UNATTRIBUTED: Final = 0.5  # share of the difference from which on no cause is named
MAIN_SHARE: Final = 0.8  # of a stage's difference, from which on it is one instance's
# What a rule may ask of a finding, and what each is; all of late requests, typical ones beside them.
FIGURES: Final[Mapping[str, str]] = {
    "tokens_ratio": "median prompt of the late requests over that of the typical ones",
    "cached_drop": "typical minus late share of prompt tokens found in the prefix cache",
    "media_share": "share of the late requests that have media",
    **{name: f"{name} per late request" for name in COUNTS},
}


@dataclass(frozen=True, slots=True)
class StagePart:
    """What one stage has of the difference; low and high are the interval of `share`."""

    name: str
    late_us: float
    typical_us: float
    share: float
    low: float
    high: float

    @property
    def us(self) -> float:
        """Late minus typical mean, microseconds."""
        return self.late_us - self.typical_us


@dataclass(frozen=True, slots=True)
class Finding:
    """The stage that has most of the difference, and what is known of it."""

    stage: str  #: full name
    word: str  #: without its leg; `router.hop` of any hop
    reason: str = ""  #: that has most of the wait, "" where none is known
    instance: str = ""  #: where MAIN_SHARE of the difference is on one of several, else ""
    instance_share: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)  #: by the names of FIGURES


@dataclass(frozen=True, slots=True)
class LateDifference:
    """Late minus typical requests. The parts' `us` add up to difference_us."""

    compared: ComparedRequests
    difference_us: float
    parts: tuple[StagePart, ...]
    #: Of the bootstrap's draws, in how many the largest stage is the largest, of any leg.
    first_share: float
    #: (reason, share of the largest stage's difference), largest first.
    reasons: tuple[tuple[str, float], ...]
    #: (instance, share of the largest stage's difference, share of the requests that had it).
    instances: tuple[tuple[str, float, float], ...]
    finding: Finding


def divide_difference(compared: ComparedRequests, seed: int = 0) -> LateDifference:
    """Compare both sides. Raises CannotTellError where nothing can be named.

    seed: of the bootstrap; the same requests and seed give the same intervals.
    """
    late, typical = compared.late, compared.typical
    stage_names = sorted(
        {name for each in (*late, *typical) for name in each.facts.stages}, key=stages.rank_stage
    )
    matrix_late, matrix_typical = (
        numpy.array(
            [[each.facts.stages.get(name, 0) for name in stage_names] for each in side], dtype=float
        )
        for side in (late, typical)
    )
    chance = numpy.random.default_rng(seed)
    # In this order: the draws come from one sequence of chance.
    drawn_late, drawn_typical = (
        average_draws(each, draw_weights(chance, len(each), RESAMPLES))
        for each in (matrix_late, matrix_typical)
    )
    drawn = drawn_late - drawn_typical
    total = drawn.sum(1)
    if total[0] <= 0:
        raise CannotTellError(
            f"nothing to explain: {fmean(each.facts.ttft_us for each in late) / 1000:.1f} ms are no longer "
            f"than usual ({fmean(each.facts.ttft_us for each in typical) / 1000:.1f} ms)"
        )
    # A draw in which both sides are as long has no shares; the next larger number stands for it.
    shares = drawn / numpy.maximum(total, 1.0)[:, None]
    low, high = find_interval(shares[1:], LEVEL)
    parts = [
        StagePart(
            name,
            float(matrix_late[:, index].mean()),
            float(matrix_typical[:, index].mean()),
            float(shares[0, index]),
            float(low[index]),
            float(high[index]),
        )
        for index, name in enumerate(stage_names)
    ]
    top = int(numpy.argmax(drawn[0]))
    _check_parts(parts, parts[top])
    name = stage_names[top]
    reasons = _divide_by_reason(name, parts[top].us, late, typical)
    instances = _divide_by_instance(name, parts[top].us, compared)
    return LateDifference(
        compared=compared,
        difference_us=float(total[0]),
        parts=tuple(sorted(parts, key=lambda part: -part.us)),
        first_share=_compute_first_share(drawn, [stages.strip_leg(each) for each in stage_names]),
        reasons=reasons,
        instances=instances,
        finding=build_finding(name, reasons, instances, compared),
    )


def _compute_first_share(drawn: Array, words: Sequence[str]) -> float:
    """How many of the draws after the first, the data, have the same word for their largest stage.

    A cause may be in two legs alike, as where encoder and decoder prepare an image: by chance the one or
    the other is larger, and the cause is the same.
    """
    largest = drawn.argmax(1)
    same = [words[index] == words[largest[0]] for index in largest[1:]]
    return float(numpy.mean(same))


def _check_parts(parts: Sequence[StagePart], top: StagePart) -> None:
    """Raise CannotTellError where unattributed time, or chance, has the difference."""
    (lost,) = [part.share for part in parts if part.name == UNATTRIBUTED] or [0.0]
    if lost >= MAX_UNATTRIBUTED:
        raise CannotTellError(
            f"{lost:.0%} of what the late requests took longer is unattributed: no stage can be blamed. "
            "`ttft-otel doctor --url` says which measurement is missing"
        )
    if top.low <= 0:
        raise CannotTellError(
            f"no stage is longer by more than chance makes: of the largest, {top.name}, the share is "
            f"{top.low:.0%} to {top.high:.0%}. Take a longer window"
        )


def _divide_by_reason(
    stage: str,
    us: float,
    late: Sequence[RequestEvidence],
    typical: Sequence[RequestEvidence],
) -> tuple[tuple[str, float], ...]:
    """(reason, share of the stage's difference), largest first; () for a stage without reasons."""
    known = {reason for each in (*late, *typical) for reason in each.reasons.get(stage, {})}
    shares = {
        reason: (_mean_reason(late, stage, reason) - _mean_reason(typical, stage, reason)) / us
        for reason in known
    }
    return tuple(sorted(shares.items(), key=lambda part: (-part[1], part[0])))


def _mean_reason(side: Sequence[RequestEvidence], stage: str, reason: str) -> float:
    return fmean(each.reasons.get(stage, {}).get(reason, 0) for each in side)


def _divide_by_instance(
    stage: str, us: float, compared: ComparedRequests
) -> tuple[tuple[str, float, float], ...]:
    """(instance, share of the stage's difference, share of the requests with it), largest first."""
    usual = fmean(each.facts.stages.get(stage, 0) for each in compared.typical)
    excess: dict[str, float] = {}
    for each in compared.late:
        instance = each.instances.get(stage, "")
        excess[instance] = excess.get(instance, 0.0) + each.facts.stages.get(stage, 0) - usual
    # Of those that had the stage: an encoder is no odd instance because only media requests visit it.
    everywhere = Counter(each.instances.get(stage, "") for each in compared.window)
    visitors = max(1, sum(count for instance, count in everywhere.items() if instance))
    whole = us * len(compared.late)
    found = [
        (instance, value / whole, everywhere[instance] / visitors)
        for instance, value in excess.items()
        if instance
    ]
    return tuple(sorted(found, key=lambda part: (-part[1], part[0])))


def build_finding(
    stage: str,
    reasons: Sequence[tuple[str, float]],
    instances: Sequence[tuple[str, float, float]],
    compared: ComparedRequests,
) -> Finding:
    """What the rules are asked about."""
    # Late requests may have no reason, for example while their server's spans are still on the way.
    reason = reasons[0][0] if reasons and reasons[0][1] > 0 else ""
    instance, instance_share, its_requests = instances[0] if instances else ("", 0.0, 1.0)
    # An instance with nearly all of the traffic has nearly every difference: that says nothing.
    is_one = instance_share >= MAIN_SHARE and its_requests < MAIN_SHARE
    return Finding(
        stage=stage,
        word="router.hop" if stage.startswith(HOP) else stages.strip_leg(stage),
        reason=reason,
        instance=instance if is_one else "",
        instance_share=instance_share if is_one else 0.0,
        figures=compute_figures(compared),
    )


def compute_figures(compared: ComparedRequests) -> dict[str, float]:
    """The values of FIGURES."""
    late, typical = compared.late, compared.typical
    return {
        "tokens_ratio": find_prompt(late) / find_prompt(typical) if find_prompt(typical) else 1.0,
        "cached_drop": find_cached_share(typical) - find_cached_share(late),
        "media_share": fmean(each.facts.kind == MEDIA for each in late),
        **{name: fmean(each.counts.get(name, 0) for each in late) for name in COUNTS},
    }


def find_prompt(side: Sequence[RequestEvidence]) -> float:
    """The median prompt in tokens; 0.0 where that is not known."""
    return float(median(each.facts.tokens for each in side))


def find_cached_share(side: Sequence[RequestEvidence]) -> float:
    """The share of prompt tokens that were found in the prefix cache."""
    tokens = sum(each.facts.tokens for each in side)
    return sum(each.facts.cached for each in side) / tokens if tokens else 0.0
