# SPDX-License-Identifier: Apache-2.0
"""Put an explanation together: which stage, which cause, how sure, when, and what to change. Pure.

Input: ComparedRequests. Output: Explanation, whose sentences have their numbers from the data;
window_answer.py has it in words. The cause is the candidate that survives and explains
most, else "not known".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy

from ttft_otel.explain.explain import cause_kinds
from ttft_otel.explain.explain.cause_detectors import DETECTORS
from ttft_otel.explain.explain.cause_kinds import Remedy, find_remedy
from ttft_otel.explain.explain.late_case import HIGH, LOW, MEDIUM, Candidate, LateCase, is_outlier
from ttft_otel.explain.explain.late_requests import (
    UNUSUAL_RANK,
    ComparedRequests,
    HoldingWork,
    LateDifference,
    StagePart,
    compute_ttft,
    divide_difference,
)
from ttft_otel.explain.whatif.what_if import TTFT, Prediction
from ttft_otel.explain.window.request_facts import (
    LostRequests,
    RequestFacts,
    count_requests,
    count_values,
)
from ttft_otel.model.stages import WAIT_REASONS
from ttft_otel.report.report_types import Coverage
from ttft_otel.report.show.terminal import format_short, to_local_time

# Draws of the bootstrap in which the largest stage is the largest one.
CONFIDENCE: Final = ((0.95, HIGH), (0.8, MEDIUM), (0.0, LOW))
NOTABLE_SHARE: Final = 0.1  # of a stage, from which on a reason is told
MIN_NAMED_SHARE: Final = 0.3  # of the difference, that the largest stage has at least
MAX_EXAMPLES: Final = 3
MAX_LINES: Final = 6  # of an answer, without --verbose
MIN_GAIN: Final = 0.02  # of the p99, below which a remedy moves nothing
BURST_GAP: Final = 0.02  # of the window's time without a late request, which ends a burst
MAX_LOST_SHARE: Final = 0.05  # of a window's requests; with more, those that are left say little
SURE_LATE: Final = 10  # late requests that a high confidence needs
SURE_BLOCKS: Final = 5  # separate pieces of time, likewise
USUAL_RATIO: Final = 4.0  # of late to typical requests, up to which size and chance are no incident
OTHER_MODEL_SHARE: Final = 0.5  # more of the late than of all requests: two models are compared
EXTREME: Final = 2.0  # of the slowest request of the time before
SAME_AS_BEFORE: Final = 1.25  # of a percentile to that of the window before
# What every window has a little of: no cause, where late requests are as late as usual.
ORDINARY: Final = frozenset(
    {
        cause_kinds.OWN_SIZE,
        cause_kinds.HELD_BY_LONG_PROMPTS,
        cause_kinds.LOAD_INCREASE,
        cause_kinds.SETTING_LIMIT,
        cause_kinds.COLD_PREFIX_CACHE,
        cause_kinds.NOT_KNOWN,
    }
)
# What the larger steps of another model look like.
OF_MODELS: Final = frozenset({cause_kinds.NOT_KNOWN, cause_kinds.OWN_SIZE})
ODD_WEIGHT: Final = 2.0  # of the share of a fault, beside what every window has
# A limit is reached because something takes long, or much comes, and other requests do what they do by some
# cause: what explains that goes first.
LAST: Final = frozenset({cause_kinds.SETTING_LIMIT, cause_kinds.MIX_CHANGE})
NOT_EXPLAINED: Final = Candidate(
    cause_kinds.NOT_KNOWN, "nothing that was looked at explains most of it", confidence=LOW
)


@dataclass(frozen=True, slots=True)
class Bursts:
    """When late requests began; Unix nanoseconds."""

    count: int
    first_ns: int
    last_ns: int

    @property
    def sentence(self) -> str:
        first, last = (f"{to_local_time(each):%H:%M:%S}" for each in (self.first_ns, self.last_ns))
        if self.count == 1:
            return f"When: all of them from {first} to {last}."
        every = format_short((self.last_ns - self.first_ns) / 1000 / (self.count - 1))
        return f"When: in {self.count} bursts, one in {every}, from {first} to {last}."


@dataclass(frozen=True, slots=True)
class Explanation:
    difference: LateDifference
    cause: Candidate
    stage_confidence: str
    candidates: tuple[Candidate, ...]  #: what was looked at, the largest share first
    examples: tuple[RequestFacts, ...]  #: late requests with most time in the largest stage
    is_unusual: bool  #: False for a request that took as long as its like, which has no cause
    slo_us: int
    #: Lateness in microseconds by stage, largest first; empty without an objective.
    slo: Mapping[str, float]
    p50_us: float
    p99_us: float
    bursts: Bursts
    holding: HoldingWork | None = None  #: who held them, for a stage that waits
    #: What the remedy would bring, where what-if has a model of it.
    prediction: Prediction | None = None
    setting: str = ""  #: with which that is, in words
    no_prediction: str = ""  #: why that is not known
    #: of the window, without a first token
    lost: LostRequests = field(default_factory=LostRequests)
    #: What was read of the window; None of a single request.
    coverage: Coverage | None = None

    @property
    def top(self) -> StagePart:
        """The stage with most of the difference."""
        return self.difference.parts[0]

    @property
    def remedy(self) -> Remedy | None:
        """What to do; None where no cause is known, or the remedy was tried and moves nothing."""
        if self.prediction is not None:
            p99 = self.prediction.figures[TTFT][-1]
            # By no more than the prediction's interval.
            if p99.high >= (1 - MIN_GAIN) * p99.recorded:
                return None
        return find_remedy(self.cause.kind, self.cause.subject) if self.is_unusual else None


def explain_requests(
    compared: ComparedRequests,
    slo_us: int = 0,
    lost: LostRequests | None = None,
    before: Sequence[RequestFacts] = (),
) -> Explanation:
    """Explain the late side of `compared`. Raises CannotTellError.

    lost: requests of the window without a first token. before: the requests of the time before, if there
    are any.
    """
    difference = divide_difference(compared)
    stage = difference.stage
    case = LateCase(difference, compared.everyone, before)
    candidates = [each for detect in DETECTORS for each in detect(case)]
    candidates.sort(key=lambda each: (bool(each.refuted), -each.share))
    examples = sorted(compared.late, key=lambda each: -each.stages.get(stage, 0))
    return Explanation(
        difference=difference,
        cause=choose_cause(case, candidates, lost),
        stage_confidence=_rate_stage(difference),
        candidates=tuple(candidates),
        examples=tuple(examples[:MAX_EXAMPLES]),
        is_unusual=compared.rank >= UNUSUAL_RANK,
        slo_us=slo_us,
        slo=divide_lateness(compared, slo_us) if slo_us else {},
        p50_us=compute_ttft(compared.window, 0.5),
        p99_us=compute_ttft(compared.window, 0.99),
        bursts=find_bursts(compared.late, compared.everyone),
        lost=lost or LostRequests(),
    )


def choose_cause(
    case: LateCase, candidates: Sequence[Candidate], lost: LostRequests | None = None
) -> Candidate:
    """The candidate that survives and explains most, else one of NO_CAUSES."""
    whole = count_requests(case.table.requests) + (lost.total if lost else 0)
    if lost is not None and lost.total > MAX_LOST_SHARE * whole:
        return Candidate(
            cause_kinds.LOST_REQUESTS,
            f"{lost.total} of {whole} requests ended without a first token; the others say little",
            confidence=HIGH,
        )
    surviving = [each for each in candidates if each.holds]
    stopped = {each.subject for each in surviving if each.kind == cause_kinds.PROCESS_PAUSE}
    # The way to a process that does not run is long, too.
    surviving = [
        each
        for each in surviving
        if not (each.kind == cause_kinds.SLOW_HOP and each.subject in stopped)
    ]
    # A fault explains less of the lateness than all that made it worse: size, load, chance.
    chosen = max(
        surviving,
        key=lambda each: (each.kind not in LAST, each.share * (ODD_WEIGHT if each.is_odd else 1.0)),
        default=None,
    )
    found = (
        replace(chosen, confidence=_rate_cause(case, chosen))
        if chosen is not None
        else NOT_EXPLAINED
    )
    if found.kind in OF_MODELS and (other := _find_other_model(case)):
        # Its steps may always take longer: that is no cause, and nothing makes it the other one.
        return Candidate(
            cause_kinds.NOT_KNOWN,
            confidence=LOW,
            sentence="two models are compared, not late and typical requests of one; take each by itself: "
            f"--model {other}",
        )
    is_ordinary = found.kind in ORDINARY and not case.is_single
    if is_ordinary and (healthy := describe_health(case, found.kind)):
        if few := _describe_extremes(case):
            return Candidate(cause_kinds.NOT_KNOWN, few, confidence=LOW)
        confidence = MEDIUM if case.before is None else HIGH
        return Candidate(cause_kinds.NOTHING, healthy, confidence=confidence)
    return found


def _describe_extremes(case: LateCase) -> str:
    """Single requests later than any before, which percentiles do not show, as a sentence; "" without."""
    if case.before is None:
        return ""
    longest = float(case.before.ttft.max())
    beyond = case.table.ttft > EXTREME * longest
    if not beyond.any():
        return ""
    return (
        f"{beyond.sum()} requests took more than {EXTREME:g} times as long as any in the time before "
        f"({format_short(longest)}), too few to tell why; the others are as usual"
    )


def _find_other_model(case: LateCase) -> str:
    """The model that most late requests are for, and few others; "" without one."""
    late, whole = (
        count_values(side, lambda each: each.model)
        for side in (case.difference.compared.late, case.table.requests)
    )
    name, count = next(iter(late.items()))
    shares = count / sum(late.values()), whole[name] / sum(whole.values())
    is_other = shares[0] - shares[1] >= OTHER_MODEL_SHARE
    return (name or "NAME") if is_other else ""


def _rate_cause(case: LateCase, chosen: Candidate) -> str:
    if case.is_single:
        return MEDIUM if chosen.low >= 0.5 else LOW
    late = int(case.late.sum())
    if chosen.low >= 0.5 and late >= SURE_LATE and chosen.blocks >= SURE_BLOCKS:
        return HIGH
    return MEDIUM if chosen.low >= 0.25 else LOW


def describe_health(case: LateCase, kind: str = "") -> str:
    """Why the window is as usual, as a sentence; "" where it is not. kind: of the cause that was found."""
    table = case.table
    share = 1 - float(numpy.average(case.late, weights=table.weights))
    shares = (0.5, max(share, 0.5))
    if case.before is not None:
        pairs = [
            tuple(side.find_quantile(side.ttft, each) for side in (case.before, table))
            for each in shares
        ]
        if all(now <= SAME_AS_BEFORE * max(then, 1.0) for then, now in pairs):
            then, now = pairs[-1]
            return f"late requests took {now / 1000:.0f} ms or more, {then / 1000:.0f} ms in the time before"
        return ""
    late, typical = (float(numpy.mean(table.ttft[side])) for side in (case.late, case.typical))
    if late <= USUAL_RATIO * typical:
        return (
            f"the slowest took {late / typical:.1f} times as long as typical ones, as in any window"
        )
    if kind == cause_kinds.OWN_SIZE and is_outlier(table.tokens)[case.late].mean() < 0.5:
        return "the slowest are the largest, of sizes that vary as much as theirs"
    return ""


def _rate_stage(difference: LateDifference) -> str:
    top, late = difference.parts[0], len(difference.compared.late)
    if top.share < MIN_NAMED_SHARE or top.low <= 0:
        return LOW
    found = next(word for share, word in CONFIDENCE if difference.first_share >= share)
    # An interval that nearly reaches 0 rests on a few requests, however often they are drawn.
    is_sure = top.low >= MIN_NAMED_SHARE and (late >= SURE_LATE or late == 1)
    return MEDIUM if found == HIGH and not is_sure else found


def find_bursts(late: Iterable[RequestFacts], everyone: Iterable[RequestFacts]) -> Bursts:
    """When the late requests began: how many bursts, and from when to when."""
    starts = sorted(each.start_ns for each in late)
    times = [each.start_ns for each in everyone]
    gap = BURST_GAP * (max(times) - min(times))
    pairs = zip(starts, starts[1:], strict=False)
    return Bursts(1 + sum(after - before > gap for before, after in pairs), starts[0], starts[-1])


def divide_lateness(compared: ComparedRequests, slo_us: int) -> dict[str, float]:
    """The time beyond the objective by stage, over all late requests; the parts add up to it.

    A request's lateness is divided among the stages in proportion to what each took longer than in typical
    requests: a stage that is as long as usual has not made it late.
    """
    names = {name for each in compared.late for name in each.stages}
    usual = {
        name: sum(each.stages.get(name, 0) for each in compared.typical) / len(compared.typical)
        for name in names
    }
    eaten = dict.fromkeys(names, 0.0)
    for each in compared.late:
        excess = {name: max(0.0, each.stages.get(name, 0) - usual[name]) for name in names}
        # Never 0: a late request is longer than the typical ones, which were in time.
        whole = sum(excess.values())
        for name, value in excess.items():
            eaten[name] += each.weight * (each.ttft_us - slo_us) * value / whole
    found = [(name, us) for name, us in eaten.items() if us > 0]
    return dict(sorted(found, key=lambda part: (-part[1], part[0])))


def describe_reasons(reasons: Sequence[tuple[str, float]]) -> str:
    """The reasons that have a tenth or more, as words; "" without any."""
    shown = [(reason, share) for reason, share in reasons if share >= NOTABLE_SHARE]
    return ", ".join(f"{reason} ({share:.0%})" for reason, share in shown if reason in WAIT_REASONS)


def describe_shares(each: Candidate | StagePart) -> dict[str, float]:
    """Of the lateness, or of the change, that it accounts for."""
    return {name: round(getattr(each, name), 4) for name in ("share", "low", "high")}
