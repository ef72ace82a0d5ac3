# SPDX-License-Identifier: Apache-2.0
"""Compare late requests with typical ones, a request with its like: by stage, reason of waiting and instance.

Input: RequestFacts of a window. Output: ComparedRequests, and their LateDifference, whose parts add up to the
difference of the mean TTFT, for the detectors and for explanation.py. Windows that cannot tell are refused
with the sentence that says why. Intervals are a bootstrap by request, as those of `diff`. Needs numpy.
Who held them while they waited is asked of the store: links of the queues' spans, which otlp_decoder.py
keeps as an attribute; window_answer.py asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy
from msgspec import structs

from ttft_otel.explain.diff.window_difference import LEVEL, RESAMPLES
from ttft_otel.explain.window.request_facts import (
    CannotTellError,
    RequestFacts,
    count_requests,
    count_values,
    describe_request,
)
from ttft_otel.model import stages
from ttft_otel.model.names import span_names
from ttft_otel.model.stages import UNATTRIBUTED
from ttft_otel.model.statistics import (
    average_draws,
    compute_weighted_quantiles,
    draw_weights,
    find_interval,
)
from ttft_otel.report.breakdown_source import BreakdownSource
from ttft_otel.report.receive.otlp_decoder import StoredHolder, read_holders
from ttft_otel.report.report_types import LATE_SHARE, MIN_LATE, StoredSpan

MIN_WINDOW: Final = 20  # requests; with fewer there is no p99, and no usual length of a stage
MIN_LIKE: Final = 20  # like requests that one request is compared with
UNUSUAL_RANK: Final = 0.9  # of like requests are faster than one that is worth an explanation
# What like requests have in common, the closest first: by the detail of describe_request().
LIKENESS: Final = (
    (3, "same kind, prompt length and cached share"),
    (2, "same kind and prompt length"),
    (1, "same kind"),
)
MAX_UNCLOSED_SHARE: Final = 0.01  # of requests whose stages do not add up
MAX_UNATTRIBUTED: Final = 0.5  # share of the difference from which on no cause is named
MAIN_SHARE: Final = 0.8  # of a stage's difference, from which on it is one instance's
MAX_READ: Final = 50  # late requests whose spans are read for their holders, the longest first
MAX_HOLDERS: Final = 5


@dataclass(frozen=True, slots=True)
class ComparedRequests:
    """Who is explained, and by comparison with whom."""

    late: Sequence[RequestFacts]
    typical: Sequence[RequestFacts]
    window: Sequence[RequestFacts]
    #: In words, what the typical ones have in common with the late ones; "" of a window.
    likeness: str = ""
    #: Of a single request, the share of like requests that were faster; 1.0 of a window.
    rank: float = 1.0
    #: Of a single request, all of its time, itself among them; () of a window, whose own are all.
    around: Sequence[RequestFacts] = ()

    @property
    def everyone(self) -> Sequence[RequestFacts]:
        """The requests among which causes are looked for."""
        return self.around or self.window


def split_window(window: Sequence[RequestFacts], slo_us: int = 0) -> ComparedRequests:
    """The late requests, and the middle half of the others. Raises CannotTellError.

    slo_us: from which TTFT on a request is late; 0: the slowest hundredth, at least MIN_LATE.
    """
    check_window(window)
    ordered = sorted(window, key=lambda each: (each.ttft_us, each.trace_id))
    whole = count_requests(window)
    if slo_us:
        late = [each for each in ordered if each.ttft_us > slo_us]
        if not late:
            raise CannotTellError(
                f"none of {whole} requests took longer than {slo_us / 1000:g} ms; "
                "leave --slo out to explain the slowest hundredth"
            )
        if len(late) < MIN_LATE:
            names = ", ".join(each.request_id for each in late)
            raise CannotTellError(
                f"only {len(late)} of {whole} requests were late, {MIN_LATE} are needed to find what "
                f"they have in common; explain each by itself, with --request: {names}"
            )
    else:
        late = _take_slowest(ordered, max(MIN_LATE, round(LATE_SHARE * whole)))
    others = ordered[: len(ordered) - len(late)]
    if len(others) < MIN_WINDOW // 2:
        raise CannotTellError(
            f"{count_requests(late)} of {whole} requests were late: too few others to say what is "
            "usual. Compare with a better time: ttft-otel diff"
        )
    return ComparedRequests(late, take_middle(others), window)


def _take_slowest(ordered: list[RequestFacts], count: float) -> list[RequestFacts]:
    """The last ones of these, as many as stand for `count` requests."""
    first = len(ordered)
    while first and count > 0.5:
        first -= 1
        count -= ordered[first].weight
    return ordered[first:]


def choose_like(request: RequestFacts, window: Sequence[RequestFacts]) -> ComparedRequests:
    """One request, and the middle half of the most like requests. Raises CannotTellError."""
    # Not by its ID alone: some clients send the same one with every request.
    own = (request.trace_id, request.request_id, request.start_ns)
    others = [each for each in window if (each.trace_id, each.request_id, each.start_ns) != own]
    check_window([request, *others])
    for detail, words in LIKENESS:
        label = describe_request(request, detail)
        like = [each for each in others if describe_request(each, detail) == label]
        if len(like) >= MIN_LIKE:
            like.sort(key=lambda each: (each.ttft_us, each.trace_id))
            rank = sum(each.ttft_us < request.ttft_us for each in like) / len(like)
            around = [request, *others]
            return ComparedRequests([request], take_middle(like), like, words, rank, around)
    raise CannotTellError(
        f"only {len(like)} other requests of its kind ({request.kind}) are stored, {MIN_LIKE} are "
        f"needed to say what is usual; its stages: ttft-otel report --request {request.request_id}"
    )


def take_middle(ordered: Sequence[RequestFacts]) -> Sequence[RequestFacts]:
    """The middle half of requests that are sorted by TTFT."""
    return ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]


def check_window(window: Sequence[RequestFacts]) -> None:
    """Raise CannotTellError for a window with too few requests, or sums that are wrong."""
    if len(window) < MIN_WINDOW:
        raise CannotTellError(
            f"{len(window)} requests with a first token, {MIN_WINDOW} are needed to say what is usual; "
            "take a longer window"
        )
    unclosed = [each for each in window if not each.closed]
    if len(unclosed) > MAX_UNCLOSED_SHARE * len(window):
        raise CannotTellError(
            f"in {len(unclosed)} of {len(window)} requests the stages do not add up to the TTFT, for "
            f"example in {unclosed[0].request_id}: an explanation would be wrong. "
            "`ttft-otel doctor --url` says which measurement is missing"
        )


def compute_ttft(window: Sequence[RequestFacts], share: float) -> float:
    """A percentile of the window's TTFT, microseconds."""
    (found,) = compute_weighted_quantiles(
        [each.ttft_us for each in window], [each.weight for each in window], (share,)
    )
    return found


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


