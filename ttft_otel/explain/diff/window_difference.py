# SPDX-License-Identifier: Apache-2.0
"""What changed between two windows of requests, and whether that is more than was asked for.

Input: RequestFacts of windows A and B. Output: a Difference, whose parts (the mix of requests, and each stage
of like requests) add up to the change of the mean TTFT; `ttft-otel diff` shows it. Pure; needs numpy.

With strata s, shares p and means m of a stage:  m_B - m_A = Σ p_B(s) (m_B(s) - m_A(s))  [like requests]
+ Σ (p_B(s) - p_A(s)) m_A(s)  [mix], the Oaxaca-Blinder decomposition. Intervals are a bootstrap by
request; they hold for all parts at once (the largest of the studentized deviations, Romano and Wolf),
so that a window compared with itself rarely names anything.

`--fail-if` is for releases: of conditions as typed, Verdicts, which the commands turn into an exit code,
text, JSON, Markdown and JUnit. A verdict follows the interval of the change and not its point: worse is what
lies above the threshold with all of its interval, as asked what lies below it with all of it. Requests that
follow one another wait in the same queues, so that the bootstrap draws blocks of them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from xml.etree import ElementTree

import numpy

from ttft_otel.explain.window.request_facts import (
    MEDIA,
    TEXT,
    UNMATCHED,
    CannotTellError,
    RequestFacts,
    assign_strata,
)
from ttft_otel.model import stages
from ttft_otel.model.statistics import (
    average_draws,
    draw_quantiles,
    draw_weights,
    find_interval,
    find_joint_intervals,
    find_start,
)

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

# With fewer a bootstrap draws the same few values again and its intervals are too narrow.
MIN_REQUESTS: Final = 20  # of a window
# Enough for the 97 % quantile: some 30 draws lie beyond it.
RESAMPLES: Final = 1000
# Of all intervals together; a bootstrap of skewed times falls short of its level.
LEVEL: Final = 0.97
MIX: Final = "mix of requests"
MAIN_SHARE: Final = 0.8  # of a change, from which on it is said to be one kind's
CONDITION: Final = re.compile(
    r"\s*(?P<figure>\S+)\.(?P<statistic>mean|p\d{1,2})"
    r"\s*>\s*(?P<size>[+-]?\d+(?:\.\d+)?)\s*(?P<unit>%|us|µs|ms|s)\s*"
)
US_PER_UNIT: Final = {"us": 1, "µs": 1, "ms": 1000, "s": 1_000_000}
AS_ASKED, WORSE, UNKNOWN = "as asked", "worse", "cannot tell"
EXIT_CODES: Final = {AS_ASKED: 0, WORSE: 1, UNKNOWN: 2}
MIN_BEYOND: Final = 5  # requests beyond a percentile, with fewer its bootstrap draws the same few
MIN_BLOCKS: Final = 20  # of a window; also the fewest requests of one, MIN_REQUESTS
MAX_LOST: Final = 0.01  # share of a window without a first token, of whose TTFT nothing is known
DRAWS_AT_ONCE: Final = 50  # bounds the memory of a percentile's draws


@dataclass(frozen=True, slots=True)
class Change:
    """B minus A of one mean, in microseconds, with its interval."""

    name: str
    a_us: float
    b_us: float
    change_us: float
    low_us: float
    high_us: float
    #: Of request that has most of the change although not most of the requests, "" without.
    kind: str = ""
    since_ns: int = 0  #: when it began inside of B, 0 when from its start on

    @property
    def named(self) -> bool:
        """Whether the change is more than chance makes."""
        return bool(self.low_us > 0 or self.high_us < 0)


@dataclass(frozen=True, slots=True)
class Difference:
    """Two windows compared. mix and stages add up to ttft."""

    requests_a: int
    requests_b: int
    ttft: Change
    p50: Change  #: of the TTFT, not adjusted
    p95: Change  #: likewise
    mix: Change
    stages: tuple[Change, ...]  #: changes of like requests, in the order of a request
    unmatched_share: float  #: of B's requests of a kind that A has too few of; they count as mix
    shared: int = 0  #: requests that are in both windows
    clock_error_us: int = 0  #: by how much the boundaries of stages may be off

    @property
    def named(self) -> list[Change]:
        """Mix and stages that changed, the largest first."""
        found = [change for change in (self.mix, *self.stages) if change.named]
        return sorted(found, key=lambda change: -abs(change.change_us))


@dataclass(frozen=True, slots=True)
class Window:
    """One window's requests: microseconds by request and stage, and each request's stratum."""

    lengths: Array
    strata: Sequence[Hashable]
    weights: Array  #: how many requests each stands for

    @property
    def means(self) -> Array:
        found: Array = numpy.average(self.lengths, axis=0, weights=self.weights)
        return found

    def sum_strata(self, weights: Array, keys: Sequence[Hashable]) -> tuple[Array, Array]:
        """Shares (draw, stratum) and means (draw, stratum, stage) with `weights` (draw, request)."""
        shares, means = [], []
        for key in keys:
            # Strata are fixed, weights vary: a matrix product does all draws of a stratum at once.
            here = numpy.array([stratum == key for stratum in self.strata])
            weight = weights[:, here].sum(1)
            # A draw may miss a small stratum; its mean is then that of the data.
            total = weights[:, here] @ self.lengths[here]
            own = self.weights[here]
            fallback = own @ self.lengths[here] / own.sum() if here.any() else 0.0
            drawn = weight[:, None] > 0
            means.append(numpy.where(drawn, total / numpy.maximum(weight, 1)[:, None], fallback))
            shares.append(weight / weights.sum(1))
        return numpy.stack(shares, 1), numpy.stack(means, 1)


def compare_windows(
    a: Sequence[RequestFacts], b: Sequence[RequestFacts], seed: int = 0
) -> Difference:
    """Compare the requests of two windows. Raises CannotTellError.

    seed: of the bootstrap; the same requests and seed give the same intervals.
    """
    for name, window in (("A", a), ("B", b)):
        # Refused, not answered with wide intervals: "nothing changed" would be read as good news.
        if len(window) < MIN_REQUESTS:
            raise CannotTellError(
                f"window {name} has {len(window)} requests with a first token; "
                f"{MIN_REQUESTS} are needed to tell a change from chance"
            )
    # Of both windows: a stage that only one has is a change, too.
    names = sorted({name for each in (*a, *b) for name in each.stages}, key=stages.rank_stage)
    # Once, on the data: draws reweight the requests and do not sort them anew.
    strata_a, strata_b = assign_strata(a, b)
    window_a, window_b = _build_window(a, names, strata_a), _build_window(b, names, strata_b)
    chance = numpy.random.default_rng(seed)
    # Each window is drawn by itself: they are independent samples, not pairs.
    weights_a, weights_b = (
        draw_weights(chance, len(window.weights), RESAMPLES) * window.weights
        for window in (window_a, window_b)
    )
    like, mix = _decompose(window_a, window_b, weights_a, weights_b)
    ttft = like.sum(1) + mix
    # Together, because an interval holds for all parts at once only if all share one width.
    parts = numpy.column_stack([like, mix, ttft])
    low, high = find_joint_intervals(parts, LEVEL)
    means_a, means_b = ([*window.means, window.means.sum()] for window in (window_a, window_b))
    changes = []
    for index, name in enumerate(names):
        change = Change(
            name, means_a[index], means_b[index], parts[0, index], low[index], high[index]
        )
        changes.append(_locate_change(change, window_a, window_b, b, index))
    totals_a, totals_b = window_a.lengths.sum(1), window_b.lengths.sum(1)
    return Difference(
        requests_a=round(window_a.weights.sum()),
        requests_b=round(window_b.weights.sum()),
        ttft=Change("ttft", means_a[-1], means_b[-1], parts[0, -1], low[-1], high[-1]),
        p50=_compare_quantile("p50", 0.5, totals_a, totals_b, weights_a, weights_b),
        p95=_compare_quantile("p95", 0.95, totals_a, totals_b, weights_a, weights_b),
        mix=Change(MIX, 0.0, parts[0, -2], parts[0, -2], low[-2], high[-2]),
        stages=tuple(changes),
        unmatched_share=float(
            numpy.average([key == UNMATCHED for key in strata_b], weights=window_b.weights)
        ),
        clock_error_us=max(each.clock_error_us for each in (*a, *b)),
        shared=_count_shared(a, b),
    )


def _build_window(
    requests: Sequence[RequestFacts], names: Sequence[str], strata: Sequence[Hashable]
) -> Window:
    rows = [[each.stages.get(name, 0) for name in names] for each in requests]
    weights = numpy.array([each.weight for each in requests])
    return Window(numpy.array(rows, dtype=numpy.float64), strata, weights)


def _count_shared(a: Sequence[RequestFacts], b: Sequence[RequestFacts]) -> int:
    """How many requests are in both windows, whichever of them were read; 0 for windows that only touch."""
    known = {(each.request_id, each.start_ns) for each in a}
    if not any((each.request_id, each.start_ns) in known for each in b):
        return 0
    first, last = (find(each.start_ns for each in b) for find in (min, max))
    return round(sum(each.weight for each in a if first <= each.start_ns <= last))


def _decompose(a: Window, b: Window, weights_a: Array, weights_b: Array) -> tuple[Array, Array]:
    """Change of like requests (draw, stage) and of the mix (draw), microseconds."""
    keys = sorted({*a.strata, *b.strata} - {UNMATCHED}, key=str)
    overall_a = average_draws(a.lengths, weights_a)
    overall_b = average_draws(b.lengths, weights_b)
    # Without a common stratum nothing is alike, and all of the change is mix.
    like = numpy.zeros_like(overall_a)
    if keys:
        _, means_a = a.sum_strata(weights_a, keys)
        shares_b, means_b = b.sum_strata(weights_b, keys)
        like = (shares_b[:, :, None] * (means_b - means_a)).sum(1)
    # What is left of the change of the means is the mix, by the identity above.
    return like, (overall_b - overall_a - like).sum(1)


def _compare_quantile(
    name: str, share: float, a: Array, b: Array, weights_a: Array, weights_b: Array
) -> Change:
    """B minus A of the TTFT's quantile `share`, with the bootstrap's percentiles as the interval."""
    drawn_a, drawn_b = draw_quantiles(a, weights_a, share), draw_quantiles(b, weights_b, share)
    low, high = find_interval((drawn_b - drawn_a)[1:], LEVEL)
    return Change(name, drawn_a[0], drawn_b[0], drawn_b[0] - drawn_a[0], float(low), float(high))


def _locate_change(
    change: Change, a: Window, b: Window, requests: Sequence[RequestFacts], stage: int
) -> Change:
    """Add to a named change whose requests have it, and since when."""
    # Where chance explains the change, whose it is would be chance as well.
    if not change.named:
        return change
    expected = {}
    for key in set(a.strata):
        here = numpy.array([stratum == key for stratum in a.strata])
        expected[key] = numpy.average(a.lengths[here, stage], weights=a.weights[here])
    # The unmatched have no like in A to be expected from: they count as mix, not here.
    matched = [index for index, key in enumerate(b.strata) if key != UNMATCHED]
    excess = [b.lengths[index, stage] - expected[b.strata[index]] for index in matched]
    total = sum(b.weights[matched] * excess)
    kind = ""
    for each in (TEXT, MEDIA):
        own = b.weights[matched] * [requests[index].kind == each for index in matched]
        is_most = own @ excess / total >= MAIN_SHARE if total else False
        # A kind that is nearly all of the traffic has nearly every change: that says nothing.
        if is_most and own.sum() / b.weights[matched].sum() < MAIN_SHARE:
            kind = each
    timed = [
        (requests[index].start_ns, value, requests[index].weight)
        for index, value in zip(matched, excess, strict=True)
        if not kind or requests[index].kind == kind
    ]
    return replace(change, kind=kind, since_ns=find_start(timed))


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition as typed: `ttft.p95 > +10%`, `prefill.queue.mean > +20ms`."""

    text: str
    figure: str  #: "ttft" or a stage
    share: float | None  #: of the percentile; None for the mean
    threshold: float  #: percent, or microseconds
    is_relative: bool  #: whether it is in percent of A


