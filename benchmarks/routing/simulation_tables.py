# SPDX-License-Identifier: Apache-2.0
"""Format results of simulate.py as JSON, and as Markdown tables for their report in benchmarks/results."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ttft_otel.model.statistics import compute_t_quantile

Case = Mapping[str, Any]

OURS: Final = "calibrated"
# They know what no router can know, or are the same policy by another measure.
NO_PEERS: Final = (OURS, "oracle")
MAX_BEHIND: Final = 0.02  # of the best policy
MIN_AHEAD: Final = 0.15  # of the best single peer's mean TTFT, on average
MAX_BEHIND_ORACLE: Final = 0.10
MAX_TPOT: Final = 0.05  # above the best peer's p99
MEASURES: Final = {"mean": "mean TTFT", "p99": "p99 TTFT", "late": "answers that are not good"}
# Of all answers: a difference of one in two thousand is chance.
GOOD_RESOLUTION: Final = 0.005


def format_cases(cases: Sequence[Case]) -> str:
    """JSON with a line for each case, seed and policy."""
    parts = []
    for case in cases:
        head = json.dumps({name: value for name, value in case.items() if name != "seeds"})
        seeds = [
            f'   "{seed}": {{\n'
            + ",\n".join(f'    "{name}": {json.dumps(each)}' for name, each in found.items())
            + "\n   }"
            for seed, found in case["seeds"].items()
        ]
        parts.append(f'{head[:-1]}, "seeds": {{\n' + ",\n".join(seeds) + "\n  }}")
    return '{"cases": [\n' + ",\n".join(parts) + "\n]}\n"


def compute_mean(case: Case, policy: str, measure: str, beside: str = "") -> float:
    """The mean of a measure over the seeds, of which those count that `beside` has, too.

    Seconds, or a share of all answers ("late").
    """
    values = [
        each[policy]
        for each in case["seeds"].values()
        if policy in each and (not beside or beside in each)
    ]
    if measure == "late":
        return statistics.fmean(1 - each["good"] for each in values)
    return statistics.fmean(each[measure] for each in values)


def list_policies(cases: Sequence[Case]) -> list[str]:
    """Every policy with results, in their order."""
    return list(dict.fromkeys(p for case in cases for seed in case["seeds"].values() for p in seed))


class Lag(NamedTuple):
    """By how much a policy is above the best that does not know the future, and which that is.

    half: half the interval of `behind` over the seeds; infinite with one. limit: that the goal allows.
    """

    behind: float
    best: str
    half: float
    limit: float

    @property
    def is_missed(self) -> bool:
        """Whether the goal is missed, by the mean over the seeds."""
        return self.behind > self.limit

    @property
    def is_certain(self) -> bool:
        """Whether it is missed beyond chance: also by the interval's lower end."""
        return self.behind - self.half > self.limit


def compute_lag(case: Case, measure: str, policy: str = OURS) -> Lag:
    """Compare a policy with the best of all but NO_PEERS by a measure, in one case."""
    every = [each for each in case["seeds"].values() if policy in each]
    values = {
        name: compute_mean(case, name, measure)
        for name in list_policies([case])
        # The mean of one that lacks a seed is over other loads.
        if name not in NO_PEERS and all(name in each for each in every)
    }
    best = min(values, key=values.__getitem__)
    if measure == "late":
        differences = [each[best]["good"] - each[policy]["good"] for each in every]
        behind, limit = statistics.fmean(differences), GOOD_RESOLUTION
    else:
        differences = compute_gains(case, policy, best, measure)
        behind, limit = compute_mean(case, policy, measure) / values[best] - 1, MAX_BEHIND
    half = compute_half_interval(differences) if len(differences) > 1 else math.inf
    return Lag(behind, best, half, limit)


def find_best_peer(cases: Sequence[Case]) -> str:
    """The peer whose mean TTFT is on average the least multiple of ours."""
    peers = [each for each in list_policies(cases) if each not in NO_PEERS]
    return min(
        peers,
        key=lambda peer: statistics.fmean(
            math.log(compute_mean(c, peer, "mean") / compute_mean(c, OURS, "mean")) for c in cases
        ),
    )


def compute_gains(case: Case, policy: str, baseline: str, measure: str = "mean") -> list[float]:
    """What a policy has more of a measure than another, as a share, for each seed that has both."""
    every = case["seeds"].values()
    return [
        each[policy][measure] / each[baseline][measure] - 1
        for each in every
        if policy in each and baseline in each
    ]


