# SPDX-License-Identifier: Apache-2.0
"""What the runs of experiments.py say: means, p99 and differences with intervals; pure, and used by draw.py.

A run is a dict with experiment, policy, round and requests [[sent, ttft, prompt, cached], ...] in
milliseconds and tokens. Intervals are of 95 %, from draws of whole rounds and, in each drawn round, of
windows of ten seconds of its load, the same ones for all policies: requests that wait in one queue are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

WINDOW: Final = 10_000.0
DRAWS: Final = 2000
KEEP: Final = 0.99  # router/policies/model.py's Quality
FEW: Final = 3  # rounds; of fewer nothing follows
BETTER: Final = -0.15  # what the first policy's mean TTFT shall have less than kvaware's and qps's
AGAINST: Final = (
    ("trapezoid", "kvaware", BETTER),
    ("trapezoid", "qps", BETTER),
    ("calibrated", "trapezoid", 0.0),
)

Values = NDArray[np.float64]
Windows = dict[str, list[list[Values]]]  # by policy: rounds, and in each the TTFTs of every window


def complete(runs: Sequence[Mapping[str, Any]], experiment: str) -> dict[str, list[Any]]:
    """Each policy's runs of the rounds in which all policies of this experiment had their turn."""
    own = [run for run in runs if run["experiment"] == experiment and run["requests"]]
    policies = list(dict.fromkeys(run["policy"] for run in own))
    rounds: dict[int, dict[str, Any]] = {}
    for run in own:
        rounds.setdefault(run["round"], {})[run["policy"]] = run
    whole = [rounds[number] for number in sorted(rounds) if len(rounds[number]) == len(policies)]
    return (
        {policy: [each[policy] for each in whole] for policy in sorted(policies)} if whole else {}
    )


