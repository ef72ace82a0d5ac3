# SPDX-License-Identifier: Apache-2.0
"""Results of simulate.py as Markdown: docs/routing.md shows them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

Case = Mapping[str, Any]
T: Final = (0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's, 95 %, by freedom


def short(seconds: float) -> str:
    """Three digits or a little more."""
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


def table(cases: list[Case]) -> str:
    """Mean TTFT of every case and policy in seconds, and what calibrated gains on trapezoid."""
    policies = list(dict.fromkeys(p for case in cases for p in case["results"]))
    lines = [
        "| case | stable | " + " | ".join(policies) + " | calibrated to trapezoid |",
        "|" + "---|" * (len(policies) + 3),
    ]
    for case in cases:
        of = {name: found["mean"] for name, found in case["results"].items()}
        least = min(of.values())
        cells = [
            f"**{short(of[name])}**" if of[name] == least else short(of[name]) for name in policies
        ]
        gain = f"{of['calibrated'] / of['trapezoid'] - 1:+.0%}"
        stable = "yes" if case["stable"] else "no"
        lines.append(f"| {case['name']} | {stable} | {' | '.join(cells)} | {gain} |")
    return "\n".join(lines)


def gains(case: Case, policy: str, other: str = "trapezoid") -> list[float]:
    """What a policy's mean TTFT is above the other's, as a share, for each seed that has both."""
    every = case["seeds"].values()
    return [each[policy] / each[other] - 1 for each in every if policy in each and other in each]


def half(values: list[float]) -> float:
    """Half of the interval that has the true mean with 95 %."""
    return T[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def interval(values: list[float]) -> str:
    """The mean and its interval."""
    middle = f"{statistics.fmean(values):+.0%}"
    return middle if len(values) < 2 else f"{middle} ± {100 * half(values):.0f}"


def seeds(cases: list[Case]) -> str:
    """Every case: calibrated over all seeds; with the first the most that could be. Each to trapezoid."""
    lines = [
        "| case | seeds | `calibrated`, all seeds | as listed | `oracle` | no waiting, all cached |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        cells = [interval(gains(case, "calibrated"))]
        for name in ("calibrated", "oracle", "alone"):
            first = gains({"seeds": {"1": case["seeds"]["1"]}}, name)
            cells.append(interval(first) if first else "not run")
        lines.append(f"| {case['name']} | {len(gains(case, 'calibrated'))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def equal(case: Case) -> bool:
    """A stable case of the conversation trace with instances of one speed."""
    return bool(case["stable"] and case["trace"] == "conversation" and not case["slow"])


def mixed(case: Case) -> bool:
    """A stable case with slow instances."""
    return bool(case["stable"] and case["slow"])


def goals(cases: list[Case]) -> str:
    """What comes of each goal, in the one run of each case as listed."""
    lines = ["| goal, mean TTFT of `calibrated` | outcome |", "|---|---|"]
    for says, which, goal in (
        ("20 % below `trapezoid` on average, stable conversation cases, equal speeds", equal, 0.2),
        ("30 % below `trapezoid` on average, stable cases, half of them at half speed", mixed, 0.3),
    ):
        every = [_once(case, "trapezoid") for case in cases if which(case)]
        middle = statistics.fmean(every)
        usual = statistics.fmean(
            x for case in cases if which(case) for x in gains(case, "calibrated")
        )
        outcome = f"{_met(middle <= -goal)}: {middle:+.1%} over {len(every)} cases"
        lines.append(f"| {says} | {outcome}; {usual:+.1%} over all seeds |")
    some = [case for case in cases if equal(case)]
    once = _over(some, lambda case: _once(case, "trapezoid"), -0.1)
    lines.append(f"| in none of the former less than 10 % below | {once} |")
    worse = _over(cases, lambda case: _once(case, "least_requests"), 0)
    lines.append(
        f"| never worse than `least_requests` | {worse}: {_range(cases, 'least_requests')} |"
    )
    told = [f"`{name}` {_range(cases, name)}" for name in ("tokens", "batch", "decay")]
    lines.append(f"| against `tokens`, `batch` and `decay` | {', '.join(told)} |")
    return "\n".join(lines)


def _over(cases: list[Case], of: Callable[[Case], float], most: float) -> str:
    over = [f"`{case['name']}` {of(case):+.0%}" for case in cases if of(case) > most]
    return f"**missed** in {', '.join(over)}" if over else "met"


def _once(case: Case, other: str) -> float:
    of = case["results"]
    return float(of["calibrated"]["mean"] / of[other]["mean"] - 1)


def _range(cases: Iterable[Case], other: str) -> str:
    every = [_once(case, other) for case in cases]
    return f"{statistics.fmean(every):+.0%} ({min(every):+.0%} to {max(every):+.0%})"


def _met(yes: bool) -> str:
    return "met" if yes else "**missed**"
