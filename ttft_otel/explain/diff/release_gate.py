# SPDX-License-Identifier: Apache-2.0
"""Whether B is worse than A by more than was asked for: `ttft-otel diff --fail-if`, for releases.

Input: conditions as typed, and the requests of both windows. Output: Verdicts, which commands/answers.py
turns into an exit code, text, JSON, Markdown and JUnit. Pure; needs numpy.

A verdict follows the interval of the change and not its point: worse is what lies above the threshold with
all of its interval, as asked what lies below it with all of it. Requests that follow one another wait in the
same queues, so that the bootstrap draws blocks of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from xml.etree import ElementTree

import numpy

from ttft_otel.explain.diff.stage_difference import LEVEL, MIN_REQUESTS, RESAMPLES, Array
from ttft_otel.explain.window.request_facts import RequestFacts
from ttft_otel.model.statistics import draw_quantiles, draw_weights, find_interval

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
