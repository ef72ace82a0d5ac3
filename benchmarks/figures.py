# SPDX-License-Identifier: Apache-2.0
"""Figures of a benchmark: computed from its rounds, compared with goals, printed and written.

A goal is for a ratio to a reference that was measured in the same rounds (or for a count), never for
a time: how fast the machine is must not decide. Times stand beside them without a goal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict


class Figure(TypedDict):
    """One result. value: median of the rounds. spread: their least and largest.

    goal: None for what is only there to compare with; `met` is then true.
    """

    value: float
    spread: list[float]
    goal: float | None
    met: bool


def build_figure(
    values: Sequence[float], goal: float | None = None, *, at_least: bool = False, digits: int = 2
) -> Figure:
    """The median of `values`, one a round; `goal` is the most that it may be, or the least."""
    # The median: one round in which the machine did something else must not decide.
    value = statistics.median(values)
    # Judged before rounding, so that the digits shown never turn a miss into a hit.
    is_met = goal is None or (value >= goal if at_least else value <= goal)
    return {
        "value": round(value, digits),
        "spread": [round(min(values), digits), round(max(values), digits)],
        "goal": goal,
        "met": is_met,
    }


def divide_rounds(values: Sequence[float], references: Sequence[float]) -> list[float]:
    """Each round's value as a multiple of the same round's reference."""
    # Pairs of one round share the machine's state; ratios of means would mix rounds.
    return [value / reference for value, reference in zip(values, references, strict=True)]


def build_figure_parser(about: str | None) -> argparse.ArgumentParser:
    """A command line with --json, and `about`, the benchmark's docstring, as its help."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write {figure: {value, goal, met}} there")
    return parser


def report_figures(figures: Mapping[str, Figure], file: Path | None) -> int:
    """Print a line for each figure, write `file` if there is one; 1 when a goal is missed."""
    # Aligned, for people; programs read the JSON.
    width = max(map(len, figures))
    for name, figure in figures.items():
        low, high = figure["spread"]
        spread = f" [{low:g}, {high:g}]" if low < high else ""
        goal = "" if figure["goal"] is None else f"   goal {figure['goal']:g}"
        missed = "" if figure["met"] else "   MISSED"
        sys.stdout.write(f"{name:{width}} {figure['value']:10g}{spread}{goal}{missed}\n")
    if file:
        file.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0 if all(figure["met"] for figure in figures.values()) else 1
