# SPDX-License-Identifier: Apache-2.0
"""Put an explanation together: what happened, whose it was, what it was not, and what to change. Pure.

Input: LateDifference and the rules. Output: Explanation, whose sentences have their numbers from the data;
explanation_text.py prints it, commands/explain.py asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ttft_otel.explain.explain.cause_findings import (
    LateDifference,
    StagePart,
    divide_difference,
    find_cached_share,
    find_prompt,
)
from ttft_otel.explain.explain.cause_rules import CauseRule, find_rule
from ttft_otel.explain.explain.remedy_prediction import RemedyPrediction
from ttft_otel.explain.window.holding_work import HoldingWork
from ttft_otel.explain.window.late_requests import UNUSUAL_RANK, ComparedRequests, compute_ttft
from ttft_otel.explain.window.lost_requests import LostRequests
from ttft_otel.explain.window.request_facts import MEDIA, RequestEvidence
from ttft_otel.model.stages import UNATTRIBUTED, WAIT_REASONS

HIGH, MEDIUM, LOW = "high", "medium", "low"
# Draws of the bootstrap in which the largest stage is the largest one.
CONFIDENCE: Final = ((0.95, HIGH), (0.8, MEDIUM), (0.0, LOW))
LIKE_RATIO: Final = 1.25  # medians of prompts that differ by less count as like
LIKE_SHARE: Final = 0.1  # shares (cached, media, of instances) that differ by less count as like
OTHER_MODEL_SHARE: Final = 0.5  # more of the late than of all requests: then no cause is named
MIN_NAMED_SHARE: Final = 0.3  # of the difference, from which on a stage is called its cause
MAX_EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another cause that a reader may think of, and what the data say about it."""

    name: str
    excluded: bool  #: the data speak against it
    sentence: str  #: the figures that say so, or that it stays possible