@dataclass(frozen=True, slots=True)
class Verdict:
    condition: Condition
    outcome: str  #: AS_ASKED, WORSE or UNKNOWN
    reason: str  #: one sentence with the figures, or why it cannot be told
    #: Microseconds in A and in B, then the change with its interval in the threshold's unit.
    figures: tuple[float, float, float, float, float] | None = None


def parse_condition(text: str) -> Condition:
    """Read a condition. Raises ValueError with a sentence."""
    found = CONDITION.fullmatch(text)
    if not found:
        raise ValueError(
            f"{text!r} is no condition: write 'ttft.p95 > +10%' or 'prefill.queue.mean > +20ms' "
            "(mean, or a percentile from p1 to p99; %, us, ms or s)"
        )
    statistic, unit = found["statistic"], found["unit"]
    share = None if statistic == "mean" else int(statistic[1:]) / 100
    if share == 0:
        raise ValueError(f"{text!r}: p0 is no percentile")
    size = float(found["size"]) * US_PER_UNIT.get(unit, 1)
    return Condition(text.strip(), found["figure"], share, size, unit == "%")


def judge_windows(
    conditions: Sequence[Condition],
    a: Sequence[RequestFacts],
    b: Sequence[RequestFacts],
    lost_shares: tuple[float, float] = (0.0, 0.0),
) -> list[Verdict]:
    """A verdict for each condition.

    lost_shares: of the requests of A and of B that have no first token, 0 to 1.
    """
    windows = [sorted(window, key=lambda each: each.start_ns) for window in (a, b)]
    return [_judge_condition(each, windows, lost_shares) for each in conditions]


