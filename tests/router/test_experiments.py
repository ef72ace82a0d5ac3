# SPDX-License-Identifier: Apache-2.0
"""The pure parts of benchmarks/routing/experiments.py: loads, turns, intervals, tables and pictures."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ttft_otel.bench.command import bench
from ttft_otel.router.command import command as router
from ttft_otel.router.policies.model import Quality

ROOT = Path(__file__).parents[2]
ROUTING = ROOT / "benchmarks" / "routing"
sys.path.insert(0, str(ROUTING))
from draw import apart, paged, picture, table  # noqa: E402
from experiments import Clock, options  # noqa: E402
from loads import EXPERIMENTS, POLICIES, ROUTERS, SINGLE, WARM, order  # noqa: E402
from weigh import capacity, complete, draws, figures, mape, mapes, weigh, windows  # noqa: E402

KEPT = ROUTING / "live.json"


def run(policy: str, number: int, *ttfts: float, **more: Any) -> dict[str, Any]:
    """A run whose requests are 4 s apart: a thousand prompt tokens each, a hundred of them cached."""
    rows = [[4000 * place, ttft, 1000, 100, ttft] for place, ttft in enumerate(ttfts)]
    name = {"experiment": "shared-prefix", "policy": policy, "round": number}
    return {**name, "requests": rows, **more}


def three(factor: float = 1.0) -> list[dict[str, Any]]:
    """Three rounds in which `qps` takes exactly twice as long as `trapezoid`."""
    rounds = ([100, 300, 200, 600], [400, 100, 100, 200], [300, 300, 100, 500])
    return [
        run(policy, number, *(each * times * factor for each in ttfts))
        for number, ttfts in enumerate(rounds, 1)
        for policy, times in (("trapezoid", 1), ("qps", 2))
    ]


def kept(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """As experiments.py keeps them."""
    found: dict[str, Any] = {"runs": runs, "warm": {}}
    return {**found, "figures": figures(found, "shared-prefix")}


def test_ratio() -> None:
    """A policy that always takes half as long has -50 % and no doubt about it, whatever the rounds do."""
    weighed = weigh(three(), "shared-prefix")

    (against,) = weighed["against"]
    assert against["mean"] == [-0.5, -0.5, -0.5]
    assert against["p99"] == [-0.5, -0.5, -0.5]
    assert against["rounds"] == [-0.5, -0.5, -0.5]


def test_means() -> None:
    """Means and rounds are in seconds, the interval holds the mean, and cached is a share of tokens."""
    each = weigh(three(), "shared-prefix")["policies"]["trapezoid"]

    value, low, high = each["mean"]
    assert value == pytest.approx(3.2 / 12, abs=1e-4)
    assert low < value < high
    assert each["rounds"] == [0.3, 0.2, 0.3]
    assert each["cached"] == 0.1
    assert each["requests"] == 12


def test_windows() -> None:
    """Requests fall into windows of ten seconds by when they were sent."""
    found = windows(complete(three(), "shared-prefix"))

    assert [len(part) for part in found["qps"][0]] == [3, 1]
    assert found["qps"][0][1] == pytest.approx([1.2])


def test_draws() -> None:
    """Every draw gives all policies the same rounds and windows, and the same seed the same draws."""
    found = windows(complete(three(), "shared-prefix"))

    one, other = draws(found, 50), draws(found, 50)

    assert one["qps"] == pytest.approx(2 * one["trapezoid"])
    assert one["qps"] == pytest.approx(other["qps"])


def test_incomplete() -> None:
    """A round that lacks a policy, or its answers, does not count; nor do other experiments."""
    other = {**run("kvaware", 1, 1), "experiment": "multi-round"}
    runs = [*three(), run("trapezoid", 4, 9), run("trapezoid", 5, 9), run("qps", 5), other]

    assert weigh(runs, "shared-prefix")["rounds"] == 3
    assert weigh([run("qps", 1)], "shared-prefix") == {}
    assert kept([])["figures"] == {}


def test_figures() -> None:
    """Goals are met by what was measured, missed ones are said to be."""
    slow = [
        run("calibrated", n, *(row[1] * 1.1 for row in each["requests"]))
        for n, each in enumerate((each for each in three() if each["policy"] == "trapezoid"), 1)
    ]

    found = kept([*three(), *slow])["figures"]

    assert found["shared_prefix_trapezoid_to_qps"]["met"] is True
    assert found["shared_prefix_trapezoid_to_qps"]["goal"] == -0.15
    assert found["shared_prefix_calibrated_to_trapezoid"]["met"] is False
    assert found["shared_prefix_calibrated_to_trapezoid"]["value"] == pytest.approx(0.1)


@pytest.mark.parametrize(("rounds", "more"), [(2, {}), (3, {"valid": False})])
def test_undecided(rounds: int, more: dict[str, Any]) -> None:
    """Nothing is met or missed by fewer than three rounds, nor where the load itself was late."""
    runs = [{**each, **more} for each in three() if each["round"] <= rounds]

    figure = kept(runs)["figures"]["shared_prefix_trapezoid_to_qps"]

    assert (figure["met"], figure["value"] < -0.15) == (None, True)
    assert "not decided" in table(kept(runs), "shared-prefix")


def told(counts: list[int], errors: list[float]) -> dict[str, Any]:
    """What a router says of its instances after so many answers each."""
    return {
        "instances": [
            {"url": str(place), "predictions": {"outcomes": count, "mape": error}}
            for place, (count, error) in enumerate(zip(counts, errors, strict=True))
        ]
    }


def test_mape() -> None:
    """A run's own error comes out of what the router says before and after it, by its own measure."""
    quality = [Quality(), Quality()]
    for number in range(30):
        for each in quality:
            each.add(1.5 if number % 2 else 1.0, 1.0)
    before = told([30, 30], [each.mape or 0 for each in quality])
    for _ in range(40):
        quality[0].add(1.2, 1.0)
    after = told([70, 30], [each.mape or 0 for each in quality])

    assert mape(before, after) == pytest.approx(0.2, abs=1e-4)
    assert mape(None, before) == pytest.approx(0.25, abs=0.01)
    assert mape(None, {"instances": [{"url": "0", "results": {}, "predictions": None}]}) is None


