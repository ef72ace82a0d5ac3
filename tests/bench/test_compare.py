# SPDX-License-Identifier: Apache-2.0
"""Comparing: a difference that is there is found in its stage, one that is not is not made up."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench.conftest import Bench, checked
from bench.server import Script, serving
from bench.test_figures import result, told
from ttft_otel import cli
from ttft_otel.bench.compare import compare
from ttft_otel.bench.document import FORMAT


def request(queue: float, compute: float) -> dict[str, Any]:
    """A request of the JSON with two stages."""
    return {
        "ttft_ms": queue + compute,
        "latency_ms": queue + compute + 50,
        "tpot_ms": 5.0,
        "stages_ms": {"prefill.queue": queue, "prefill.compute": compute},
    }


def target(
    chance: np.random.Generator, queue: float, rounds: int = 1, drift: float = 0.0
) -> dict[str, Any]:
    """A target whose queue is that long; a round is longer or shorter as a whole by the drift."""
    runs = []
    for _ in range(rounds):
        mean = queue + drift * chance.normal()
        rows = [request(mean + chance.normal(), 40 + chance.normal()) for _ in range(100)]
        runs.append({"requests": rows})
    stages: dict[str, Any] = {"prefill.queue": {}, "prefill.compute": {}}
    return {"url": "u", "valid": True, "summary": {"stages_ms": stages}, "runs": runs}


def rows(found: Any) -> dict[str, Any]:
    """The rows of a comparison by their names."""
    return {row["name"]: row for row in found["rows"]}


def test_found() -> None:
    """2 ms more queue show in the queue and in the TTFT, and nowhere else."""
    chance = np.random.default_rng(1)
    found = rows(compare(target(chance, 10), target(chance, 12), paired=False))

    clear = {name for name, row in found.items() if row["clear"]}
    assert {"ttft mean", "ttft p50", "latency mean", "prefill.queue mean"} <= clear
    assert clear.isdisjoint({"tpot mean", "prefill.compute mean"})
    queue = found["prefill.queue mean"]
    assert queue["low"] < queue["difference"] < queue["high"]
    assert queue["difference"] == pytest.approx(2.0, abs=0.5)


@pytest.mark.full
@pytest.mark.parametrize("drift", [0.0, 5.0])
def test_coverage(drift: float) -> None:
    """Of 20 comparisons of equals few intervals leave out 0, also where whole rounds drift."""
    chance = np.random.default_rng(2)
    wrong = 0
    for _ in range(20):
        one, other = (target(chance, 50, 6, drift) for _ in "ab")
        wrong += rows(compare(one, other, paired=False))["ttft mean"]["clear"]

    assert wrong <= 4


def test_paired() -> None:
    """Paired rounds see 1 ms through a drift of 20 ms that both sides share; unpaired ones cannot."""
    chance = np.random.default_rng(3)
    one = target(chance, 100, 6, 20.0)
    other = copy.deepcopy(one)
    for each in (each for run in other["runs"] for each in run["requests"]):
        each["ttft_ms"] += 1.0 + 0.1 * chance.normal()

    assert rows(compare(one, other, paired=True))["ttft mean"]["clear"]
    assert not rows(compare(one, other, paired=False))["ttft mean"]["clear"]


def test_figures() -> None:
    """All figures of the report are compared, as the report has them: ITL over gaps, sums of stages."""
    parts = {"mono.prefill.queue": 4, "mono.prefill.compute": 6}
    one = told([result(0, [10, 20, 40], parts), result(1, [30, 40], parts)])
    other = told([result(0, [10, 20, 40], parts), result(1, [30, 90], {"prefill.queue": 24})])
    found = rows(compare(one, other, paired=False))

    for name, line in other["summary"]["figures_ms"].items():
        assert found[f"{name} mean"]["b"] == pytest.approx(line["mean"], abs=0.001), name
    assert found["itl mean"]["a"] == pytest.approx(40 / 3, abs=0.001)
    assert found["queue_wait mean"]["difference"] == 10
    assert found["prefill_to_first_token mean"]["difference"] == -3


def test_older() -> None:
    """A file of an earlier version has no ITL of its requests: that row alone is left out."""
    one, other = (told([result(0, [10, 20, 40])]) for _ in "ab")
    for request in other["runs"][0]["requests"]:
        del request["itl_ms"], request["itl_count"]

    found = rows(compare(one, other, paired=False))
    assert "itl mean" not in found and {"ttft mean", "tpot mean", "latency mean"} <= set(found)


def test_untold() -> None:
    """Against a side without breakdowns only the client's figures are compared."""
    chance = np.random.default_rng(4)
    one, other = target(chance, 10), target(chance, 10)
    other["summary"]["stages_ms"] = {}
    for each in other["runs"][0]["requests"]:
        each["stages_ms"] = {}

    assert not [name for name in rows(compare(one, other, paired=False)) if "prefill" in name]


