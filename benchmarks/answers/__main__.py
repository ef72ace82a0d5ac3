# SPDX-License-Identifier: Apache-2.0
"""How many answers are right, of windows whose cause is known because a model of vLLM has made them.

    python -m benchmarks.answers                          all windows, development seeds
    python -m benchmarks.answers --seeds 1 --only pause   one seed, one class
    python -m benchmarks.answers --held-out --json FILE   seeds that no answer was developed with
    python -m benchmarks.answers --list                   classes and windows

`explain` is asked for the slowest hundredth and with an objective, `diff` compares the good hour with the bad
one. Right: the kind of the cause, and whose it is. Partly: the stage, but no cause. Wrong: another cause.
Claims too much: a cause or a remedy where nothing is wrong, or nothing can be known.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.answers.answer_scores import (
    CLAIMS,
    RIGHT,
    VERDICTS,
    WRONG,
    JudgedAnswer,
    judge_window,
)
from benchmarks.answers.known_windows import KnownWindow, list_windows
from benchmarks.figures import Figure, build_figure, build_figure_parser, report_figures

DEVELOPMENT: Final = (1, 2, 3, 4, 101)
HELD_OUT: Final = (102, 103, 104, 105, 106)  # never looked at while answers are developed
QUESTIONS: Final = ("explain", "slo", "diff")
MIN_RIGHT: Final = {"explain": 0.85, "slo": 0.85, "diff": 0.9}
MAX_FALSE: Final = 0.03  # wrong, or claiming too much


def build_figures(verdicts: Sequence[JudgedAnswer]) -> dict[str, Figure]:
    """The shares by question, against their goals."""
    figures = {}
    for question, least in MIN_RIGHT.items():
        found = [each.verdict for each in verdicts if each.question == question]
        if found:
            right = found.count(RIGHT) / len(found)
            false = sum(each in (WRONG, CLAIMS) for each in found) / len(found)
            figures[f"{question}_right"] = build_figure([right], least, at_least=True, digits=3)
            figures[f"{question}_false"] = build_figure([false], MAX_FALSE, digits=3)
            figures[f"{question}_answers"] = build_figure([float(len(found))])
    return figures


def list_table(verdicts: Sequence[JudgedAnswer]) -> list[str]:
    """A line for each question and class."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for each in verdicts:
        for group in (each.group, "all"):
            counts.setdefault((each.question, group), Counter())[each.verdict] += 1
    lines = [f"| question | class | {' | '.join(VERDICTS)} |", f"|---|---|{'---|' * len(VERDICTS)}"]
    order = sorted(counts, key=lambda key: (QUESTIONS.index(key[0]), key[1] == "all"))
    for question, group in order:
        found = counts[question, group]
        cells = " | ".join(str(found[verdict]) for verdict in VERDICTS)
        lines.append(f"| {question} | {group} | {cells} |")
    return lines


def list_misses(verdicts: Sequence[JudgedAnswer]) -> list[str]:
    """What was said where it is not right, the worst first."""
    misses = sorted(
        (each for each in verdicts if each.verdict != RIGHT),
        key=lambda each: (-VERDICTS.index(each.verdict), each.question, each.group, each.window),
    )
    return [
        f"- {each.verdict}, {each.question}, {each.group}: {each.window} (seed {each.seed}): said "
        f"{each.said}; true: {each.true}"
        for each in misses
    ]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = build_figure_parser(__doc__)
    parser.add_argument("--only", action="append", default=[], help="a class, or a window's name")
    parser.add_argument("--seeds", type=int, default=len(DEVELOPMENT), help="how many of them")
    parser.add_argument("--held-out", action="store_true", help="the other seeds")
    parser.add_argument("--question", action="append", choices=QUESTIONS, help="only this one")
    parser.add_argument("--folder", type=Path, help="keep the stores there, and use those that are")
    parser.add_argument("--list", action="store_true", help="classes and windows, and nothing more")
    return parser.parse_args(arguments)


def choose_windows(only: Sequence[str]) -> list[KnownWindow]:
    """The windows whose class or name is asked for; all of them without."""
    return [each for each in list_windows() if not only or each.group in only or each.name in only]


def run_suite(arguments: argparse.Namespace, folder: Path) -> list[JudgedAnswer]:
    """Judge all windows with all seeds."""
    seeds = (HELD_OUT if arguments.held_out else DEVELOPMENT)[: arguments.seeds]
    verdicts: list[JudgedAnswer] = []
    for window in choose_windows(arguments.only):
        for seed in seeds:
            begun = time.perf_counter()
            found = judge_window(window, seed, folder, arguments.question or QUESTIONS)
            verdicts += found
            marks = " ".join(f"{each.question}={each.verdict}" for each in found)
            took = time.perf_counter() - begun
            sys.stderr.write(f"{window.group}: {window.name} ({seed}): {marks} {took:.1f} s\n")
    return verdicts


def run_benchmark(arguments: argparse.Namespace) -> int:
    """Ask, print, and write the figures; 1 where a goal is missed."""
    if arguments.list:
        for window in choose_windows(arguments.only):
            sys.stdout.write(f"{window.group}: {window.name}: {' or '.join(window.truth.kinds)}\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="ttft-otel-answers-") as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        verdicts = run_suite(arguments, folder)
    if not verdicts:
        sys.stderr.write("no window has this name; --list shows all\n")
        return 2
    kind = "held out" if arguments.held_out else "development"
    lines = [f"Seeds: {kind}.", "", *list_table(verdicts), "", *list_misses(verdicts), ""]
    sys.stdout.write("\n".join(lines) + "\n")
    return report_figures(build_figures(verdicts), arguments.json)


if __name__ == "__main__":
    sys.exit(run_benchmark(parse_arguments()))