def compute_half_interval(values: Sequence[float]) -> float:
    """Half of the interval that holds the true mean of `values`, two at least, with 95 %."""
    # Student's t, because the spread comes from the same few values as the mean.
    return compute_t_quantile(len(values) - 1.0) * statistics.stdev(values) / math.sqrt(len(values))


def format_interval(values: Sequence[float]) -> str:
    """The mean and, of several, half the 95 % interval."""
    middle = f"{statistics.fmean(values):+.0%}"
    if len(values) < 2:
        return middle
    return f"{middle} ± {100 * compute_half_interval(values):.0f}"


def format_means_table(cases: Sequence[Case]) -> str:
    """Mean TTFT of every case and policy in seconds, over all seeds, and ours to the best peer."""
    policies = list_policies(cases)
    peer = find_best_peer(cases)
    lines = [
        f"| case | {' | '.join(policies)} | `{OURS}` to `{peer}` |",
        "|" + "---|" * (len(policies) + 2),
    ]
    for case in cases:
        means = {name: compute_mean(case, name, "mean") for name in policies}
        least = min(value for name, value in means.items() if name != "oracle")
        cells = [
            f"**{value:.3g}**" if value == least else f"{value:.3g}" for value in means.values()
        ]
        gain = format_interval(compute_gains(case, OURS, peer))
        lines.append(f"| {case['name']} | {' | '.join(cells)} | {gain} |")
    return "\n".join(lines)


def format_misses_table(cases: Sequence[Case]) -> str:
    """Every case in which ours is more than MAX_BEHIND behind the best, by any measure."""
    lines = [
        "| case | measure | best | `calibrated` is above it by | of seeds |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        for measure, words in MEASURES.items():
            lag = compute_lag(case, measure)
            if lag.is_missed:
                by = f"{lag.behind:.1%} ± {100 * lag.half:.0f}"
                more = f"**{by}**" if lag.is_certain else by
                lines.append(
                    f"| {case['name']} | {words} | `{lag.best}` | {more} | {len(case['seeds'])} |"
                )
    return "\n".join(lines)


def format_goals_table(cases: Sequence[Case]) -> str:
    """What comes of each goal of cases.json."""
    lines = ["| goal | outcome |", "|---|---|"]
    for measure, words in MEASURES.items():
        lags = [compute_lag(case, measure) for case in cases]
        near = sum(not each.is_missed for each in lags)
        sure = sum(each.is_certain for each in lags)
        goal = "as few as the best" if measure == "late" else "best, or within 2 % of it"
        lines.append(
            f"| {words}: {goal}, in every case | {_tell(near == len(cases))}: {near} of {len(cases)}; "
            f"{sure} beyond chance. "
            # What no router can know is the most that choices can gain; where it misses, luck decides.
            f"`oracle`: {sum(not compute_lag(c, measure, 'oracle').is_missed for c in cases)} |"
        )
    peer = find_best_peer(cases)
    gains, oracle_gains = (
        [statistics.fmean(compute_gains(case, policy, peer)) for case in cases]
        for policy in (OURS, "oracle")
    )
    mean = statistics.fmean(gains)
    half = compute_half_interval(gains)
    lines.append(
        f"| mean TTFT 15 % below the best single peer's, on average | {_tell(mean <= -MIN_AHEAD)}: "
        f"{mean:+.1%} ± {100 * half:.1f} over cases to `{peer}` ({min(gains):+.0%} to {max(gains):+.0%}). "
        f"`oracle`: {statistics.fmean(oracle_gains):+.1%} |"
    )
    behind = [compute_mean(c, OURS, "mean") / compute_mean(c, "oracle", "mean") - 1 for c in cases]
    near = sum(each <= MAX_BEHIND_ORACLE for each in behind)
    lines.append(
        f"| within 10 % of the oracle | {_tell(near == len(cases))}: {near} of {len(cases)} "
        f"({min(behind):+.0%} to {max(behind):+.0%}) |"
    )
    tpots = [
        compute_mean(c, OURS, "tpot_p99") / max(compute_mean(c, peer, "tpot_p99"), 1e-9) - 1
        for c in cases
    ]
    near = sum(each <= MAX_TPOT for each in tpots)
    lines.append(
        f"| p99 TPOT at most 5 % above `{peer}`'s | {_tell(near == len(cases))}: {near} of {len(cases)} "
        f"({min(tpots):+.0%} to {max(tpots):+.0%}) |"
    )
    return "\n".join(lines)


def _tell(is_met: bool) -> str:
    return "met" if is_met else "**missed**"
