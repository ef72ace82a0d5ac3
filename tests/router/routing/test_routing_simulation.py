# SPDX-License-Identifier: Apache-2.0
"""The simulation of benchmarks/routing, as it is called, on traces so short that the answer is known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SIMULATE = ROOT / "benchmarks" / "routing" / "simulate.py"
RESULTS = ROOT / "benchmarks" / "results" / "routing-simulation.json"
REPORT = RESULTS.with_name("2026-11-22-routing-simulation.md")
CASES = json.loads(SIMULATE.with_name("cases.json").read_text("utf-8"))
DEFAULT_CASE = {
    "name": "case",
    "trace": "conversation",
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
    case_results = play_case(folder, rows, (), case)
    assert list(case_results["results"]) == CASES["policies"]
    return {**case_results["results"], "oracle": {"mean": case_results["seeds"]["1"]["oracle"]}}


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


def build_trace_row(at: int, tokens: int, *ids: int) -> dict[str, Any]:
    """A line of a trace."""
    return {"timestamp": at, "input_length": tokens, "output_length": 1, "hash_ids": ids}


def test_queue(tmp_path: Path) -> None:
    """One instance: first come first served, and the second finds what the first left."""
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
        assert name == "oracle" or found["hit"] == pytest.approx(1024 / 2700, abs=1e-5)


def test_spread(tmp_path: Path) -> None:
    """Two instances and two long prompts at once: whoever looks at load uses both."""
    rows = [
        build_trace_row(0, 9000, *range(18)),
        build_trace_row(0, 9000, *range(100, 118)),
        build_trace_row(60_000, 10, 9),
    ]
    mean = (2 * compute_prefill_s(9000, 0) + compute_prefill_s(10, 0)) / 3

    results = simulate_policies(tmp_path, rows, load=1e-4, instances=2)

    lookers = ("least_requests", "trapezoid", "calibrated", "tokens", "batch", "decay")
    for name in (*lookers, "oracle"):
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
    means = {seed: each["trapezoid"] for seed, each in found["seeds"].items()}

    assert found["results"] == first["results"]
    assert len(set(means.values())) == 3
    assert all(0.2 < mean / means["1"] < 5 for mean in means.values())
    assert set(found["seeds"]["2"]) == {"trapezoid", "alone"}


def test_alone(tmp_path: Path) -> None:
    """No policy is below the mean of prefills that never wait and find all that any before them had."""
    rows = [
        build_trace_row(0, 1500, 1, 2, 3),
        build_trace_row(0, 1100, 1, 2, 4),
        build_trace_row(60_000, 1100, 1, 2, 5),
    ]
    alone = (compute_prefill_s(1500, 0) + 2 * compute_prefill_s(1100, 1024)) / 3

    found = play_case(tmp_path, rows, [], {"instances": 2, "load": 1e-4})

    assert found["seeds"]["1"]["alone"] == pytest.approx(alone, abs=2e-5)
    assert all(mean >= alone - 2e-5 for mean in found["seeds"]["1"].values())


def test_listed() -> None:
    """Every result that is kept is of a case that was written down, with all of its policies."""
    kept = json.loads(RESULTS.read_text("utf-8"))
    listed = {case["name"]: case for case in CASES["cases"]}
    assert [case["name"] for case in kept["cases"]] == list(listed)

    for case in kept["cases"]:
        assert listed[case["name"]].items() <= case.items()
        # Those that were measured also have a policy that there is no more.
        assert set(case["results"]) == {*CASES["policies"], "qps"}
        assert {"alone", *CASES["policies"]} <= set(case["seeds"]["1"])


def test_pictures(tmp_path: Path) -> None:
    """The pictures show every kept case and every size of fleet, and the report shows the pictures."""
    command = [sys.executable, SIMULATE.with_name("simulation_plots.py"), "--to", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    page = REPORT.read_text("utf-8")
    gains, load = sorted(tmp_path.iterdir())

    assert all(case["name"] in gains.read_text("utf-8") for case in CASES["cases"])
    assert all(f"{size} instances" in load.read_text("utf-8") for size in (4, 8, 64))
    for each in (gains, load):
        assert (ROOT / "docs" / "img" / each.name).is_file()
        assert f"(../../docs/img/{each.name})" in page


def test_page() -> None:
    """The report shows the kept results, all of them."""
    command = [sys.executable, SIMULATE, "--traces", ".", "--cases", "--table"]
    kept = ["--json", RESULTS]
    shown = subprocess.run([*command, *kept], capture_output=True, text=True, check=True).stdout

    page = REPORT.read_text("utf-8")
    tables = shown.split("\n\n")
    assert len(tables) == 3
    assert all(len(each.splitlines()) > 5 and each.strip() in page for each in tables)
