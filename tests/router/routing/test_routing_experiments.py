# SPDX-License-Identifier: Apache-2.0
"""The pure parts of benchmarks/routing/experiments.py: loads, turns, intervals, tables and pictures."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.routing import experiment_statistics
from benchmarks.routing.experiment_loads import (
    EXPERIMENTS,
    MEASURED_POLICIES,
    ROUTER_FLAGS_BY_POLICY,
    SINGLE_PROMPT_FLAGS,
    WARMUP_FLAGS,
    order_policies,
)
from benchmarks.routing.experiment_pages import (
    draw_experiment,
    format_experiment_table,
    format_interference,
)
from benchmarks.routing.experiment_statistics import (
    compare_policies,
    compute_capacity,
    compute_experiment_figures,
    compute_mape,
    draw_bootstrap_samples,
    list_mapes,
)
from ttft_otel.commands.bench import bench
from ttft_otel.commands.router.command import command as router
from ttft_otel.router.routing.policies.prefill_model import PredictionQuality

ROOT = Path(__file__).parents[3]

RESULTS = ROOT / "benchmarks" / "results"
LIVE_RESULTS = RESULTS / "routing-live.json"


@pytest.fixture(autouse=True, scope="module")
def remembered_draws() -> Iterator[None]:
    """Draw from equal windows once: two thousand draws take half a second, and tables, pictures and
    figures of the same runs need the same ones (test_draws)."""
    known: dict[bytes, Any] = {}

    def draw_once(windows: Any) -> Any:
        key = pickle.dumps(windows)
        if key not in known:
            known[key] = draw_bootstrap_samples(windows)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment_statistics, "draw_bootstrap_samples", draw_once)
        yield


def build_run(policy: str, number: int, *ttfts: float, **more: Any) -> dict[str, Any]:
    """A run whose requests are 4 s apart: a thousand prompt tokens each, a hundred of them cached."""
    rows = [[4000 * place, ttft, 1000, 100, ttft] for place, ttft in enumerate(ttfts)]
    name = {"experiment": "shared-prefix", "policy": policy, "round": number}
    return {**name, "requests": rows, **more}


def build_three_rounds(factor: float = 1.0) -> list[dict[str, Any]]:
    """Three rounds in which `qps` takes exactly twice as long as `trapezoid`."""
    rounds = ([100, 300, 200, 600], [400, 100, 100, 200], [300, 300, 100, 500])
    return [
        build_run(policy, number, *(each * times * factor for each in ttfts))
        for number, ttfts in enumerate(rounds, 1)
        for policy, times in (("trapezoid", 1), ("qps", 2))
    ]


def build_results(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """As experiments.py keeps them."""
    results: dict[str, Any] = {"runs": runs, "warm": {}}
    return {**results, "figures": compute_experiment_figures(results, "shared-prefix")}


def test_ratio() -> None:
    """A policy that always takes half as long has -50 % and no doubt about it, whatever the rounds do.

    Means and rounds are in seconds, the interval holds the mean, and cached is a share of tokens.
    """
    weighed = compare_policies(build_three_rounds(), "shared-prefix")

    (against,) = weighed["against"]
    assert [against[each] for each in ("mean", "p99", "rounds")] == [[-0.5] * 3] * 3
    each = weighed["policies"]["trapezoid"]
    value, low, high = each["mean"]
    assert value == pytest.approx(3.2 / 12, abs=1e-4)
    assert low < value < high
    assert each["rounds"] == [0.3, 0.2, 0.3]
    assert each["cached"] == 0.1
    assert each["requests"] == 12


def test_incomplete() -> None:
    """A round that lacks a policy, or its answers, does not count; nor do other experiments."""
    other = {**build_run("kvaware", 1, 1), "experiment": "multi-round"}
    lone = (build_run("trapezoid", 4, 9), build_run("trapezoid", 5, 9), build_run("qps", 5))
    runs = [*build_three_rounds(), *lone, other]

    assert compare_policies(runs, "shared-prefix")["rounds"] == 3
    assert compare_policies([build_run("qps", 1)], "shared-prefix") == {}
    assert build_results([])["figures"] == {}


FIGURES = ("trapezoid_to_qps", "calibrated_to_trapezoid")


def test_figures() -> None:
    """Goals are met by what was measured, missed ones are said to be."""
    slow = [
        {**each, "policy": "calibrated"}
        for each in build_three_rounds(1.1)
        if each["policy"] == "trapezoid"
    ]

    found = build_results([*build_three_rounds(), *slow])["figures"]

    fast, late = (found[f"shared_prefix_{each}"] for each in FIGURES)
    assert (fast["met"], fast["goal"], late["met"]) == (True, -0.15, False)
    assert late["value"] == pytest.approx(0.1)


@pytest.mark.parametrize(("rounds", "more"), [(2, {}), (3, {"valid": False})])
def test_undecided(rounds: int, more: dict[str, Any]) -> None:
    """Nothing is met or missed by fewer than three rounds, nor where the load itself was late."""
    runs = [{**each, **more} for each in build_three_rounds() if each["round"] <= rounds]

    figure = build_results(runs)["figures"]["shared_prefix_trapezoid_to_qps"]

    assert (figure["met"], figure["value"] < -0.15) == (None, True)
    assert "not decided" in format_experiment_table(build_results(runs), "shared-prefix")


def build_predictions(counts: list[int], errors: list[float]) -> dict[str, Any]:
    """What a router says of its instances after so many answers each."""
    return {
        "instances": [
            {"url": str(place), "predictions": {"outcomes": count, "mape": error}}
            for place, (count, error) in enumerate(zip(counts, errors, strict=True))
        ]
    }


def test_mape() -> None:
    """A run's own error comes out of what the router says before and after it, by its own measure."""
    quality = [PredictionQuality(), PredictionQuality()]
    for number in range(30):
        for each in quality:
            each.add_outcome(1.5 if number % 2 else 1.0, 1.0)
    before = build_predictions([30, 30], [each.mape or 0 for each in quality])
    for _ in range(40):
        quality[0].add_outcome(1.2, 1.0)
    after = build_predictions([70, 30], [each.mape or 0 for each in quality])
    unjudged = {"instances": [{"url": "0", "results": {}, "predictions": None}]}

    assert compute_mape(before, after) == pytest.approx(0.2, abs=1e-4)
    assert compute_mape(None, before) == pytest.approx(0.25, abs=0.01)
    assert compute_mape(None, unjudged) is None


