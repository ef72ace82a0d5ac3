# SPDX-License-Identifier: Apache-2.0
"""Statistics of experiments.py's runs for experiment_pages.py: means, p99, differences with intervals; pure.

A run is a dict with experiment, policy, round and requests [[sent, ttft, prompt, cached], ...] in
milliseconds and tokens. Intervals are of 95 %, from draws of whole rounds and, in each drawn round, of
windows of ten seconds of its load, the same ones for all policies: requests that wait in one queue are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ttft_otel.model.statistics import find_interval

# Longer than queues last below saturation: windows are nearly independent, their requests are not.
WINDOW_MS: Final = 10_000.0
BOOTSTRAP_DRAWS: Final = 2000
WEIGHT_DECAY: Final = 0.99  # router/routing/policies/prefill_model.py's Quality
MIN_ROUNDS: Final = 3  # rounds; of fewer nothing follows
GAIN_GOAL: Final = (
    -0.15
)  # what the first policy's mean TTFT shall have less than kvaware's and qps's
POLICY_COMPARISONS: Final = (
    ("trapezoid", "kvaware", GAIN_GOAL),
    ("trapezoid", "qps", GAIN_GOAL),
    ("trapezoid", "least_requests", GAIN_GOAL),
    ("calibrated", "trapezoid", 0.0),
    ("calibrated", "kvaware", 0.0),
)

Values = NDArray[np.float64]
Windows = dict[str, list[list[Values]]]  # by policy: rounds, and in each the TTFTs of every window


def select_complete_rounds(
    runs: Sequence[Mapping[str, Any]], experiment: str
) -> dict[str, list[Any]]:
    """Each policy's runs of the rounds in which all policies of this experiment had their turn."""
    experiment_runs = [run for run in runs if run["experiment"] == experiment and run["requests"]]
    policies = list(dict.fromkeys(run["policy"] for run in experiment_runs))
    rounds: dict[int, dict[str, Any]] = {}
    for run in experiment_runs:
        rounds.setdefault(run["round"], {})[run["policy"]] = run
    # An incomplete round would compare policies under different loads.
    complete_rounds = [
        rounds[number] for number in sorted(rounds) if len(rounds[number]) == len(policies)
    ]
    return (
        {policy: [each[policy] for each in complete_rounds] for policy in sorted(policies)}
        if complete_rounds
        else {}
    )


