# SPDX-License-Identifier: Apache-2.0
"""Why B is later than A, by what only two windows tell and by the detectors of `explain`; its forms.

Input: what was read of A and of B. Output: a ChangeAnswer, and it as sentences, as a table for the terminal,
and as JSON, for commands/answers.py and for pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ttft_otel.explain.diff.window_difference import LEVEL, MIX, Change, Difference, compare_windows
from ttft_otel.explain.explain import cause_kinds
from ttft_otel.explain.explain.cause_detectors import MIN_BLOCKS, SHARED_DETECTORS
from ttft_otel.explain.explain.cause_kinds import Remedy, find_remedy
from ttft_otel.explain.explain.explanation import (
    MAX_LINES,
    MAX_LOST_SHARE,
    NOT_EXPLAINED,
    Bursts,
    describe_shares,
    find_bursts,
)
from ttft_otel.explain.explain.late_case import HIGH, LOW, MEDIUM, MIN_SHARE, Candidate, LateCase
from ttft_otel.explain.explain.late_requests import (
    ComparedRequests,
    divide_difference,
    take_middle,
)
from ttft_otel.explain.explain.window_pair import PAIR_DETECTORS, WindowFigure, WindowPair
from ttft_otel.explain.window.request_facts import (
    CannotTellError,
    LostRequests,
    RequestFacts,
    count_requests,
    describe_lost,
)
from ttft_otel.explain.window.window_reading import (
    WindowReading,
    describe_coverage,
    describe_reading,
)
from ttft_otel.model.statistics import compute_weighted_quantiles
from ttft_otel.report.report_types import MIN_LATE, Coverage
from ttft_otel.report.show.terminal import (
    format_ms,
    format_short,
    format_signed,
    print_sentences,
    remove_controls,
    round_ms,
    to_local_time,
)

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
MAX_STAGES = 2  # of the changed ones, without --verbose
MAX_OUTCOMES = 3  # likewise


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
        return find_remedy(self.cause.kind, self.cause.subject)


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


def describe_answer(answer: ChangeAnswer) -> dict[str, Any]:
    """The JSON of an answer; times in milliseconds, moments in ISO 8601."""
    difference = answer.difference
    return {
        "answered": True,
        "coverage": {
            side: describe_coverage(each) for side, each in zip("ab", answer.coverage, strict=True)
        },
        "cause": _describe_cause(answer),
        "outcomes": [
            {"name": each.name, "a": round(each.before, 4), "b": round(each.now, 4)}
            for each in answer.outcomes
        ],
        "requests": {"a": difference.requests_a, "b": difference.requests_b},
        "shared": difference.shared,
        "clock_error_ms": round_ms(difference.clock_error_us),
        "without_token": {
            side: describe_lost(lost) for side, lost in zip("ab", answer.lost, strict=True)
        },
        "level": LEVEL,
        "ttft": {
            "mean": describe_change(difference.ttft),
            "p50": describe_change(difference.p50),
            "p95": describe_change(difference.p95),
        },
        "mix": describe_change(difference.mix),
        # Not rounded to a percent, so that a small share does not read as none.
        "unmatched_share": round(difference.unmatched_share, 4),
        "stages": [describe_change(change) for change in difference.stages],
        "named": [change.name for change in difference.named],
    }


def _describe_cause(answer: ChangeAnswer) -> dict[str, Any]:
    cause, remedy = answer.cause, answer.remedy
    return {
        "kind": cause.kind,
        "subject": cause.subject,
        "sentence": cause.sentence,
        "confidence": cause.confidence,
        **(describe_shares(cause) if cause.is_cause else {}),
        "figures": dict(cause.figures),
        "remedy": remedy.text if remedy else None,
    }


def describe_change(change: Change) -> dict[str, Any]:
    """One change; `since` only where it began inside of B."""
    parts = ("a", "b", "change", "low", "high")
    times = {f"{part}_ms": round_ms(getattr(change, f"{part}_us")) for part in parts}
    described: dict[str, Any] = {"name": change.name, **times, "named": change.named}
    if change.kind:
        described["kind"] = change.kind
    if change.since_ns:
        described["since"] = to_local_time(change.since_ns).isoformat(timespec="seconds")
    return described


def list_sentences(answer: ChangeAnswer, verbose: bool = False) -> list[str]:
    """The cause and what was read, by how much, whose, when and what to do.

    verbose: also what is not more than MIN_CHANGE of the TTFT, and notes.
    """
    difference, cause = answer.difference, answer.cause
    share = ""
    if cause.is_cause:
        part = min(max(cause.share, 0.0), 1.0)
        share = f"; {part:.0%} of the change (confidence {cause.confidence})"
    read = " ".join(
        f"{name}: {describe_reading(coverage)}"
        for name, coverage in zip("AB", answer.coverage, strict=True)
    )
    sentences = [f"{cause.title}: {cause.sentence}{share}. {read}"]
    ttft = difference.ttft
    sentences.append(
        f"TTFT mean {format_short(ttft.a_us)} → {format_short(ttft.b_us)}, "
        f"p50 {format_signed(difference.p50.change_us)}, "
        f"p95 {format_signed(difference.p95.change_us)} "
        f"({difference.requests_a} → {difference.requests_b} requests)."
    )
    # The same for both sides where one read is divided by --by.
    sentences += dict.fromkeys(each.sampling for each in answer.coverage if each.sampling)
    least = 0.0 if verbose else MIN_CHANGE * ttft.a_us
    large = [change for change in difference.named if abs(change.change_us) >= least]
    sentences += [_describe_in_words(change) for change in large[: None if verbose else MAX_STAGES]]
    # Said in words: an empty list could be taken for a comparison that failed.
    if not large:
        sentences.append("Nothing changed that chance does not explain.")
    sentences += [
        f"Not compared: in {name} {lost.sentence}."
        for name, lost in zip("AB", answer.lost, strict=True)
        if lost.total
    ]
    sentences += list_notes(difference)
    notable = [each.sentence for each in answer.outcomes if each.is_notable]
    if notable:
        sentences.append(
            f"Of the requests: {', '.join(notable[: None if verbose else MAX_OUTCOMES])}."
        )
    if answer.bursts is not None:
        sentences.append(answer.bursts.sentence)
    if answer.remedy is not None:
        sentences.append(answer.remedy.sentence)
    return [remove_controls(each) for each in (sentences if verbose else sentences[:MAX_LINES])]


def list_notes(difference: Difference) -> list[str]:
    """What limits the comparison."""
    sentences = []
    if difference.shared:
        sentences.append(
            f"{difference.shared} requests are in both A and B: what changed looks smaller than it is. "
            "End A where B begins."
        )
    if difference.named and difference.unmatched_share:
        sentences.append(
            f"{difference.unmatched_share:.0%} of B's requests are of a kind that A has too few of; "
            "they count as mix."
        )
    error_us = difference.clock_error_us
    if any(abs(change.change_us) <= error_us for change in difference.named):
        sentences.append(
            f"Boundaries of the workers' stages are up to {error_us / 1000:.1f} ms off "
            "(ttft.clock_error_us): a change of that size may be another stage's."
        )
    return sentences


def _describe_in_words(change: Change) -> str:
    # The interval stands beside every figure: a bare mean would claim more than it knows.
    interval = f"{format_signed(change.low_us)} to {format_signed(change.high_us)}"
    # The mix is no stage: "longer" would attribute to servers what clients sent.
    if change.name == MIX:
        return (
            f"{format_signed(change.change_us)} because other requests came, "
            f"not because like requests took longer or shorter ({interval})."
        )
    # Names come from stored spans, which anybody may have sent: no terminal controls from there.
    sentence = (
        f"{format_signed(change.change_us)} {remove_controls(change.name)} of like requests "
        f"({interval})"
    )
    if change.kind:
        sentence += f", nearly all of it in {change.kind} requests"
    if change.since_ns:
        sentence += f", since {to_local_time(change.since_ns):%H:%M:%S}"
    return f"{sentence}."


def print_answer(answer: ChangeAnswer, verbose: bool) -> None:
    difference = answer.difference
    ttft = difference.ttft
    # Rich's highlighting would colour the digits in what is already styled.
    console = Console(highlight=False)
    print_sentences(console, list_sentences(answer, verbose), verbose)
    if not verbose:
        return
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("mean, ms", no_wrap=True)
    for word in ("A", "B", "B - A", f"{LEVEL:.0%} interval"):
        table.add_column(word, justify="right", no_wrap=True)
    for change in (*difference.stages, difference.mix, ttft):
        # The mix is a difference only: neither window has a mean of it.
        is_mix = change is difference.mix
        table.add_row(
            remove_controls(change.name),
            "" if is_mix else format_ms(change.a_us),
            "" if is_mix else format_ms(change.b_us),
            format_ms(change.change_us, "+"),
            f"{format_ms(change.low_us, '+')} … {format_ms(change.high_us, '+')}",
            style="" if change.named else "dim",
        )
    console.print(table)
    console.print(
        Text("B - A of like requests; stages + mix = ttft; intervals hold together", style="dim")
    )
