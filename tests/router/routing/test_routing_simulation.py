# SPDX-License-Identifier: Apache-2.0
"""The simulation of benchmarks/routing, as it is called, on traces so short that the answer is known."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.routing import hold_simulation, load_kinds, simulation_tables
from benchmarks.routing.fleet_simulation import simulate_case
from benchmarks.routing.mooncake_traces import TraceRow

ROOT = Path(__file__).parents[3]
SIMULATE = ROOT / "benchmarks" / "routing" / "simulate.py"
RESULTS = ROOT / "benchmarks" / "results" / "routing-simulation.json"
REPORT = RESULTS.with_name("2026-11-26-routing-simulation.md")
CASES = json.loads(SIMULATE.with_name("cases.json").read_text("utf-8"))
DEFAULT_CASE = {
    "name": "case",
    "kind": "recorded",
    "requests": 1000,
    "event": "",
    "instances": 1,
    "load": 1.0,
    "slow": 0,
    "cache": 1000,
    "noise": 0,
    "lag": 0,
    "index": "events",
}


def compute_prefill_s(tokens: int, cached: int) -> float:
    """Seconds of a prefill on a simulated instance."""
    return (
        0.005 + 40e-6 * (tokens - cached) + 1.3e-9 * (cached + 1 + tokens) * (tokens - cached) / 2
    )


def simulate_policies(folder: Path, rows: list[dict[str, Any]], **case: object) -> dict[str, Any]:
    """The results of all policies on this trace, the oracle's among them."""
    found: dict[str, Any] = play_case(folder, rows, (), case)["seeds"]["1"]
    assert list(found) == [*CASES["policies"], "oracle"]
    return found