def split_into_windows(runs_by_policy: Mapping[str, Sequence[Any]]) -> Windows:
    """TTFTs in seconds by policy, round and window."""
    ttfts: Windows = {policy: [] for policy in runs_by_policy}
    for each in zip(*runs_by_policy.values(), strict=True):  # the runs of one round
        # The same windows for all: late requests of one policy must not add a window to it alone.
        last = max(row[0] for run in each for row in run["requests"])
        count = int(last // WINDOW_MS) + 1
        for policy, run in zip(runs_by_policy, each, strict=True):
            parts: list[list[float]] = [[] for _ in range(count)]
            for row in run["requests"]:
                parts[int(row[0] // WINDOW_MS)].append(row[1] / 1e3)
            ttfts[policy].append([np.array(part) for part in parts])
    return ttfts


def draw_bootstrap_samples(
    ttft_windows: Windows, count: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> dict[str, Values]:
    """Each policy's (mean, p99) of so many drawn samples, seconds."""
    chance = np.random.default_rng(seed)
    rounds = next(iter(ttft_windows.values()))
    samples: dict[str, list[Values]] = {policy: [] for policy in ttft_windows}
    # A draw in which a policy has no request has no mean; it is drawn again, for all policies.
    while len(next(iter(samples.values()))) < count:
        cells = [
            (number, place)
            for number in chance.integers(0, len(rounds), len(rounds))
            for place in chance.integers(0, len(rounds[number]), len(rounds[number]))
        ]
        sample = {
            # The same cells for every policy: what a window's load did to all cancels in their ratios.
            policy: np.concatenate([parts[number][place] for number, place in cells])
            for policy, parts in ttft_windows.items()
        }
        if all(each.size for each in sample.values()):
            for policy, each in sample.items():
                samples[policy].append(_compute_mean_and_p99(each))
    return {policy: np.array(rows) for policy, rows in samples.items()}


def compare_policies(runs: Sequence[Mapping[str, Any]], experiment: str) -> dict[str, Any]:
    """Policies' figures and the differences of POLICY_COMPARISONS; {} where no round is complete."""
    runs_by_policy = select_complete_rounds(runs, experiment)
    if not runs_by_policy:
        return {}
    ttft_windows = split_into_windows(runs_by_policy)
    samples = draw_bootstrap_samples(ttft_windows)
    policies = {}
    for policy, rounds in ttft_windows.items():
        ttfts = np.concatenate([part for parts in rounds for part in parts])
        tokens = np.array(
            [row[2:4] for run in runs_by_policy[policy] for row in run["requests"]], dtype=float
        )
        policies[policy] = {
            "requests": int(ttfts.size),
            "mean": _add_interval(_compute_mean_and_p99(ttfts)[0], samples[policy][:, 0]),
            "p99": _add_interval(_compute_mean_and_p99(ttfts)[1], samples[policy][:, 1]),
            "rounds": [_round_figure(each) for each in _compute_round_means(rounds)],
            "cached": _round_figure(tokens[:, 1].sum() / max(1.0, tokens[:, 0].sum())),
        }
    comparisons = [
        each for each in POLICY_COMPARISONS if each[0] in ttft_windows and each[1] in ttft_windows
    ]
    return {
        "policies": policies,
        "rounds": len(next(iter(runs_by_policy.values()))),
        "against": [_compare_with(ttft_windows, samples, *each) for each in comparisons],
    }


def compute_capacity(requests: Sequence[Sequence[float]], at_once: int) -> float:
    """Requests per second of a closed loop, its beginning and end left out, where not all are busy."""
    # Sent plus latency: when each one ended, in milliseconds.
    ends = sorted(row[0] + row[4] for row in requests)[at_once : -at_once or None]
    return (len(ends) - 1) / (ends[-1] - ends[0]) * 1e3


def compute_mape(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> float | None:
    """The error of one run's predictions, from what a router says of its instances before and after it.

    A router weighs each outcome 1 % less than the next one, so older ones can be taken out.
    """
    old = {each["url"]: each for each in before["instances"]} if before else {}
    error = weight = 0.0
    for each in after["instances"]:
        if not each.get("predictions"):
            continue
        last_state = old.get(each["url"], {})
        # The router's average is over all its time: what was known before this run is taken out.
        outcomes_before = _count_outcomes(last_state)
        new_outcomes = _count_outcomes(each) - outcomes_before
        weighted_error = each["predictions"]["mape"] * _compute_decayed_weight(
            outcomes_before + new_outcomes
        )
        if outcomes_before:
            weighted_error -= (
                # Each new outcome has weighed the old ones down once more.
                WEIGHT_DECAY**new_outcomes
                * last_state["predictions"]["mape"]
                * _compute_decayed_weight(outcomes_before)
            )
        error, weight = error + weighted_error, weight + _compute_decayed_weight(new_outcomes)
    return _round_figure(error / weight) if weight else None


def list_mapes(results: Mapping[str, Any], experiment: str) -> list[float]:
    """Of each run of `calibrated`, in turn; its router had no other requests in between."""
    before, error_list = results.get("warm", {}).get("calibrated"), []
    for run in results["runs"]:
        if run["policy"] == "calibrated" and run.get("learnt"):
            error = compute_mape(before, run["learnt"])
            before = run["learnt"]
            if run["experiment"] == experiment and error is not None:
                error_list.append(error)
    return error_list


def _count_outcomes(instance: Mapping[str, Any]) -> int:
    return int((instance.get("predictions") or {}).get("outcomes", 0))


def _compute_decayed_weight(count: int) -> float:
    # The sum of a geometric series: the weights of `count` outcomes, the latest being 1.
    return (1 - WEIGHT_DECAY**count) / (1 - WEIGHT_DECAY)


def count_late_runs(results: Mapping[str, Any], experiment: str) -> int:
    """In how many runs the load itself was later than `ttft-otel bench` lets pass."""
    runs = (run for run in results["runs"] if run["experiment"] == experiment)
    return sum(not run.get("valid", True) for run in runs)


def compute_experiment_figures(results: Mapping[str, Any], experiment: str) -> dict[str, Any]:
    """{figure: {value, goal, met}} of one experiment, shares of the other policy's mean TTFT."""
    judged: dict[str, Any] = {}
    prefix = experiment.replace("-", "_")
    comparison = compare_policies(results["runs"], experiment)
    decided = (
        bool(comparison)
        and comparison["rounds"] >= MIN_ROUNDS
        and not count_late_runs(results, experiment)
    )
    for each in comparison.get("against", ()):
        value, low, high = each["mean"]
        # A goal of 0 means better at all: an interval that contains 0 says neither yes nor no.
        clear = decided and (each["goal"] < 0 or low > 0 or high < 0)
        judged[f"{prefix}_{each['policy']}_to_{each['other']}"] = {
            "value": value,
            "interval": [low, high],
            "rounds": each["rounds"],
            "goal": each["goal"],
            # None is not a failure: too few rounds, or a load that came late, decide nothing.
            "met": value <= each["goal"] if clear else None,
        }
    if errors := list_mapes(results, experiment):
        mean = _round_figure(sum(errors) / len(errors))
        judged[f"{prefix}_calibrated_mape"] = {
            "value": mean,
            "rounds": errors,
            "goal": None,
            "met": None,
        }
    return judged


def _compare_with(
    ttft_windows: Windows, samples: Mapping[str, Values], policy: str, baseline: str, goal: float
) -> dict[str, Any]:
    """By which share a policy's figures differ from another's; below 0 is better."""
    own_figures, baseline_figures = (
        _compute_mean_and_p99(
            np.concatenate([part for parts in ttft_windows[each] for part in parts])
        )
        for each in (policy, baseline)
    )
    # Draw by draw: an interval of each alone would ignore that both had the same load.
    ratios = samples[policy] / samples[baseline] - 1
    rounds = (
        _compute_round_means(ttft_windows[policy]) / _compute_round_means(ttft_windows[baseline])
        - 1
    )
    return {
        "policy": policy,
        "other": baseline,
        "goal": goal,
        "mean": _add_interval(own_figures[0] / baseline_figures[0] - 1, ratios[:, 0]),
        "p99": _add_interval(own_figures[1] / baseline_figures[1] - 1, ratios[:, 1]),
        "rounds": [_round_figure(each) for each in rounds],
    }


def _compute_mean_and_p99(values: Values) -> Values:
    return np.array((values.mean(), np.percentile(values, 99)))


def _compute_round_means(rounds: Sequence[Sequence[Values]]) -> Values:
    return np.array([np.concatenate(parts).mean() for parts in rounds])


def _add_interval(value: float, samples: Values) -> list[float]:
    """A value and its interval."""
    return [_round_figure(each) for each in (value, *find_interval(samples, 0.95))]


def _round_figure(value: Any) -> float:
    return round(float(value), 4)