def judge_comparison(
    conditions: Sequence[Condition], comparison: Mapping[str, Any] | None
) -> list[Verdict]:
    """A verdict for each condition on a comparison of `bench`, None where nothing was compared."""
    if comparison is None or not comparison["valid"]:
        return refuse_all(conditions, "there is no valid comparison")
    rows = {row["name"]: row for row in comparison["rows"]}
    return [_judge_row(each, rows) for each in conditions]


def _judge_row(condition: Condition, rows: Mapping[str, Mapping[str, Any]]) -> Verdict:
    share = condition.share
    name = f"{condition.figure} " + ("mean" if share is None else f"p{100 * share:g}")
    row = rows.get(name)
    if row is None:
        return Verdict(condition, UNKNOWN, f"there is no {name!r}, but {', '.join(rows)}")
    if row["low"] is None:
        return Verdict(condition, UNKNOWN, "an interval needs three rounds (--repeat)")
    threshold_ms = condition.threshold * (row["a"] / 100 if condition.is_relative else 0.001)
    change = f"{row['difference']:+.2f} ms ({row['low']:+.2f} to {row['high']:+.2f})"
    outcome = _decide(row["low"], row["high"], threshold_ms)
    return Verdict(condition, outcome, f"{row['a']:.2f} ms → {row['b']:.2f} ms, {change}")


