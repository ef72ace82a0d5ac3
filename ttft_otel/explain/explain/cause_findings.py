# SPDX-License-Identifier: Apache-2.0
"""Divide the difference between late and typical requests: by stage, reason of waiting and instance.

Input: ComparedRequests. Output: LateDifference, whose parts add up to the difference of the mean TTFT, for
the detectors and for explanation.py. Intervals are a bootstrap by request, as those of `diff`. Pure; needs
numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy

from ttft_otel.explain.diff.stage_difference import LEVEL, RESAMPLES
from ttft_otel.explain.window.late_requests import ComparedRequests
from ttft_otel.explain.window.request_facts import CannotTellError, RequestFacts, count_values
from ttft_otel.model import stages
from ttft_otel.model.stages import UNATTRIBUTED
from ttft_otel.model.statistics import average_draws, draw_weights, find_interval

MAX_UNATTRIBUTED: Final = 0.5  # share of the difference from which on no cause is named
MAIN_SHARE: Final = 0.8  # of a stage's difference, from which on it is one instance's


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

    @property
    def stage(self) -> str:
        """The full name of the stage that has most of the difference."""
        return self.parts[0].name

    @property
    def word(self) -> str:
        """The stage without its leg; `router.hop` of any hop."""
        return stages.strip_leg(self.stage)

    @property
    def instance(self) -> str:
        """The one of several instances that has MAIN_SHARE of the stage's difference, else ""."""
        name, share, requests = self.instances[0] if self.instances else ("", 0.0, 1.0)
        # An instance with nearly all of the traffic has nearly every difference: that says nothing.
        return name if share >= MAIN_SHARE and requests < MAIN_SHARE else ""


def divide_difference(compared: ComparedRequests, seed: int = 0) -> LateDifference:
    """Compare both sides. Raises CannotTellError where nothing can be named.

    seed: of the bootstrap; the same requests and seed give the same intervals.
    """
    late, typical = compared.late, compared.typical
    names = sorted(
        {name for each in (*late, *typical) for name in each.stages}, key=stages.rank_stage
    )
    chance = numpy.random.default_rng(seed)
    # In this order: the draws come from one sequence of chance.
    drawn_late, drawn_typical = (
        average_draws(
            numpy.array([[each.stages.get(name, 0) for name in names] for each in side], float),
            draw_weights(chance, len(side), RESAMPLES)
            * numpy.array([each.weight for each in side]),
        )
        for side in (late, typical)
    )
    drawn = drawn_late - drawn_typical
    total = drawn.sum(1)
    if total[0] <= 0:
        raise CannotTellError(
            f"nothing to explain: {fmean(each.ttft_us for each in late) / 1000:.1f} ms are no longer "
            f"than usual ({fmean(each.ttft_us for each in typical) / 1000:.1f} ms)"
        )
    # A draw in which both sides are as long has no shares; the next larger number stands for it.
    shares = drawn / numpy.maximum(total, 1.0)[:, None]
    low, high = find_interval(shares[1:], LEVEL)
    columns = (drawn_late[0], drawn_typical[0], shares[0], low, high)
    parts = [
        StagePart(name, *map(float, row))
        for name, row in zip(names, numpy.stack(columns, 1), strict=True)
    ]
    lost = next((part.share for part in parts if part.name == UNATTRIBUTED), 0.0)
    if lost >= MAX_UNATTRIBUTED:
        raise CannotTellError(
            f"{lost:.0%} of what the late requests took longer is unattributed: no stage can be blamed. "
            "`ttft-otel doctor --url` says which measurement is missing"
        )
    # A cause may be in two legs alike, as where encoder and decoder prepare an image: by chance the one or
    # the other is larger, and the cause is the same.
    words = [stages.strip_leg(each) for each in names]
    largest = [words[index] for index in drawn.argmax(1)]
    parts.sort(key=lambda part: -part.us)
    return LateDifference(
        compared=compared,
        difference_us=float(total[0]),
        parts=tuple(parts),
        first_share=float(numpy.mean([each == largest[0] for each in largest[1:]])),
        reasons=_divide_by_reason(parts[0], late, typical),
        instances=_divide_by_instance(parts[0], compared),
    )


def _average(values: Iterable[float], side: Sequence[RequestFacts]) -> float:
    """Mean of one value per request, each as often as it stands for others."""
    # statistics.fmean() has no weights in Python 3.10.
    return float(numpy.average([*values], weights=[each.weight for each in side]))


def _divide_by_reason(
    part: StagePart, late: Sequence[RequestFacts], typical: Sequence[RequestFacts]
) -> tuple[tuple[str, float], ...]:
    """(reason, share of the stage's difference), largest first; () for a stage without reasons."""
    known = {reason for each in (*late, *typical) for reason in each.reasons.get(part.name, {})}

    def average(side: Sequence[RequestFacts], reason: str) -> float:
        return _average((each.reasons.get(part.name, {}).get(reason, 0) for each in side), side)

    shares = [
        (reason, (average(late, reason) - average(typical, reason)) / part.us) for reason in known
    ]
    return tuple(sorted(shares, key=lambda each: (-each[1], each[0])))


def _divide_by_instance(
    part: StagePart, compared: ComparedRequests
) -> tuple[tuple[str, float, float], ...]:
    """(instance, share of the stage's difference, share of the requests with it), largest first."""
    stage = part.name
    usual = _average((each.stages.get(stage, 0) for each in compared.typical), compared.typical)
    excess: dict[str, float] = {}
    for each in compared.late:
        instance = each.instances.get(stage, "")
        longer = each.stages.get(stage, 0) - usual
        excess[instance] = excess.get(instance, 0.0) + each.weight * longer
    # Of those that had the stage: an encoder is no odd instance because only media requests visit it.
    everywhere = count_values(compared.window, lambda each: each.instances.get(stage, ""))
    visitors = max(1.0, sum(count for instance, count in everywhere.items() if instance))
    whole = part.us * sum(each.weight for each in compared.late)
    found = [
        (instance, value / whole, everywhere.get(instance, 0.0) / visitors)
        for instance, value in excess.items()
        if instance
    ]
    return tuple(sorted(found, key=lambda each: (-each[1], each[0])))