def test_mapes() -> None:
    """A run of `calibrated` starts from the one before, of any experiment; the first from the warm-up."""
    learned = ((20, 0.5), (60, 0.3), (90, 0.3))
    states = [build_predictions([count], [error]) for count, error in learned]
    own = build_run("calibrated", 1, 1, learnt=states[1])
    runs = [own, {**own, "experiment": "multi-round", "learnt": states[2]}]
    found = {"runs": runs, "warm": {"calibrated": states[0]}}

    assert list_mapes(found, "shared-prefix") == [compute_mape(states[0], states[1])]
    assert list_mapes(found, "multi-round") == [0.3]


def test_capacity() -> None:
    """Two servers that take half a second for each request do four a second, however the run ends."""
    rows = [[0, 0, 1, 0, 500 * (1 + place // 2)] for place in range(40)]

    assert compute_capacity([*rows, [0, 0, 1, 0, 60_000]], 8) == pytest.approx(4, rel=0.05)


@pytest.mark.full  # all of the pictures are drawn
def test_page() -> None:
    """Both reports show their kept results; the pictures are of the one with all loads."""
    found = json.loads(LIVE_RESULTS.read_text("utf-8"))
    latest = json.loads((RESULTS / "routing-live-2.json").read_text("utf-8"))

    for day, results in (("22", found), ("26", latest)):
        page = (RESULTS / f"2026-11-{day}-routing-live.md").read_text("utf-8")
        for name in {run["experiment"] for run in results["runs"]}:
            assert f"<!-- {name} -->\n{format_experiment_table(results, name)}<!-- end" in page
        assert format_interference(results) in page
    for name in EXPERIMENTS:
        drawn = ROOT / "docs" / "img" / f"routing-{name}.svg"
        assert drawn.read_text("utf-8") == draw_experiment(found, name)


def test_order() -> None:
    """Every round has all policies, the second one backwards, and in ten each is nearly as often first."""
    rounds = [order_policies(MEASURED_POLICIES, number) for number in range(10)]

    assert all(sorted(each) == sorted(MEASURED_POLICIES) for each in rounds)
    assert rounds[0] == list(MEASURED_POLICIES)
    assert rounds[1] == rounds[0][::-1]
    assert {each[0] for each in rounds} == set(MEASURED_POLICIES)


def test_seed() -> None:
    """Loads differ in nothing but their seed."""
    for each in EXPERIMENTS.values():
        pairs = zip(each.build_load_flags(1), each.build_load_flags(2), strict=True)
        assert [a for a, b in pairs if a != b] == ["1"]


def test_bench_takes_loads() -> None:
    """`ttft-otel bench` knows all flags of the loads."""
    paced = [replace(each, rate=2) for each in EXPERIMENTS.values()]
    loads = [each.build_load_flags(1) for each in paced]
    loads += [each.build_saturation_flags(1) for each in paced if each.share]
    for flags in (*loads, WARMUP_FLAGS, SINGLE_PROMPT_FLAGS):
        given = bench.make_context("bench", ["--url", "http://127.0.0.1:1", *flags]).params
        assert str(given["input_len"]) in flags


def test_router_takes_policies() -> None:
    """`ttft-otel router` knows all flags of the policies."""
    for flags in ROUTER_FLAGS_BY_POLICY.values():
        given = router.make_context("router", ["--backend", "http://127.0.0.1:1", *flags]).params
        reads = given["routing_logic"] in ("ttft", "kvaware")
        assert given["prefix_index"] == ("kv-events" if reads else "history")


def test_decision_costs() -> None:
    """The report's table of what a decision costs is what decision_cost.py measured and kept."""
    told = json.loads((RESULTS / "routing-decision.json").read_text("utf-8"))
    page = (RESULTS / "2026-11-22-routing-costs.md").read_text("utf-8")

    for size in (2, 16, 128, 1000):
        parts = ("lookup", "score", "decision", "decision, trapezoid", "accounts")
        values = [told[f"us of {part}, {size} instances"]["value"] for part in parts]
        row = " | ".join(f"{value:,.0f}".replace(",", " ") for value in (size, *values))
        assert f"| {row} |\n" in page