def _decide(low: float, high: float, threshold: float) -> str:
    """The outcome of a change with this interval."""
    return WORSE if low > threshold else AS_ASKED if high < threshold else UNKNOWN


def refuse_all(conditions: Sequence[Condition], reason: str) -> list[Verdict]:
    """The verdicts where the windows cannot be compared at all."""
    return [Verdict(each, UNKNOWN, reason) for each in conditions]


def find_outcome(verdicts: Sequence[Verdict]) -> str:
    """Of all together: WORSE if one is, else UNKNOWN if one is, else AS_ASKED."""
    outcomes = {each.outcome for each in verdicts}
    return next(each for each in (WORSE, UNKNOWN, AS_ASKED) if each in outcomes)


def _judge_condition(
    condition: Condition,
    windows: Sequence[Sequence[RequestFacts]],
    lost_shares: tuple[float, float],
) -> Verdict:
    drawn = []
    for name, window, lost in zip("AB", windows, lost_shares, strict=True):
        if lost > MAX_LOST:
            reason = f"{lost:.1%} of {name}'s requests have no first token, and no TTFT to judge by"
            return Verdict(condition, UNKNOWN, reason)
        kept = _choose_requests(condition, window)
        needed = MIN_REQUESTS
        if condition.share is not None:
            beyond = min(condition.share, 1 - condition.share)
            needed = max(needed, round(MIN_BEYOND / beyond))
        if len(kept) < needed:
            reason = f"{name} has {len(kept)} requests with {condition.figure}, {needed} are needed"
            return Verdict(condition, UNKNOWN, reason)
        # One seed for each window, so that the same requests give the same verdict.
        drawn.append(_draw_figure(condition, kept, seed="AB".index(name)))
    return _compare_draws(condition, *drawn)


def _choose_requests(
    condition: Condition, window: Sequence[RequestFacts]
) -> list[tuple[float, float]]:
    """Microseconds of the figure and weight of each request that counts, in the order of time.

    As in `report`, a stage's mean is over all requests, its percentiles are over those that had it.
    """
    if condition.figure == "ttft":
        return [(each.ttft_us, each.weight) for each in window]
    found = [(each.stages.get(condition.figure), each.weight) for each in window]
    if condition.share is None and any(us is not None for us, _ in found):
        return [(us or 0, weight) for us, weight in found]
    return [(us, weight) for us, weight in found if us is not None]


