# SPDX-License-Identifier: Apache-2.0
"""A Prediction of what_if.py as a table and sentences, and as JSON for commands/answers.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ttft_otel.explain.whatif.plan_search import (
    describe_plan,
    describe_targets,
    list_flags,
)
from ttft_otel.explain.whatif.planned_change import PlannedChange
from ttft_otel.explain.whatif.what_if import LEVEL, QUANTILES, TTFT, PredictedFigure, Prediction
from ttft_otel.report.show.terminal import format_short, print_sentence, remove_controls, round_ms

QUANTILE_NAMES: Final = tuple(f"p{round(100 * share)}" for share in QUANTILES)
SHOWN_SHARE: Final = 0.005  # of the predicted p95 of the TTFT; smaller stages are only in the JSON


def describe_answer(answer: Prediction) -> dict[str, Any]:
    """The JSON of an answer; times in milliseconds. `autotune` is there where a plan was searched."""
    described: dict[str, Any] = {
        "answered": True,
        "requests": answer.requests,
        "instances": answer.instances,
        "change": describe_change(answer.change),
        "level": LEVEL,
        "replay_error": _describe_errors(answer.errors),
        "ttft": describe_figures(answer.figures[TTFT]),
        "time_per_output_token": {
            "replay_error": _describe_errors(answer.token_errors),
            **describe_figures(answer.token_time),
        }
        if answer.token_time
        else None,
        "unexplained": round(answer.unexplained, 4),
        "stages": [
            {"name": name, **describe_figures(figures)}
            for name, figures in answer.figures.items()
            if name != TTFT
        ],
        "notes": list(answer.notes),
        "warnings": list(answer.warnings),
    }
    if answer.targets:
        described["autotune"] = {
            "targets": describe_targets(answer.targets),
            "instances": answer.instances + answer.change.instances,
            "flags": list_flags(answer.change),
            "held": answer.held,
            "replays": len(answer.changed),
            "tried": answer.tried,
        }
    return described


def _describe_errors(errors: tuple[float, ...]) -> dict[str, float]:
    return {name: round(error, 4) for name, error in zip(QUANTILE_NAMES, errors, strict=True)}


def describe_figures(figures: tuple[PredictedFigure, ...]) -> dict[str, dict[str, float]]:
    return {
        name: {f"{kind}_ms": round_ms(us) for kind, us in asdict(figure).items()}
        for name, figure in zip(QUANTILE_NAMES, figures, strict=True)
    }


NO_CHANGE: Final = PlannedChange()
# By field of PlannedChange: its name in the JSON, which is that of the option, and in words.
CHANGES: Final = {
    "instances": ("instances", "{:+} instances"),
    "encoders": ("encoders", "+{} encoders"),
    "max_num_seqs": ("max_num_seqs", "max-num-seqs {}"),
    "max_batched_tokens": ("max_num_batched_tokens", "max-num-batched-tokens {}"),
    "policy": ("routing_logic", "routing by {}"),
    "rate": ("rate", "{:g} times the rate"),
    "kv_cache": ("kv_cache", "{:g} times the KV cache"),
    "cache_hit": ("cache_hit", "{:+.0%} of prompt tokens cached"),
}


def _list_changes(change: PlannedChange) -> Iterator[tuple[str, str, Any]]:
    """What is not its default: both names, and the value."""
    for field, names in CHANGES.items():
        value = getattr(change, field)
        if value != getattr(NO_CHANGE, field):
            yield *names, value


def describe_change(change: PlannedChange) -> dict[str, Any]:
    """What was changed, by the names of the options; nothing where nothing was."""
    return {name: value for name, _, value in _list_changes(change)}


def _name_change(change: PlannedChange) -> str:
    parts = [words.format(value) for _, words, value in _list_changes(change)]
    return ", ".join(parts) or "nothing changed"


def name_found(found: Prediction) -> str:
    """A plan that was searched in words, and how sure it is."""
    plan = describe_plan(found.change, found.instances)
    return (
        f"The cheapest of {found.tried} plans that holds {describe_targets(found.targets)}: {plan}. "
        f"It does in {found.held} of {len(found.changed)} replays."
    )


def print_answer(answer: Prediction, console: Console) -> None:
    """Print the TTFT, every stage that matters, the error of the replay, and what is assumed."""
    ttft = answer.figures[TTFT]
    whole = ", ".join(
        f"{name} {format_short(figure.recorded)} → {format_short(figure.predicted)} "
        f"({format_short(figure.low)} to {format_short(figure.high)})"
        for name, figure in zip(QUANTILE_NAMES, ttft, strict=True)
    )
    print_sentence(console, f"{_name_change(answer.change)}: TTFT {whole}", style="bold")
    errors = ", ".join(
        f"{name} {error:+.1%}" for name, error in zip(QUANTILE_NAMES, answer.errors, strict=True)
    )
    print_sentence(
        console, f"The same model on the {answer.requests} recorded requests, unchanged: {errors}"
    )
    if answer.token_time:
        print_sentence(console, _describe_token_time(answer))
    console.print(build_table(answer))
    for warning in answer.warnings:
        print_sentence(console, remove_controls(warning), "! ", "yellow")
    for note in answer.notes:
        print_sentence(console, remove_controls(note), "• ", "dim")


def _describe_token_time(answer: Prediction) -> str:
    """The time per output token in words, which is the price of what shortens the TTFT."""
    figures = "; ".join(
        f"{name} {format_short(figure.recorded)} → {format_short(figure.predicted)} "
        f"({format_short(figure.low)} to {format_short(figure.high)}), {figure.change:+.0%}"
        for name, figure in zip(QUANTILE_NAMES, answer.token_time, strict=True)
        if name != QUANTILE_NAMES[1]
    )
    errors = ", ".join(
        f"{name} {error:+.1%}"
        for name, error in zip(QUANTILE_NAMES, answer.token_errors, strict=True)
        if name != QUANTILE_NAMES[1]
    )
    return f"Time per output token: {figures}; unchanged, the model is off by {errors}."


def build_table(answer: Prediction) -> Table:
    """Stages with their recorded and predicted quantiles."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("ms, now→then", no_wrap=True)
    for name in (*QUANTILE_NAMES, f"p95, {LEVEL:.0%}"):
        table.add_column(name, justify="right", no_wrap=True)
    least = SHOWN_SHARE * answer.figures[TTFT][1].predicted
    for name, figures in answer.figures.items():
        if max(max(each.recorded, each.predicted) for each in figures) < least:
            continue
        cells = [
            f"{_round_figure(each.recorded)}→{_round_figure(each.predicted)}" for each in figures
        ]
        middle = figures[1]
        table.add_row(
            # Names come from stored spans, which anybody may have sent.
            remove_controls(name),
            *cells,
            f"{_round_figure(middle.low)}…{_round_figure(middle.high)}",
            style="bold" if name == TTFT else "",
        )
    return table


def _round_figure(us: float) -> str:
    """Milliseconds with three digits, or all of a whole number: four pairs of them fit beside a stage."""
    ms = us / 1000
    return f"{ms:.{0 if ms >= 100 else 1 if ms >= 10 else 2}f}"