def windows(by: Mapping[str, Sequence[Any]]) -> Windows:
    """TTFTs in seconds by policy, round and window."""
    found: Windows = {policy: [] for policy in by}
    for each in zip(*by.values(), strict=True):  # the runs of one round
        last = max(row[0] for run in each for row in run["requests"])
        count = int(last // WINDOW) + 1
        for policy, run in zip(by, each, strict=True):
            parts: list[list[float]] = [[] for _ in range(count)]
            for row in run["requests"]:
                parts[int(row[0] // WINDOW)].append(row[1] / 1e3)
            found[policy].append([np.array(part) for part in parts])
    return found


def draws(found: Windows, count: int = DRAWS, seed: int = 0) -> dict[str, Values]:
    """Each policy's (mean, p99) of so many drawn samples, seconds."""
    chance = np.random.default_rng(seed)
    rounds = next(iter(found.values()))
    drawn: dict[str, list[Values]] = {policy: [] for policy in found}
    while len(next(iter(drawn.values()))) < count:
        cells = [
            (number, place)
            for number in chance.integers(0, len(rounds), len(rounds))
            for place in chance.integers(0, len(rounds[number]), len(rounds[number]))
        ]
        sample = {
            policy: np.concatenate([parts[number][place] for number, place in cells])
            for policy, parts in found.items()
        }
        if all(each.size for each in sample.values()):
            for policy, each in sample.items():
                drawn[policy].append(_both(each))
    return {policy: np.array(rows) for policy, rows in drawn.items()}


def weigh(runs: Sequence[Mapping[str, Any]], experiment: str) -> dict[str, Any]:
    """Policies' figures and the differences of AGAINST; {} where no round is complete."""
    by = complete(runs, experiment)
    if not by:
        return {}
    found = windows(by)
    drawn = draws(found)
    policies = {}
    for policy, rounds in found.items():
        every = np.concatenate([part for parts in rounds for part in parts])
        tokens = np.array([row[2:4] for run in by[policy] for row in run["requests"]], dtype=float)
        policies[policy] = {
            "requests": int(every.size),
            "mean": _shown(_both(every)[0], drawn[policy][:, 0]),
            "p99": _shown(_both(every)[1], drawn[policy][:, 1]),
            "rounds": [_short(each) for each in _means(rounds)],
            "cached": _short(tokens[:, 1].sum() / max(1.0, tokens[:, 0].sum())),
        }
    pairs = [each for each in AGAINST if each[0] in found and each[1] in found]
    return {
        "policies": policies,
        "rounds": len(next(iter(by.values()))),
        "against": [_against(found, drawn, *each) for each in pairs],
    }


def capacity(requests: Sequence[Sequence[float]], at_once: int) -> float:
    """Requests per second of a closed loop, its beginning and end left out, where not all are busy."""
    ends = sorted(row[0] + row[4] for row in requests)[at_once : -at_once or None]
    return (len(ends) - 1) / (ends[-1] - ends[0]) * 1e3


def mape(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> float | None:
    """The error of one run's predictions, from what a router says of its instances before and after it.

    A router weighs each outcome 1 % less than the next one, so older ones can be taken out.
    """
    old = {each["url"]: each for each in before["instances"]} if before else {}
    error = weight = 0.0
    for each in after["instances"]:
        if not each.get("predictions"):
            continue
        last = old.get(each["url"], {})
        known = _outcomes(last)
        new = _outcomes(each) - known
        own = each["predictions"]["mape"] * _weight(known + new)
        if known:
            own -= KEEP**new * last["predictions"]["mape"] * _weight(known)
        error, weight = error + own, weight + _weight(new)
    return _short(error / weight) if weight else None


def mapes(found: Mapping[str, Any], experiment: str) -> list[float]:
    """Of each run of `calibrated`, in turn; its router had no other requests in between."""
    before, each = found.get("warm", {}).get("calibrated"), []
    for run in found["runs"]:
        if run["policy"] == "calibrated" and run.get("learnt"):
            error = mape(before, run["learnt"])
            before = run["learnt"]
            if run["experiment"] == experiment and error is not None:
                each.append(error)
    return each


def _outcomes(instance: Mapping[str, Any]) -> int:
    return int((instance.get("predictions") or {}).get("outcomes", 0))


def _weight(count: int) -> float:
    return (1 - KEEP**count) / (1 - KEEP)


def late(found: Mapping[str, Any], experiment: str) -> int:
    """In how many runs the load itself was later than `ttft-otel bench` lets pass."""
    runs = (run for run in found["runs"] if run["experiment"] == experiment)
    return sum(not run.get("valid", True) for run in runs)


def figures(found: Mapping[str, Any], experiment: str) -> dict[str, Any]:
    """{figure: {value, goal, met}} of one experiment, shares of the other policy's mean TTFT."""
    own: dict[str, Any] = {}
    prefix = experiment.replace("-", "_")
    weighed = weigh(found["runs"], experiment)
    decided = bool(weighed) and weighed["rounds"] >= FEW and not late(found, experiment)
    for each in weighed.get("against", ()):
        met = each["mean"][0] <= each["goal"] if each["goal"] else each["mean"][0] < 0
        own[f"{prefix}_{each['policy']}_to_{each['other']}"] = {
            "value": each["mean"][0],
            "interval": each["mean"][1:],
            "rounds": each["rounds"],
            "goal": each["goal"],
            "met": bool(met) if decided else None,
        }
    if errors := mapes(found, experiment):
        mean = _short(sum(errors) / len(errors))
        own[f"{prefix}_calibrated_mape"] = {
            "value": mean,
            "rounds": errors,
            "goal": None,
            "met": None,
        }
    return own


def _against(
    found: Windows, drawn: Mapping[str, Values], policy: str, other: str, goal: float
) -> dict[str, Any]:
    """By which share a policy's figures differ from another's; below 0 is better."""
    one, base = (
        _both(np.concatenate([part for parts in found[each] for part in parts]))
        for each in (policy, other)
    )
    ratios = drawn[policy] / drawn[other] - 1
    rounds = _means(found[policy]) / _means(found[other]) - 1
    return {
        "policy": policy,
        "other": other,
        "goal": goal,
        "mean": _shown(one[0] / base[0] - 1, ratios[:, 0]),
        "p99": _shown(one[1] / base[1] - 1, ratios[:, 1]),
        "rounds": [_short(each) for each in rounds],
    }


def _both(values: Values) -> Values:
    return np.array((values.mean(), np.percentile(values, 99)))


def _means(rounds: Sequence[Sequence[Values]]) -> Values:
    return np.array([np.concatenate(parts).mean() for parts in rounds])


def _shown(value: float, drawn: Values) -> list[float]:
    """A value and its interval."""
    return [_short(each) for each in (value, *np.percentile(drawn, (2.5, 97.5)))]


def _short(value: Any) -> float:
    return round(float(value), 4)