def _draw_figure(condition: Condition, kept: Sequence[tuple[float, float]], seed: int) -> Array:
    """The figure in the data (first) and in each draw of the bootstrap."""
    values, weights = numpy.array(kept, dtype=numpy.float64).T
    # Blocks of sqrt(n) hold what waits in one queue, as long as there are enough of them.
    length = max(1, min(round(len(kept) ** 0.5), len(kept) // MIN_BLOCKS))
    blocks = numpy.arange(len(kept)) // length
    draws = draw_weights(numpy.random.default_rng(seed), int(blocks[-1]) + 1, RESAMPLES)
    if condition.share is None:
        sums, totals = (numpy.bincount(blocks, each) for each in (values * weights, weights))
        means: Array = draws @ sums / (draws @ totals)
        return means
    parts = range(0, len(draws), DRAWS_AT_ONCE)
    return numpy.concatenate(
        [
            draw_quantiles(
                values, draws[at : at + DRAWS_AT_ONCE][:, blocks] * weights, condition.share
            )
            for at in parts
        ]
    )


def _compare_draws(condition: Condition, a: Array, b: Array) -> Verdict:
    if condition.is_relative and not a.all():
        return Verdict(condition, UNKNOWN, "it is 0 in A, of which nothing is a percentage")
    changes = (b / a - 1) * 100 if condition.is_relative else b - a
    low, high = (float(each) for each in find_interval(changes[1:], LEVEL))
    change = float(changes[0])
    outcome = _decide(low, high, condition.threshold)
    figures = (float(a[0]), float(b[0]), change, low, high)
    reason = (
        f"{a[0] / 1000:.2f} ms → {b[0] / 1000:.2f} ms, {_format_change(condition, change)} "
        f"({_format_change(condition, low)} to {_format_change(condition, high)})"
    )
    if outcome == UNKNOWN:
        reason += ", which is on both sides of the threshold: more requests would decide"
    return Verdict(condition, outcome, reason, figures)


def _format_change(condition: Condition, value: float) -> str:
    return f"{value:+.1f} %" if condition.is_relative else f"{value / 1000:+.2f} ms"


def describe_gate(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The JSON of the verdicts; times in milliseconds, changes in percent where the condition is."""
    described = []
    for each in verdicts:
        entry: dict[str, Any] = {
            "condition": each.condition.text,
            "outcome": each.outcome,
            "reason": each.reason,
        }
        if each.figures:
            scale = 1 if each.condition.is_relative else 1000
            a, b, *changes = each.figures
            values = [a / 1000, b / 1000, *(value / scale for value in changes)]
            names = ("a_ms", "b_ms", "change", "low", "high")
            entry |= {name: round(value, 3) for name, value in zip(names, values, strict=True)}
            entry["unit"] = "%" if each.condition.is_relative else "ms"
        described.append(entry)
    return {"outcome": find_outcome(verdicts), "level": LEVEL, "conditions": described}


def list_lines(verdicts: Sequence[Verdict]) -> list[str]:
    return [f"{each.outcome.upper()}: {each.condition.text}: {each.reason}" for each in verdicts]


def build_markdown(verdicts: Sequence[Verdict], sentences: Sequence[str]) -> str:
    """A table of the verdicts, and the comparison's `sentences`, for a pull request or a job's summary."""
    lines = []
    if verdicts:
        lines += [f"**TTFT gate: {find_outcome(verdicts)}**", ""]
        lines += ["| condition | outcome | A → B |", "|---|---|---|"]
        for each in verdicts:
            cells = (f"`{each.condition.text}`", each.outcome, each.reason)
            # Stage names come from stored spans: they must not begin another cell.
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join([*lines, *(f"- {_escape_markdown(each)}" for each in sentences), ""])


def _escape_markdown(text: str) -> str:
    """`text` without HTML, links and emphasis: parts of it come from stored spans."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)


def build_junit(verdicts: Sequence[Verdict]) -> str:
    """JUnit's XML: worse is a failure, cannot tell an error."""
    outcomes = [each.outcome for each in verdicts]
    suite = ElementTree.Element(
        "testsuite",
        name="ttft-otel diff",
        tests=str(len(verdicts)),
        failures=str(outcomes.count(WORSE)),
        errors=str(outcomes.count(UNKNOWN)),
    )
    for each in verdicts:
        case = ElementTree.SubElement(
            suite, "testcase", classname="ttft-otel", name=each.condition.text
        )
        tag = {WORSE: "failure", UNKNOWN: "error", AS_ASKED: "system-out"}[each.outcome]
        if each.outcome == AS_ASKED:
            ElementTree.SubElement(case, tag).text = each.reason
        else:
            ElementTree.SubElement(case, tag, message=each.reason)
    return ElementTree.tostring(suite, "unicode", xml_declaration=True) + "\n"