@dataclass(frozen=True, slots=True)
class ModelShare:
    """The model of which the late requests have most more than the window; shares of the two."""

    name: str
    late: float
    window: float

    @property
    def is_other(self) -> bool:
        """Whether two models are compared, rather than late requests with typical ones."""
        return self.late - self.window >= OTHER_MODEL_SHARE


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why requests were late."""

    difference: LateDifference
    rule: CauseRule | None  #: None where the largest stage has none
    confidence: str
    alternatives: tuple[Alternative, ...]
    examples: tuple[RequestEvidence, ...]  #: late requests with most time in the largest stage
    is_unusual: bool  #: False for a request that took as long as its like, which has no cause
    slo_us: int
    #: Lateness in microseconds by stage, largest first; empty without an objective.
    slo: Mapping[str, float]
    p50_us: float
    p99_us: float
    holding: HoldingWork | None = None  #: who held them, for a stage that waits
    #: What the remedy would bring, where it was asked for.
    prediction: RemedyPrediction | None = None
    no_prediction: str = ""  #: why that is not known
    lost: LostRequests = field(
        default_factory=LostRequests
    )  #: of the window, without a first token

    @property
    def top(self) -> StagePart:
        """The stage with most of the difference."""
        return self.difference.parts[0]

    @property
    def is_named(self) -> bool:
        """Whether one stage is the cause, so that a remedy may be named."""
        return (
            self.is_unusual
            and self.confidence != LOW
            and self.top.share >= MIN_NAMED_SHARE
            and not self.model.is_other
        )

    @property
    def model(self) -> ModelShare:
        """The model that distinguishes the late requests most from the others."""
        return _find_model(self.difference.compared)


def explain_requests(compared: ComparedRequests, slo_us: int = 0) -> Explanation:
    """Explain the late side of `compared`. Raises CannotTellError."""
    difference = divide_difference(compared)
    stage = difference.finding.stage
    examples = sorted(compared.late, key=lambda each: -each.facts.stages.get(stage, 0))
    return Explanation(
        difference=difference,
        rule=find_rule(difference.finding),
        confidence=next(word for share, word in CONFIDENCE if difference.first_share >= share),
        alternatives=tuple(_list_alternatives(difference)),
        examples=tuple(examples[:MAX_EXAMPLES]),
        is_unusual=compared.rank >= UNUSUAL_RANK,
        slo_us=slo_us,
        slo=divide_lateness(compared, slo_us) if slo_us else {},
        p50_us=compute_ttft(compared.window, 0.5),
        p99_us=compute_ttft(compared.window, 0.99),
    )


def divide_lateness(compared: ComparedRequests, slo_us: int) -> dict[str, float]:
    """The time beyond the objective by stage, over all late requests; the parts add up to it.

    A request's lateness is divided among the stages in proportion to what each took longer than in typical
    requests: a stage that is as long as usual has not made it late.
    """
    names = {name for each in compared.late for name in each.facts.stages}
    usual = {
        name: sum(each.facts.stages.get(name, 0) for each in compared.typical)
        / len(compared.typical)
        for name in names
    }
    eaten = dict.fromkeys(names, 0.0)
    for each in compared.late:
        excess = {name: max(0.0, each.facts.stages.get(name, 0) - usual[name]) for name in names}
        # Never 0: a late request is longer than the typical ones, which were in time.
        whole = sum(excess.values())
        for name, value in excess.items():
            eaten[name] += (each.facts.ttft_us - slo_us) * value / whole
    found = [(name, us) for name, us in eaten.items() if us > 0]
    return dict(sorted(found, key=lambda part: (-part[1], part[0])))


def _find_model(compared: ComparedRequests) -> ModelShare:
    """The model of which the late requests have most more than the window."""
    # Not than the typical ones: those are its middle, where a slower model may be missing anyway.
    late, window = (
        Counter(each.facts.model for each in side) for side in (compared.late, compared.window)
    )
    shares = [
        ModelShare(name, count / len(compared.late), window[name] / len(compared.window))
        for name, count in late.items()
    ]
    return max(shares, key=lambda each: (each.late - each.window, each.name))


def _list_alternatives(difference: LateDifference) -> list[Alternative]:
    """What else could have been the cause, each with the figures for or against it."""
    found = (*_compare_requests(difference), *_compare_parts(difference))
    return [
        Alternative(name, excluded, f"{'Not' if excluded else 'Perhaps also'} {name}: {figures}.")
        for name, excluded, figures in found
    ]


def _compare_requests(difference: LateDifference) -> Iterator[tuple[str, bool, str]]:
    """Other requests as the cause: its name, whether the data exclude it, and their figures."""
    compared, finding = difference.compared, difference.finding
    late, typical = compared.late, compared.typical
    ratio = finding.figures["tokens_ratio"]
    prompt = "median prompt" if len(late) > 1 else "its prompt"
    yield (
        "longer prompts",
        ratio < LIKE_RATIO,
        f"{prompt} {find_prompt(late):.0f} tokens, usual are {find_prompt(typical):.0f}",
    )
    cached, usual_cached = find_cached_share(late), find_cached_share(typical)
    yield (
        "a colder prefix cache",
        finding.figures["cached_drop"] < LIKE_SHARE,
        f"{cached:.0%} of the prompt cached, usual are {usual_cached:.0%}",
    )
    media, usual_media = (
        sum(each.facts.kind == MEDIA for each in side) / len(side) for side in (late, typical)
    )
    yield (
        "media",
        media - usual_media < LIKE_SHARE,
        f"{media:.0%} have media, usual are {usual_media:.0%}",
    )
    model = _find_model(compared)
    if len({each.facts.model for each in compared.window}) > 1:
        yield (
            "another model",
            model.late - model.window < LIKE_SHARE,
            f"{model.late:.0%} are for {model.name or 'no model'}, of all requests {model.window:.0%}",
        )


def _compare_parts(difference: LateDifference) -> Iterator[tuple[str, bool, str]]:
    """Other parts of the difference as the cause, in the same form."""
    compared, finding, top = difference.compared, difference.finding, difference.parts[0]
    second = next((part for part in difference.parts[1:] if part.name != UNATTRIBUTED), None)
    if second is not None:
        yield (
            "another stage",
            second.high < top.low,
            f"next is {second.name} with {second.share:.0%} ({second.low:.0%} to {second.high:.0%})",
        )
    error_us = max(each.facts.clock_error_us for each in (*compared.late, *compared.typical))
    if error_us:
        yield (
            "the clocks",
            error_us < LIKE_SHARE * top.us,
            f"boundaries of the workers' stages are up to {error_us / 1000:.1f} ms off, "
            f"{top.name} is {top.us / 1000:.1f} ms longer",
        )
    lost = next((part for part in difference.parts if part.name == UNATTRIBUTED), None)
    if lost is not None:
        yield (
            "something unmeasured",
            lost.share < LIKE_SHARE,
            f"{max(0.0, lost.share):.1%} of the difference is unattributed",
        )
    if len(difference.instances) > 1 or finding.instance:
        instance, share, requests = difference.instances[0]
        yield (
            "one instance",
            not finding.instance and share < requests + LIKE_SHARE,
            f"{instance} has {share:.0%} of it, and {requests:.0%} of the requests",
        )


def describe_reasons(reasons: Sequence[tuple[str, float]]) -> str:
    """The reasons that have a tenth or more, as words; "" without any."""
    shown = [(reason, share) for reason, share in reasons if share >= LIKE_SHARE]
    return ", ".join(f"{reason} ({share:.0%})" for reason, share in shown if reason in WAIT_REASONS)