def play_case(
    folder: Path, rows: list[dict[str, Any]], more: Sequence[str], case: Mapping[str, object]
) -> dict[str, Any]:
    """What is kept of one case on this trace."""
    (folder / "conversation_trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    listed = {"policies": CASES["policies"], "cases": [{**DEFAULT_CASE, **case}]}
    (folder / "cases.json").write_text(json.dumps(listed))
    command = [sys.executable, SIMULATE, "--traces", folder, "--list", folder / "cases.json", *more]
    subprocess.run([*command, "--json", folder / "out.json"], check=True, capture_output=True)
    case_results: dict[str, Any]
    (case_results,) = json.loads((folder / "out.json").read_text("utf-8"))["cases"]
    return case_results


def build_trace_row(at: int, tokens: int, *ids: int, output: int = 1) -> dict[str, Any]:
    """A line of a trace."""
    return {"timestamp": at, "input_length": tokens, "output_length": output, "hash_ids": ids}


def test_queue(tmp_path: Path) -> None:
    """One instance: first come first served, and who comes later finds what the first left."""
    rows = [
        build_trace_row(0, 1500, 1, 2, 3),
        build_trace_row(0, 1100, 1, 2, 4),
        build_trace_row(60_000, 100, 9),
    ]
    first, second, third = (
        compute_prefill_s(1500, 0),
        compute_prefill_s(1100, 1024),
        compute_prefill_s(100, 0),
    )
    mean = (first + first + second + third) / 3

    for name, found in simulate_policies(tmp_path, rows, load=1e-4).items():
        assert found["mean"] == pytest.approx(mean, abs=2e-5)
        assert found["hit"] == pytest.approx(1024 / 2700, abs=1e-5), name


def test_decodes(tmp_path: Path) -> None:
    """A prompt that comes while another one is answered waits for a step, and shares the next one with it."""
    rows = [
        build_trace_row(0, 512, 1, output=11),
        build_trace_row(1000, 512, 2),
        build_trace_row(60_000, 10, 9),
    ]
    prefill = compute_prefill_s(512, 0)

    for found in simulate_policies(tmp_path, rows, load=1e-5).values():
        # Nothing else runs: ten steps of 5 ms, one token, and what it reads of its context.
        steps = [0.005 + 40e-6 + 40e-9 * (512 + n) for n in range(1, 11)]
        assert found["tpot_p99"] == pytest.approx(sum(steps) / 10, rel=0.01)
        assert found["mean"] == pytest.approx(
            (2 * prefill + compute_prefill_s(10, 0)) / 3, rel=0.01
        )


def test_spread(tmp_path: Path) -> None:
    """Two instances and two long prompts at once: whoever looks at load uses both."""
    rows = [
        build_trace_row(0, 8000, *range(15)),
        build_trace_row(0, 8000, *range(100, 115)),
        build_trace_row(60_000, 10, 9),
    ]
    mean = (2 * compute_prefill_s(8000, 0) + compute_prefill_s(10, 0)) / 3

    results = simulate_policies(tmp_path, rows, load=1e-4, instances=2)

    # By hash, or at random until it has learned: an instance may be chosen twice.
    blind = ("session", "kvaware", "predicted_latency")
    for name in results.keys() - blind:
        assert results[name]["mean"] == pytest.approx(mean, abs=2e-5)


def test_same_again(tmp_path: Path) -> None:
    """The same seed gives the same numbers, with noise, lag and slow instances too."""
    rows = [build_trace_row(300 * n, 600 * (1 + n % 7), n % 5, n, n + 1000) for n in range(200)]
    case = {"instances": 4, "slow": 0.5, "noise": 0.3, "lag": 1, "index": "events"}

    one, other = (simulate_policies(tmp_path, rows, **case) for _ in range(2))

    for each in (*one.values(), *other.values()):
        each.pop("cpu", None)
    assert one == other
    assert one["calibrated"]["mean"] < one["round_robin"]["mean"]


def test_seeds(tmp_path: Path) -> None:
    """Other seeds draw the trace's sessions anew; what was kept of the first stays as it is."""
    rows = [build_trace_row(300 * n, 600 * (1 + n % 7), 0, 1 + n % 9, n + 1000) for n in range(100)]
    first = play_case(tmp_path, rows, ["--policies", "trapezoid", "calibrated"], {"instances": 2})
    few = ["--seeds", "2", "3", "--policies", "trapezoid"]

    found = play_case(tmp_path, rows, few, {"instances": 2})
    means = {seed: each["trapezoid"]["mean"] for seed, each in found["seeds"].items()}

    assert found["seeds"]["1"] == first["seeds"]["1"]
    assert len(set(means.values())) == 3
    assert all(0.2 < mean / means["1"] < 5 for mean in means.values())
    assert list(found["seeds"]["2"]) == ["trapezoid"]


def test_events(tmp_path: Path) -> None:
    """In the middle the only instance slows, or loses what it has cached."""
    rows = [build_trace_row(1000 * n, 1100, 1, 2) for n in range(10)]
    usual, slows, restarts = (
        simulate_policies(tmp_path, rows, load=1e-4, event=event)["calibrated"]
        for event in ("", "slows", "restarts")
    )
    cold, warm = compute_prefill_s(1100, 0), compute_prefill_s(1100, 1024)

    assert usual["mean"] == pytest.approx((cold + 9 * warm) / 10, abs=2e-5)
    assert slows["mean"] == pytest.approx((cold + 4 * warm + 5 * warm / 0.4) / 10, abs=2e-5)
    assert restarts["mean"] == pytest.approx((2 * cold + 8 * warm) / 10, abs=2e-5)


@pytest.mark.parametrize(("kept", "loads"), ((1, 3), (2, 2)))
def test_adapters(kept: int, loads: int) -> None:
    """An instance loads an adapter that is not among those that it keeps, and the prefill waits."""
    rows = tuple(
        TraceRow(float(at), 100, (), "", adapter=adapter) for at, adapter in enumerate((1, 1, 2, 1))
    )

    found = simulate_case({**DEFAULT_CASE, "load": 1e-4, "adapters": kept}, "decay", rows, 1)

    mean = compute_prefill_s(100, 0) + loads / 4 * 0.1
    assert found["mean"] == pytest.approx(mean, abs=2e-5)


def test_encoders() -> None:
    """Two encoders and three images at once: the last one waits for an encoder, its prompt for that."""
    rows = (*(TraceRow(0.0, 100, (), "", images=n) for n in (2, 1)), TraceRow(9.0, 100, (), ""))

    found = simulate_case({**DEFAULT_CASE, "load": 1e-4, "encoders": 2}, "decay", rows, 1)

    mean = compute_prefill_s(100, 0) + (0.04 + 0.08) / 3
    assert found["mean"] == pytest.approx(mean, abs=2e-5)


@pytest.mark.parametrize("kind", load_kinds.MADE_KINDS)
def test_made_kinds(kind: str) -> None:
    """Made arrivals are in order, and the same for the same seed."""
    rows, again, other = (load_kinds.read_rows(kind, ROOT, seed, 200) for seed in (1, 1, 2))

    assert rows == again != other
    assert all(one.arrival_s <= two.arrival_s for one, two in itertools.pairwise(rows))
    assert all(len(row.blocks) <= row.tokens // 512 and row.output_tokens > 0 for row in rows)


def test_listed() -> None:
    """Every result that is kept is of a case that was written down; two seeds have all policies.

    The predictor takes ten times as long, and has a single seed in most cases; seeds from the third on may
    have the best policies only.
    """
    kept = json.loads(RESULTS.read_text("utf-8"))
    listed = {case["name"]: case for case in CASES["cases"]}
    assert [case["name"] for case in kept["cases"]] == list(listed)

    for case in kept["cases"]:
        assert listed[case["name"]].items() <= case.items()
        for number, found in enumerate(case["seeds"].values()):
            wanted = (
                {*CASES["policies"], "oracle"} if number < 2 else {"calibrated", "decay", "oracle"}
            )
            assert wanted - found.keys() <= ({"predicted_latency"} if number else set())


def test_who_lacks_a_seed_is_not_the_best() -> None:
    """A policy that has the easy seed alone has a low mean, and is not compared with those of all seeds."""
    figures = {name: {"mean": mean} for name, mean in (("calibrated", 1.1), ("decay", 1.0))}
    hard = {name: {"mean": 10 * each["mean"]} for name, each in figures.items()}
    case = {"seeds": {"1": {**figures, "llmd": {"mean": 1.05}}, "2": hard}}
    lag = simulation_tables.compute_lag(case, "mean")

    assert (lag.best, round(lag.behind, 3)) == ("decay", 0.1)
    assert simulation_tables.compute_mean(case, "calibrated", "mean", "llmd") == 1.1


@pytest.mark.full
def test_pictures(tmp_path: Path) -> None:
    """The picture that the docs show is made of the kept results."""
    command = [sys.executable, SIMULATE.with_name("simulation_plots.py"), "--to", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = tmp_path.iterdir()

    assert all(case["name"] in made.read_text("utf-8") for case in CASES["cases"])
    assert (ROOT / "docs" / "img" / made.name).is_file()
    assert f"(img/{made.name})" in (ROOT / "docs" / "routing.md").read_text("utf-8")


def test_page() -> None:
    """The report shows the kept results, all of them."""
    command = [sys.executable, SIMULATE, "--traces", ".", "--cases", "--table"]
    kept = ["--json", RESULTS]
    shown = subprocess.run([*command, *kept], capture_output=True, text=True, check=True).stdout

    page = REPORT.read_text("utf-8")
    tables = shown.split("\n\n")
    assert len(tables) == 3
    assert all(len(each.splitlines()) > 5 and each.strip() in page for each in tables)


@pytest.mark.parametrize(("instances", "load"), [(1, 0.85), (4, 3.0)])
def test_a_hold_serves_short_prompts_sooner_and_all_no_later(instances: int, load: float) -> None:
    """With --max-queue-ms short prompts behind long ones have a lower p99, and all a lower mean."""
    rows = load_kinds.read_rows("heavy_tails", ROOT, 1, 400)
    case = {**DEFAULT_CASE, "kind": "heavy_tails", "instances": instances, "load": load}

    without, held = (hold_simulation.simulate_hold(case, rows, 1, limit) for limit in (0.0, 0.25))

    assert held["held"] > 0.1 and not without["held"]
    assert held["mean"] < without["mean"]
    assert held["short_p99"] < 0.9 * without["short_p99"]
