# SPDX-License-Identifier: Apache-2.0
"""Format results of simulate.py as Markdown tables for their report in benchmarks/results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ttft_otel.model.statistics import compute_t_quantile

Case = Mapping[str, Any]


def format_short_seconds(seconds: float) -> str:
    """Three digits or a little more."""
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


def format_gains_table(cases: Sequence[Case]) -> str:
    """Mean TTFT of every case and policy in seconds, and what calibrated gains on trapezoid."""
    policies = list(dict.fromkeys(p for case in cases for p in case["results"]))
    lines = [
        "| case | stable | " + " | ".join(policies) + " | calibrated to trapezoid |",
        "|" + "---|" * (len(policies) + 3),
    ]
    for case in cases:
        mean_by_policy = {name: found["mean"] for name, found in case["results"].items()}
        # Compared before rounding, so that only equal means share the bold face.
        least = min(mean_by_policy.values())
        cells = [
            f"**{format_short_seconds(mean_by_policy[name])}**"
            if mean_by_policy[name] == least
            else format_short_seconds(mean_by_policy[name])
            for name in policies
        ]
        # Below 0 is better: the share of trapezoid's mean that calibrated saves.
        gain = f"{mean_by_policy['calibrated'] / mean_by_policy['trapezoid'] - 1:+.0%}"
        stable = "yes" if case["stable"] else "no"
        lines.append(f"| {case['name']} | {stable} | {' | '.join(cells)} | {gain} |")
    return "\n".join(lines)


def compute_gains(case: Case, policy: str, baseline: str = "trapezoid") -> list[float]:
    """What a policy's mean TTFT is above the other's, as a share, for each seed that has both."""
    every = case["seeds"].values()
    return [
        each[policy] / each[baseline] - 1 for each in every if policy in each and baseline in each
    ]


def compute_half_interval(values: Sequence[float]) -> float:
    """Half of the interval that holds the true mean of `values`, two at least, with 95 %."""
    # Student's t, because the spread comes from the same few values as the mean.
    return compute_t_quantile(len(values) - 1.0) * statistics.stdev(values) / math.sqrt(len(values))


def format_interval(values: list[float]) -> str:
    """The mean and its interval."""
    middle = f"{statistics.fmean(values):+.0%}"
    return middle if len(values) < 2 else f"{middle} ± {100 * compute_half_interval(values):.0f}"


def format_seeds_table(cases: Sequence[Case]) -> str:
    """Every case: calibrated over all seeds; with the first the most that could be. Each to trapezoid."""
    lines = [
        "| case | seeds | `calibrated`, all seeds | as listed | `oracle` | no waiting, all cached |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        cells = [format_interval(compute_gains(case, "calibrated"))]
        for name in ("calibrated", "oracle", "alone"):
            # Of seed 1 alone, the case as listed: the oracle was not run with the others.
            first = compute_gains({"seeds": {"1": case["seeds"]["1"]}}, name)
            cells.append(format_interval(first) if first else "not run")
        lines.append(
            f"| {case['name']} | {len(compute_gains(case, 'calibrated'))} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def is_equal_speed_case(case: Case) -> bool:
    """A stable case of the conversation trace with instances of one speed."""
    # Goals were written down for stable cases: in others queues grow as long as the trace lasts.
    return bool(case["stable"] and case["trace"] == "conversation" and not case["slow"])


def is_mixed_speed_case(case: Case) -> bool:
    """A stable case with slow instances."""
    return bool(case["stable"] and case["slow"])


def format_goals_table(cases: Sequence[Case]) -> str:
    """What comes of each goal, in the one run of each case as listed."""
    lines = ["| goal, mean TTFT of `calibrated` | outcome |", "|---|---|"]
    # The words and numbers of cases.json, which was written before the first run.
    for says, which, goal in (
        (
            "20 % below `trapezoid` on average, stable conversation cases, equal speeds",
            is_equal_speed_case,
            0.2,
        ),
        (
            "30 % below `trapezoid` on average, stable cases, half of them at half speed",
            is_mixed_speed_case,
            0.3,
        ),
    ):
        case_gains = [_get_calibrated_gain(case, "trapezoid") for case in cases if which(case)]
        middle = statistics.fmean(case_gains)
        gain_over_seeds = statistics.fmean(
            x for case in cases if which(case) for x in compute_gains(case, "calibrated")
        )
        outcome = f"{_format_outcome(middle <= -goal)}: {middle:+.1%} over {len(case_gains)} cases"
        lines.append(f"| {says} | {outcome}; {gain_over_seeds:+.1%} over all seeds |")
    equal_speed_cases = [case for case in cases if is_equal_speed_case(case)]
    once = _format_exceeding_cases(
        equal_speed_cases, lambda case: _get_calibrated_gain(case, "trapezoid"), -0.1
    )
    lines.append(f"| in none of the former less than 10 % below | {once} |")
    worse = _format_exceeding_cases(
        cases, lambda case: _get_calibrated_gain(case, "least_requests"), 0
    )
    lines.append(
        f"| never worse than `least_requests` | {worse}: {_format_range(cases, 'least_requests')} |"
    )
    comparisons = [
        f"`{name}` {_format_range(cases, name)}" for name in ("tokens", "batch", "decay")
    ]
    lines.append(f"| against `tokens`, `batch` and `decay` | {', '.join(comparisons)} |")
    return "\n".join(lines)


def _format_exceeding_cases(
    cases: Sequence[Case], get_value: Callable[[Case], float], limit: float
) -> str:
    over = [f"`{case['name']}` {get_value(case):+.0%}" for case in cases if get_value(case) > limit]
    return f"**missed** in {', '.join(over)}" if over else "met"


def _get_calibrated_gain(case: Case, baseline: str) -> float:
    of = case["results"]
    return float(of["calibrated"]["mean"] / of[baseline]["mean"] - 1)


def _format_range(cases: Iterable[Case], baseline: str) -> str:
    every = [_get_calibrated_gain(case, baseline) for case in cases]
    return f"{statistics.fmean(every):+.0%} ({min(every):+.0%} to {max(every):+.0%})"


def _format_outcome(yes: bool) -> str:
    return "met" if yes else "**missed**"
