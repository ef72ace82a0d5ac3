# SPDX-License-Identifier: Apache-2.0
"""A ChangeAnswer as sentences and a table for the terminal, and as JSON for commands/answers.py."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ttft_otel.explain.diff.change_cause import MIN_CHANGE, ChangeAnswer
from ttft_otel.explain.diff.stage_difference import LEVEL, MIX, Change, Difference
from ttft_otel.explain.explain.explanation_text import MAX_LINES, describe_shares
from ttft_otel.explain.window.request_facts import describe_lost
from ttft_otel.explain.window.window_reading import describe_coverage, describe_reading
from ttft_otel.report.show.terminal import (
    format_ms,
    format_short,
    format_signed,
    print_sentences,
    remove_controls,
    round_ms,
    to_local_time,
)

MAX_STAGES = 2  # of the changed ones, without --verbose
MAX_OUTCOMES = 3  # likewise


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