def test_routed() -> None:
    """A server asked directly and through a router: its stages are compared with themselves."""
    chance = np.random.default_rng(5)
    one, other = target(chance, 10), target(chance, 10)
    other["summary"]["stages_ms"] = {"router.route": {}, "mono.prefill.queue": {}}
    for each in other["runs"][0]["requests"]:
        queue = each["stages_ms"].pop("prefill.queue")
        each["stages_ms"] = {"router.route": 1.0, "mono.prefill.queue": queue}
    found = rows(compare(one, other, paired=False))

    assert found["prefill.queue mean"]["b"] == pytest.approx(10, abs=0.5)
    assert found["router.route mean"]["difference"] == 1.0
    assert not [name for name in found if name.startswith("mono.")]


def test_ab(bench: Bench) -> None:
    """--ab plays rounds in turn with the same prompts, A first and then B first, and compares."""
    slow = Script(first=[60.0], queue=[50.0], tokens=2)
    with serving(Script(first=[10.0], queue=[2.0], tokens=2)) as one, serving(slow) as other:
        words = ("--concurrency", 2, "--requests", 6, "--repeat", 3)
        found = bench("--ab", one.url, other.url, *words)
        here, there = one.notes(), other.notes()

    assert found["comparison"]["paired"] and found["comparison"]["rounds"] == 3
    queue = rows(found["comparison"])["prefill.queue mean"]
    assert queue["clear"] and queue["difference"] == pytest.approx(48.0, abs=0.01)
    assert [note["body"] for note in here[:1]] == [note["body"] for note in there[:1]]
    assert here[0]["came"] < there[0]["came"] and there[6]["came"] < here[6]["came"]


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (("", "0123"), "B has no successful request"),
        (("0123", ""), "A has no successful request"),
        (("01", "23"), "A and B have no round in which both have a successful request"),
    ],
)
def test_dead(tmp_path: Path, fails: tuple[str, str], says: str) -> None:
    """--ab with a side that answers nothing says why there is no comparison, everywhere."""
    one, other = (Script(first=[5.0], tokens=1, fail=dict.fromkeys(each, 503)) for each in fails)
    files = tmp_path / "a.json", tmp_path / "a.html"
    with serving(one) as a, serving(other) as b:
        words = ("--concurrency", 1, "--requests", 2, "--repeat", 2)
        out = ("--output", files[0], "--html", files[1])
        given = ["bench", "--ab", a.url, b.url, *map(str, (*words, *out))]
        shown = CliRunner().invoke(cli.main, given).output

    found = checked(json.loads(files[0].read_text("utf-8")))
    assert (found["comparison"], found["uncompared"]) == (None, says)
    assert f"No comparison: {says}" in " ".join(shown.split())
    assert f"No comparison: {says}" in files[1].read_text("utf-8")


def test_apart(bench: Bench) -> None:
    """--apart: two ways to one server do not find each other's prompts in its prefix cache."""
    with serving(Script(first=[5.0], tokens=1)) as server:
        words = ("--concurrency", 1, "--requests", 2, "--repeat", 2, "--apart")
        bench("--ab", server.url, f"{server.url}/", *words)
        sent = {tuple(note["body"]["prompt"]) for note in server.notes()}

    assert len(sent) == 8


def test_files(bench: Bench, tmp_path: Path) -> None:
    """Two files are compared from the command line, and flags in which their loads differ are told."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    with serving(Script(first=[5.0], tokens=2)) as server:
        for concurrency, file in enumerate(files, 1):
            words = ("--concurrency", concurrency, "--requests", 4, "--output", file)
            bench("--url", server.url, *words)
    told = CliRunner().invoke(cli.main, ["bench", "compare", *map(str, files), "--json"])
    shown = CliRunner().invoke(cli.main, ["bench", "compare", *map(str, files)])

    assert told.exit_code == 0 and shown.exit_code == 0, told.output
    assert "ttft p99" in rows(json.loads(told.stdout))
    assert "The loads differ in: concurrency" in told.stderr
    assert "prefill.queue mean" in shown.stdout


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "other"}',
        f'{{"format": "{FORMAT}"}}',
        f'{{"format": "{FORMAT}", "targets": [{{"runs": [], "summary": {{"stages_ms": [1]}}}}]}}',
    ],
)
def test_strange(tmp_path: Path, text: str) -> None:
    """A file that is no result of the benchmark is named, without a traceback."""
    file = tmp_path / "strange.json"
    file.write_text(text, "utf-8")
    result = CliRunner().invoke(cli.main, ["bench", "compare", str(file), str(file)])

    assert result.exit_code == 1
    assert "strange.json" in result.output
