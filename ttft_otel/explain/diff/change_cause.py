# SPDX-License-Identifier: Apache-2.0
"""Why B is later than A: one cause, by what only two windows tell and by the detectors of `explain`. Pure.

Input: what was read of A and of B. Output: a ChangeAnswer, which
difference_text.py shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy

from ttft_otel.explain import cause_kinds
from ttft_otel.explain.diff.stage_difference import Difference, compare_windows
from ttft_otel.explain.explain.cause_detectors import MIN_BLOCKS, SHARED_DETECTORS
from ttft_otel.explain.explain.explanation import (
    MAX_LOST_SHARE,
    NOT_EXPLAINED,
    Bursts,
    find_bursts,
)
from ttft_otel.explain.explain.late_case import HIGH, LOW, MEDIUM, MIN_SHARE, Candidate, LateCase
from ttft_otel.explain.explain.late_requests import (
    ComparedRequests,
    divide_difference,
    take_middle,
)
from ttft_otel.explain.explain.remedies import Remedy, find_remedy
from ttft_otel.explain.explain.window_pair import PAIR_DETECTORS, WindowFigure, WindowPair
from ttft_otel.explain.window.request_facts import (
    CannotTellError,
    LostRequests,
    RequestFacts,
    count_requests,
)
from ttft_otel.explain.window.window_reading import WindowReading
from ttft_otel.model.statistics import compute_weighted_quantiles
from ttft_otel.report.report_types import MIN_LATE, Coverage
from ttft_otel.report.show.terminal import format_short

MIN_CHANGE: Final = 0.02  # of the mean TTFT; less is no headline
LATE_RANKS: Final = (0.95, 0.99)  # of A; how many of B are later
MIN_MIX: Final = 0.1  # of the change, for certain, that other requests have where nothing has more
LOST_RANKS: Final = (0.5, 0.95)  # of the TTFT, that are told with the requests without one
# Of two that hold, the one that brings the other about is first.
ORDER: Final = (
    cause_kinds.FAILED_ATTEMPTS,
    cause_kinds.LOST_INSTANCE,
    cause_kinds.SLOW_FLEET,
    cause_kinds.SLOW_INSTANCE,
    cause_kinds.COLD_PREFIX_CACHE,
    cause_kinds.INSTANCE_SHIFT,
    cause_kinds.PROCESS_PAUSE,
)
LAST: Final = (cause_kinds.LOAD_INCREASE, cause_kinds.SETTING_LIMIT)


@dataclass(frozen=True, slots=True)
class ChangeAnswer:
    """Why B is later than A, and by how much."""

    cause: Candidate
    difference: Difference
    outcomes: Sequence[WindowFigure]  #: of the requests themselves
    #: when B had requests that would have been among A's slowest; None without
    bursts: Bursts | None
    coverage: tuple[Coverage, Coverage]
    lost: tuple[LostRequests, LostRequests]  #: without a first token, of A and of B

    @property
    def remedy(self) -> Remedy | None:
        """What to do; None where no cause is known."""
        return find_remedy(self.cause)


def compare_sides(a: WindowReading, b: WindowReading) -> ChangeAnswer:
    """Compare them. Raises CannotTellError, which also says who has no first token."""
    try:
        found = compare_windows(a.requests, b.requests)
    except CannotTellError as error:
        lost = " ".join(
            f"In {name} {side.lost.sentence}."
            for name, side in (("A", a), ("B", b))
            if side.lost.total
        )
        raise CannotTellError(f"{error}. {lost}" if lost else str(error)) from error
    pair = WindowPair(a.requests, b.requests)
    cause = find_change_cause(pair, b)
    limit = pair.find_rank(LATE_RANKS[-1])
    late = [each for each in b.requests if each.ttft_us > limit]
    is_quiet = cause.kind == cause_kinds.NOTHING or not late
    return ChangeAnswer(
        cause,
        found,
        pair.outcomes,
        None if is_quiet else find_bursts(late, b.requests),
        (a.coverage, b.coverage),
        (a.lost, b.lost),
    )


def find_change_cause(pair: WindowPair, b: WindowReading) -> Candidate:
    """The cause; `nothing` where B is no later than A."""
    if b.lost_share > MAX_LOST_SHARE:
        return Candidate(cause_kinds.LOST_REQUESTS, _describe_loss(b), confidence=HIGH)
    if not _is_later(pair):
        then, after = (pair.average(pair.table.ttft, side) for side in (~pair.now, pair.now))
        return Candidate(
            cause_kinds.NOTHING,
            f"B is no later than A beyond chance: mean {format_short(then)} and {format_short(after)}",
            confidence=MEDIUM,
        )
    candidates = [each for detect in PAIR_DETECTORS for each in detect(pair)]
    candidates += _ask_detectors(pair)
    chosen = min((each for each in candidates if each.holds), key=_rank, default=None)
    if chosen is None and any(each.is_notable for each in pair.outcomes if each.is_share):
        # Less than half of the change, and there from the clients' side: told, without confidence.
        mix = [each for each in candidates if each.kind == cause_kinds.MIX_CHANGE]
        chosen = next((each for each in mix if each.low >= MIN_MIX), None)
    if chosen is None:
        return NOT_EXPLAINED
    confidence = HIGH if chosen.low >= MIN_SHARE else MEDIUM if chosen.holds else LOW
    return replace(chosen, confidence=confidence)


def _describe_loss(b: WindowReading) -> str:
    """How many are lost, and what percentiles are at least: they waited so long, and longer."""
    lost = b.lost
    weight = lost.total / max(len(lost.lengths_us), 1)
    lengths = [each.ttft_us for each in b.requests] + list(lost.lengths_us)
    weights = [each.weight for each in b.requests] + [weight] * len(lost.lengths_us)
    p50, p95 = (
        format_short(each) for each in compute_weighted_quantiles(lengths, weights, LOST_RANKS)
    )
    whole = lost.total + count_requests(b.requests)
    return (
        f"{lost.total} of B's {whole} requests ended without a first token; with them p50 is at least "
        f"{p50}, p95 at least {p95}"
    )


def _rank(candidate: Candidate) -> tuple[int, float]:
    if candidate.kind in LAST:
        return len(ORDER) + 1 + LAST.index(candidate.kind), -candidate.share
    place = ORDER.index(candidate.kind) if candidate.kind in ORDER else len(ORDER)
    return place, -candidate.share


def _is_later(pair: WindowPair) -> bool:
    """Whether the mean, or how many are later than most of A, is up by more than pieces of time vary."""
    table, alike = pair.table, numpy.zeros(len(pair.table), numpy.int64)
    mean = table.contrast(table.ttft, pair.now, alike)
    if mean.low > 0 and mean.value > MIN_CHANGE * mean.others:
        return True
    for rank in LATE_RANKS:
        late = table.contrast((table.ttft > pair.find_rank(rank)).astype(float), pair.now, alike)
        if late.low > 0 and late.value > 1 - rank:
            return True
    return False


def _ask_detectors(pair: WindowPair) -> Iterator[Candidate]:
    """What the detectors of `explain` say: of all of B against A, and of B's slowest against the others."""
    before, now = pair.sides
    known = {each.instance for each in before}
    limit = pair.find_rank(LATE_RANKS[-1])
    late = [each for each in now if each.ttft_us > limit]
    others = sorted((each for each in now if each.ttft_us <= limit), key=lambda each: each.ttft_us)
    comparisons: list[tuple[Sequence[RequestFacts], ...]] = [(now, before, [*before, *now])]
    if len(late) >= MIN_LATE and len(others) >= len(now) // 2:
        comparisons.append((late, take_middle(others), now))
    for slow, typical, everyone in comparisons:
        try:
            difference = divide_difference(ComparedRequests(slow, typical, everyone))
        except CannotTellError:
            continue
        case = LateCase(difference, everyone, before)
        if everyone is not now:
            case.table = pair.table
        for each in (found for detect in SHARED_DETECTORS for found in detect(case)):
            # Slower than others, as it was before, is not what changed.
            is_old = each.kind == cause_kinds.SLOW_INSTANCE and each.subject in known
            # One stop may be anything.
            is_rare = each.figures.get("pauses", MIN_BLOCKS) < MIN_BLOCKS
            if not is_old and not is_rare:
                yield each
