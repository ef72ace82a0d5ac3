# SPDX-License-Identifier: Apache-2.0
"""Choose the cause among the candidates: the one that survives and explains most, else "not known". Pure.

Input: a LateCase and what the detectors found in it. Output: a Cause, for explanation.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy

from ttft_otel.explain import cause_kinds
from ttft_otel.explain.explain.late_case import Candidate, LateCase, is_outlier
from ttft_otel.explain.window.request_facts import LostRequests, count_requests, count_values
from ttft_otel.report.show.terminal import format_short

HIGH, MEDIUM, LOW = "high", "medium", "low"
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


@dataclass(frozen=True, slots=True)
class Cause:
    """What is concluded: one candidate, or one of `nothing`, `not_known` and `lost_requests`."""

    kind: str
    sentence: str
    confidence: str
    chosen: Candidate | None = None


def choose_cause(
    case: LateCase, candidates: Sequence[Candidate], lost: LostRequests | None = None
) -> Cause:
    whole = count_requests(case.table.requests) + (lost.total if lost else 0)
    if lost is not None and lost.total > MAX_LOST_SHARE * whole:
        return Cause(
            cause_kinds.LOST_REQUESTS,
            f"{lost.total} of {whole} requests ended without a first token; the others say little",
            HIGH,
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
        Cause(chosen.kind, chosen.sentence, _rate_cause(case, chosen), chosen)
        if chosen is not None
        else Cause(cause_kinds.NOT_KNOWN, "nothing that was looked at explains most of it", LOW)
    )
    if found.kind in OF_MODELS and (other := _find_other_model(case)):
        # Its steps may always take longer: that is no cause, and nothing makes it the other one.
        return Cause(
            cause_kinds.NOT_KNOWN,
            confidence=LOW,
            sentence="two models are compared, not late and typical requests of one; take each by itself: "
            f"--model {other}",
        )
    is_ordinary = found.kind in ORDINARY and not case.is_single
    if is_ordinary and (healthy := describe_health(case, found.kind)):
        if few := _describe_extremes(case):
            return Cause(cause_kinds.NOT_KNOWN, few, LOW)
        return Cause(cause_kinds.NOTHING, healthy, MEDIUM if case.before is None else HIGH)
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