def test_mapes() -> None:
    """A run of `calibrated` starts from the one before, of any experiment; the first from the warm-up."""
    states = [told([20], [0.5]), told([60], [0.3]), told([90], [0.3])]
    own = run("calibrated", 1, 1, learnt=states[1])
    runs = [own, {**own, "experiment": "multi-round", "learnt": states[2]}]
    found = {"runs": runs, "warm": {"calibrated": states[0]}}

    assert mapes(found, "shared-prefix") == [mape(states[0], states[1])]
    assert mapes(found, "multi-round") == [0.3]


def test_capacity() -> None:
    """Two servers that take half a second for each request do four a second, however the run ends."""
    rows = [[0, 0, 1, 0, 500 * (1 + place // 2)] for place in range(40)]

    assert capacity([*rows, [0, 0, 1, 0, 60_000]], 8) == pytest.approx(4, rel=0.05)


def test_table() -> None:
    """The table says each policy's mean and each goal's outcome."""
    shown = table(kept(three()), "shared-prefix")

    assert "| `trapezoid` | 12 | 0.27 (" in shown
    assert "| `trapezoid` to `qps` | -50% (-50% to -50%) |" in shown
    assert shown.endswith("| -15% | met |\n")
    assert table(kept([]), "shared-prefix") == ""


def test_table_admits() -> None:
    """The table says the load, that rounds were too few, and in how many runs the load was late."""
    runs = [run(policy, 1, 1, valid=policy != "qps") for policy in ("qps", "trapezoid")]

    shown = table({**kept(runs), "loads": {"shared-prefix": ["--rate", "2"]}}, "shared-prefix")

    assert "Load: `--rate 2`" in shown
    assert "Fewer than three rounds" in shown
    assert "the load itself was late (p99 over 5 ms): 1." in shown


def test_paged() -> None:
    """Tables are put between their marks, in the place of older ones; a page without marks is refused."""
    page = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n"

    assert paged(page, "x", "new\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no marks for y"):
        paged(page, "y", "new\n")


def test_apart() -> None:
    """The sentence says by how much both servers together are slower."""
    found = {"apart": {"alone": 1.0, "together": 1.25}}

    assert "took 1.00 s on one server alone, 1.25 s with both at work (+25%)" in apart(found)
    assert apart({}) == ""


def test_page() -> None:
    """docs/routing.md shows the kept results with their pictures, all of them."""
    found = json.loads(KEPT.read_text("utf-8"))
    page = (ROOT / "docs" / "routing.md").read_text("utf-8")

    for name in EXPERIMENTS:
        assert f"<!-- {name} -->\n{table(found, name)}<!-- end" in page
        drawn = ROOT / "docs" / "img" / f"routing-{name}.svg"
        assert drawn.read_text("utf-8") == picture(found, name)
    assert apart(found) in page


@pytest.mark.parametrize("factor", [0.001, 1, 1000])
def test_picture(factor: float) -> None:
    """The picture is valid, and everything drawn is inside of it."""
    drawn = ET.fromstring(picture(kept(three(factor)), "shared-prefix"))

    width, height = map(float, drawn.attrib["viewBox"].split()[2:])
    circles = drawn.findall("{*}circle")
    assert len(circles) == 2 * 2 + 2 * 3  # mean and p99, and the means of three rounds
    for each in circles:
        assert 0 < float(each.attrib["cx"]) < width
        assert 0 < float(each.attrib["cy"]) < height


def test_order() -> None:
    """Every round has all policies, the second one backwards, and in ten each is nearly as often first."""
    rounds = [order(POLICIES, number) for number in range(10)]

    assert all(sorted(each) == sorted(POLICIES) for each in rounds)
    assert rounds[0] == list(POLICIES)
    assert rounds[1] == rounds[0][::-1]
    assert {each[0] for each in rounds} == set(POLICIES)


def test_seed() -> None:
    """Loads differ in nothing but their seed."""
    for experiment in EXPERIMENTS.values():
        assert [
            a for a, b in zip(experiment.load(1), experiment.load(2), strict=True) if a != b
        ] == ["1"]


def test_bench_takes_loads() -> None:
    """`ttft-otel bench` knows all flags of the loads."""
    paced = [replace(each, rate=2) for each in EXPERIMENTS.values()]
    full = [each.full(1) for each in paced if each.share]
    for flags in (*(each.load(1) for each in paced), *full, list(WARM), list(SINGLE)):
        given = bench.make_context("bench", ["--url", "http://127.0.0.1:1", *flags]).params
        assert given["dataset"] in flags


def test_router_takes_policies() -> None:
    """`ttft-otel router` knows all flags of the policies."""
    for flags in ROUTERS.values():
        given = router.make_context("router", ["--backend", "http://127.0.0.1:1", *flags]).params
        reads = given["routing_logic"] in ("ttft", "kvaware")
        assert given["prefix_index"] == ("kv-events" if reads else "history")


def test_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round begins only if all policies still fit into the time."""
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    experiment = EXPERIMENTS["shared-prefix"]
    each = experiment.seconds + 5
    enough, short = Clock(100 + 5 * each), Clock(99 + 5 * each)
    for clock in (enough, short):
        clock.took(experiment, each - 2)
        clock.took(experiment, each)
        clock.took(experiment, each - 1)

    assert enough.room(experiment, 5)
    assert not short.room(experiment, 5)


def test_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are one for all experiments or one for each."""
    names = list(EXPERIMENTS)
    monkeypatch.setattr(
        sys, "argv", ["experiments.py", *names, "--rate", "3", "4", "5", "--seconds", "9"]
    )

    found = options().experiments

    assert [each.rate for each in found] == [3, 4, 5]
    assert [each.seconds for each in found] == [9, 9, 9]


def test_nothing_asked() -> None:
    """Without an experiment it says what it needs."""
    done = subprocess.run(
        [sys.executable, ROUTING / "experiments.py"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "name an experiment" in done.stderr


def test_decision_costs() -> None:
    """The page's table of what a decision costs is what decide.py measured and kept."""
    told = json.loads((ROUTING / "decide.json").read_text("utf-8"))
    page = (ROOT / "docs" / "routing.md").read_text("utf-8")

    for size in (2, 16, 128, 1000):
        parts = ("lookup", "score", "decision", "decision, trapezoid", "accounts")
        values = [told[f"us of {part}, {size} instances"]["value"] for part in parts]
        row = " | ".join(f"{value:,.0f}".replace(",", " ") for value in (size, *values))
        assert f"| {row} |\n" in page