def divide_difference(compared: ComparedRequests) -> LateDifference:
    """Compare both sides. Raises CannotTellError where nothing can be named."""
    late, typical = compared.late, compared.typical
    names = sorted(
        {name for each in (*late, *typical) for name in each.stages}, key=stages.rank_stage
    )
    chance = numpy.random.default_rng(0)  # the same requests give the same intervals
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


@dataclass(frozen=True, slots=True)
class HoldingWork:
    """What the engine did while the late requests waited."""

    kinds: Mapping[str, float]  #: shares of that time, together 1
    holders: tuple[StoredHolder, ...]  #: the largest are first
    requests: int  #: late requests whose spans were read for `holders`


def read_holding(opened: BreakdownSource, late: Sequence[RequestFacts]) -> HoldingWork | None:
    """Who held the late requests; None where their servers do not tell. Raises StoreError."""
    sums = Counter[str]()
    for each in late:
        sums.update(each.held)
    if not (total := sums.total()):
        return None
    longest = sorted(late, key=lambda each: -sum(each.held.values()))[:MAX_READ]
    found: list[StoredHolder] = []
    for each in longest:
        trace = opened.find_trace(each.trace_id)
        # A client's trace may have many requests: only the queues of this one.
        spans = [span for span in (trace.spans if trace else ()) if span.parent_id in each.legs]
        # It was held once, in whichever of its legs.
        held = _join_holders(holder for span in spans for holder in list_holders(span))
        found += [structs.replace(holder, delayed=1) for holder in held]
    kinds = {kind: us / total for kind, us in sums.most_common()}
    return HoldingWork(kinds, _join_holders(found)[:MAX_HOLDERS], len(longest))


def list_holders(span: StoredSpan) -> list[StoredHolder]:
    """The holders that a queue's span names; [] for others, and for text that is not ours."""
    return read_holders(span.attributes) if span.scope == span_names.SCOPE else []


def _join_holders(found: Iterable[StoredHolder]) -> tuple[StoredHolder, ...]:
    """Each holder once, with the sum of its times, the longest first."""
    joined: dict[tuple[str, str, str], StoredHolder] = {}
    for each in found:
        key = (each.trace_id, each.request_id, each.kind)
        known = joined.get(key)
        joined[key] = (
            each
            if known is None
            else structs.replace(
                known,
                us=known.us + each.us,
                tokens=max(known.tokens, each.tokens),
                delayed=known.delayed + 1,
            )
        )
    return tuple(sorted(joined.values(), key=lambda each: (-each.us, each.request_id)))
