# SPDX-License-Identifier: Apache-2.0
"""Numbers out of readings known to the nanosecond are exactly right; of two sides, differences are found."""

from __future__ import annotations

import asyncio
import copy
import csv
import dataclasses
import io
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from rich.console import Console

from bench.conftest import RunBench, invoke_bench, validate_document
from bench.scripted_server import ServerScript, run_scripted_server
from ttft_otel.bench import result_document
from ttft_otel.bench.http_exchange import BenchTarget, RawResponse
from ttft_otel.bench.load_driver import (
    LoadRun,
    RequestResult,
    classify_failure,
)
from ttft_otel.bench.load_plan import BenchSide, LoadPlan
from ttft_otel.bench.request_factory import RequestFactory
from ttft_otel.bench.result_document import (
    RESULT_FORMAT,
    build_document,
    compare_targets,
    compute_margins,
    find_knee,
    find_steady_start,
)
from ttft_otel.bench.terminal_report import print_document
from ttft_otel.model import statistics
from ttft_otel.model.timing import ServerTiming

NS_PER_MS = 1_000_000


def build_result(
    index: int,
    token_offsets_ms: Sequence[float],
    parts: Mapping[str, float] | None = None,
    lag_ms: float = 0.0,
) -> RequestResult:
    """A request sent at place x 10 ms, its tokens so many ms later, its end 1 ms after the last."""
    sent_ns = index * 10 * NS_PER_MS
    token_times_ns = [sent_ns + int(each * NS_PER_MS) for each in token_offsets_ms]
    response = RawResponse(
        sent_ns,
        sent_ns=sent_ns,
        end_ns=token_times_ns[-1] + NS_PER_MS,
        status=200,
        lag_ns=int(lag_ms * NS_PER_MS),
    )
    parts_us = {name: int(value * 1000) for name, value in (parts or {}).items()}
    breakdown = ServerTiming(parts_us, 0, sum(parts_us.values())) if parts else None
    return RequestResult(
        *(f"r{index}", f"{index:032x}", response, breakdown),
        token_times_ns=token_times_ns,
        prompt_tokens=8,
        completion_tokens=len(token_times_ns),
    )


UNUSED_TARGET = BenchTarget.parse_url("http://127.0.0.1:1")


def build_target_document(
    results: list[RequestResult],
    slo_ms: Mapping[str, float] | None = None,
    loop_lags_ns: Sequence[int] = (),
) -> Any:
    """The document's only target."""
    run = LoadRun(UNUSED_TARGET, 1.0, results, list(loop_lags_ns), started=len(results))
    side = BenchSide(UNUSED_TARGET, RequestFactory("m"), LoadPlan(), [run])
    return validate_document(build_document({}, [side], slo_ms or {}))["targets"][0]


def test_exact() -> None:
    """Percentiles interpolate, TPOT leaves out the first token, ITL is every gap, latency the end.

    Throughput is over the time from the first write to the last byte.
    """
    two = [build_result(0, [10, 20, 40]), build_result(1, [30, 40, 59])]
    summary = build_target_document(two)["summary"]

    figures = summary["figures_ms"]
    assert figures["ttft"] == {"count": 2, "mean": 20, "p50": 20, "p95": 29, "p99": 29.8}
    assert figures["tpot"]["mean"] == 14.75
    assert figures["itl"] == {"count": 4, "mean": 14.75, "p50": 14.5, "p95": 19.85, "p99": 19.97}
    assert figures["latency"]["p50"] == 50.5
    names = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s")
    per_second = [round(each / 0.07, 3) for each in (2, 16, 6)]
    assert summary["throughput"] == dict(zip(names, per_second, strict=True))


def test_stages() -> None:
    """Queue wait and Prefill -> first token are sums of stages, of the right legs; the rest is outside."""
    parts = {
        "router.receive": 1,
        "encode.encoder.queue": 2,
        "encode.output": 3,
        "prefill_decode.prefill.queue": 4,
        "prefill_decode.dispatch": 5,
        "prefill_decode.prefill.compute": 6,
        "prefill_decode.output": 7,
        "router.egress": 8,
    }
    summary = build_target_document([build_result(0, [40], parts)])["summary"]

    assert summary["figures_ms"]["queue_wait"]["mean"] == 6
    assert summary["figures_ms"]["prefill_to_first_token"]["mean"] == 18
    assert summary["stages_ms"]["outside"]["mean"] == 4
    assert list(summary["stages_ms"])[-2:] == ["unattributed", "outside"]


QUEUED = {"prefill.queue": 190, "prefill.compute": 55, "output": 5}
QUICKER = {"prefill.queue": 0, "prefill.compute": 60, "output": 0}
LATE = "ms slower than the middle tenth on average"


@pytest.mark.parametrize(
    ("count", "slow", "says"),
    [
        (
            99,
            QUEUED,
            f"The slowest request is 200.0 {LATE}, 185.0 ms of it (92 %) in prefill.queue.",
        ),
        (
            198,
            QUEUED,
            f"The slowest 2 requests are 200.0 {LATE}, 185.0 ms of it (92 %) in prefill.queue.",
        ),
        # No share of it: other stages were quicker.
        (
            99,
            QUICKER,
            f"The slowest request is 10.0 {LATE}; prefill.compute alone takes 20.0 ms more.",
        ),
        (3, QUEUED, "4 requests with a breakdown are too few to explain the slowest (from 20)."),
    ],
)
def test_blame(count: int, slow: dict[str, float], says: str) -> None:
    """The stage that separates the slowest from the middle tenth is named, not the longest one."""
    usual = {"prefill.queue": 5, "prefill.compute": 40, "output": 5}
    every = [build_result(n, [50], usual) for n in range(count)]
    late_ms = sum(slow.values())
    every += [build_result(count + n, [late_ms], slow) for n in range(max(1, count // 99))]

    assert build_target_document(every)["summary"]["explanation"] == says


def test_steady_part() -> None:
    """A warm-up is cut off where it ends, without one hardly anything; what only grows is never steady."""
    rng = np.random.default_rng(1)
    noise = rng.exponential(20, (60, 400))
    cold = 300 * np.exp(-np.arange(400) / 20)
    steady = [find_steady_start(list(row)) for row in noise]
    warmed = [find_steady_start(list(row + cold)) for row in noise]
    grown = [find_steady_start(list(row + 2 * np.arange(400))) for row in noise]

    assert sum(at is None for at in steady) <= 6 and np.median([at or 0 for at in steady]) <= 20
    assert 30 <= np.median([at or 0 for at in warmed]) <= 150
    assert sum(at is None for at in warmed) <= 6
    assert sum(at is None for at in grown) >= 58


@pytest.mark.parametrize(("serves_alike", "load"), [(True, 2 - math.sqrt(2)), (False, 0.5)])
def test_knee(serves_alike: bool, load: float) -> None:
    """The knee of M/D/1 and of M/M/1, by formula; with none higher there is no knee."""
    variation = 0.5 if serves_alike else 1.0
    rates = [place / 100 for place in range(1, 100)]
    rows = [
        {
            "rate": rate,
            "requests": 9,
            "requests_per_s": rate,
            "ttft_ms": {"mean": 1 + variation * rate / (1 - rate)},
        }
        for rate in rates
    ]

    assert find_knee(rows) == pytest.approx(load, abs=0.01)
    assert find_knee(rows[:20]) is None and find_knee([]) is None


def test_goodput() -> None:
    """Goodput counts the requests that kept every limit."""
    three = [build_result(0, [10, 20]), build_result(1, [10, 90]), build_result(2, [70, 80])]

    assert (
        build_target_document(three, {"ttft": 50, "tpot": 50})["summary"]["goodput"]["share"]
        == 0.333
    )
    assert build_target_document(three, {"latency": 90})["summary"]["goodput"]["share"] == 0.667


@pytest.mark.parametrize(("lag", "valid"), [(4.9, True), (5.1, False)])
def test_lag(lag: float, valid: bool) -> None:
    """A generator that was itself late by more than 5 ms says that its run is not valid, and why."""
    target = build_target_document([build_result(n, [10], lag_ms=lag) for n in range(10)])

    assert target["valid"] is valid
    assert ["generator itself was late" in why for why in target["runs"][0]["why"]] == (
        [] if valid else [True]
    )


def test_stall() -> None:
    """One stall of 0.2 s counts for every sample that fell into it: the run is not valid."""

    async def measure_stall() -> list[int]:
        run = LoadRun(UNUSED_TARGET)
        task = asyncio.create_task(run.sample_loop_lag())
        await asyncio.sleep(0.3)
        time.sleep(0.2)
        await asyncio.sleep(0.1)
        task.cancel()
        return run.loop_lags_ns

    target = build_target_document(
        [build_result(0, [10])], loop_lags_ns=asyncio.run(measure_stall())
    )

    assert target["runs"][0]["lag_ms"]["loop_p99"] > 120
    assert not target["valid"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, ""),
        ({"completion_tokens": 0}, "no token"),
        ({"stream_error": "ended by the server"}, "ended by the server"),
        ({"token_times_ns": []}, "no token"),
        ({"is_finished": False}, "cut off"),
    ],
)
def test_what_counts_as_failed(change: dict[str, Any], kind: str) -> None:
    """Only a complete answer with a token is measured."""
    result = dataclasses.replace(build_result(0, [10, 20]), is_finished=True)

    assert classify_failure(dataclasses.replace(result, **change)) == kind


def build_request_row(queue_ms: float, compute_ms: float) -> dict[str, Any]:
    """A request of the JSON with two stages."""
    return {
        "ttft_ms": queue_ms + compute_ms,
        "latency_ms": queue_ms + compute_ms + 50,
        "tpot_ms": 5.0,
        "stages_ms": {"prefill.queue": queue_ms, "prefill.compute": compute_ms},
    }


def build_target(
    rng: np.random.Generator, queue_ms: float, round_count: int = 1, drift: float = 0.0
) -> dict[str, Any]:
    """A target whose queue is that long; a round is longer or shorter as a whole by the drift."""
    runs = []
    for _ in range(round_count):
        mean = queue_ms + drift * rng.normal()
        rows = [build_request_row(mean + rng.normal(), 40 + rng.normal()) for _ in range(100)]
        runs.append({"requests": rows})
    return {"url": "u", "valid": True, "runs": runs}


def index_rows(comparison: Any) -> dict[str, Any]:
    """The rows of a comparison by their names."""
    return {row["name"]: row for row in comparison["rows"]}


def compare(one: Any, other: Any, paired: bool = False) -> dict[str, Any]:
    """The rows of two targets' comparison by their names."""
    return index_rows(compare_targets(one, other, paired))


def test_found() -> None:
    """2 ms more queue show in the queue and in the TTFT, and nowhere else."""
    chance = np.random.default_rng(1)
    found = compare(build_target(chance, 10, 5), build_target(chance, 12, 5))

    clear = {name for name, row in found.items() if row["clear"]}
    assert {"ttft mean", "ttft p50", "latency mean", "prefill.queue mean"} <= clear
    assert clear.isdisjoint({"tpot mean", "prefill.compute mean"})
    queue = found["prefill.queue mean"]
    assert queue["low"] < queue["difference"] < queue["high"]
    assert queue["difference"] == pytest.approx(2.0, abs=0.5)


TRIALS = 2000  # so that chance moves a share of 5 % by 0.5 % only


@pytest.fixture(scope="module")
def tabled_quantiles() -> Iterator[None]:
    """Read t quantiles from a table of 300: each of thousands of trials has degrees of its own."""
    degrees = np.geomspace(1, 40, 300)
    table = [statistics.compute_t_quantile(float(each)) for each in degrees]
    with mock.patch.object(
        result_document, "compute_t_quantile", lambda each: float(np.interp(each, degrees, table))
    ):
        yield


@pytest.mark.usefixtures("tabled_quantiles")
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(
    "round_count", [3, 5, *(pytest.param(each, marks=pytest.mark.full) for each in (4, 7, 10, 20))]
)
def test_equals_are_marked_seldom(round_count: int, paired: bool) -> None:
    """A against A: at most 6 % of trials mark a difference, also with rounds that drift and few requests.

    Requests of a round share its level (a round effect as large as the scatter of the requests), and
    rounds of --ab side by side share another one, as a machine has good and bad minutes.
    """
    chance = np.random.default_rng(round_count)
    for scatter, level in ((10.0, 0.0), (10.0, 10.0), (0.0, 10.0)):
        shared = 30 * chance.normal(size=(round_count, TRIALS)) if paired else 0.0
        sides = []
        for _ in "ab":
            rounds = 100 + level * chance.normal(size=(round_count, TRIALS)) + shared
            # The mean of 20 requests, each later by an exponentially distributed time.
            sides.append(rounds + scatter * chance.gamma(20, 1 / 20, (round_count, TRIALS)))
        one, other, margins = compute_margins(*sides, paired)

        assert np.mean(np.abs(other - one) > margins) <= 0.06


@pytest.mark.usefixtures("tabled_quantiles")
def test_rounds_that_differ_in_number_and_spread() -> None:
    """Two files with different numbers of rounds, one of them much noisier; a round without a figure."""
    chance = np.random.default_rng(1)
    one = 100 + chance.normal(size=(8, TRIALS))
    other = 100 + 5 * chance.normal(size=(4, TRIALS))
    other[0] = np.nan
    average, other_average, margins = compute_margins(one, other, paired=False)

    assert np.mean(np.abs(other_average - average) > margins) <= 0.06


@pytest.mark.parametrize("paired", [True, False])
def test_few_rounds_mark_nothing(paired: bool) -> None:
    """Below three rounds there is a difference, but no interval, and no mark on any row."""
    chance = np.random.default_rng(4)
    one, other = (build_target(chance, mean, 2) for mean in (10, 900))
    rows = compare_targets(one, other, paired)["rows"]

    assert not any(row["clear"] for row in rows)
    assert {(row["low"], row["high"]) for row in rows} == {(None, None)}
    assert index_rows({"rows": rows})["ttft mean"]["difference"] == pytest.approx(890, abs=1)


def test_paired() -> None:
    """Paired rounds see 1 ms through a drift of 20 ms that both sides share; unpaired ones cannot."""
    chance = np.random.default_rng(3)
    one = build_target(chance, 100, 6, 20.0)
    other = copy.deepcopy(one)
    for each in (each for run in other["runs"] for each in run["requests"]):
        each["ttft_ms"] += 1.0 + 0.1 * chance.normal()

    assert compare(one, other, paired=True)["ttft mean"]["clear"]
    assert not compare(one, other)["ttft mean"]["clear"]


def test_figures() -> None:
    """All figures of the report are compared, as the report has them: ITL over gaps, sums of stages."""
    parts = {"mono.prefill.queue": 4, "mono.prefill.compute": 6}
    one = build_target_document(
        [build_result(0, [10, 20, 40], parts), build_result(1, [30, 40], parts)]
    )
    other = build_target_document(
        [build_result(0, [10, 20, 40], parts), build_result(1, [30, 90], {"prefill.queue": 24})]
    )
    found = compare(one, other)

    for name, line in other["summary"]["figures_ms"].items():
        assert found[f"{name} mean"]["b"] == pytest.approx(line["mean"], abs=0.001), name
    assert found["itl mean"]["a"] == pytest.approx(40 / 3, abs=0.001)
    assert found["queue_wait mean"]["difference"] == 10
    assert found["prefill_to_first_token mean"]["difference"] == -3


def test_untold_and_routed() -> None:
    """Without breakdowns on one side only client figures are compared; through a router, like stages."""
    chance = np.random.default_rng(4)
    one, untold, routed = (build_target(chance, 10) for _ in range(3))
    for each in untold["runs"][0]["requests"]:
        each["stages_ms"] = {}
    for each in routed["runs"][0]["requests"]:
        queue = each["stages_ms"].pop("prefill.queue")
        each["stages_ms"] = {"router.route": 1.0, "mono.prefill.queue": queue}
    found = compare(one, routed)

    assert not [name for name in compare(one, untold) if "prefill" in name]
    assert found["prefill.queue mean"]["b"] == pytest.approx(10, abs=0.5)
    assert found["router.route mean"]["difference"] == 1.0
    assert not [name for name in found if name.startswith("mono.")]


def test_ab(bench: RunBench) -> None:
    """--ab plays rounds in turn, A first and then B first, with other prompts of the same lengths."""
    quick, slow = (
        ServerScript(first_token_ms=[each + 5.0], queue_ms=[each], token_count=2)
        for each in (2.0, 32.0)
    )
    with run_scripted_server(quick) as one, run_scripted_server(slow) as other:
        words = "--concurrency 2 --requests 4 --repeat 3 --spread 0.5"
        found = bench("--ab", one.url, other.url, words)
        here, there = one.fetch_notes(), other.fetch_notes()

    assert found["comparison"]["paired"] and found["comparison"]["rounds"] == 3
    queue = index_rows(found["comparison"])["prefill.queue mean"]
    assert queue["clear"] and queue["difference"] == pytest.approx(30.0, abs=0.01)
    sent = [sorted(note["body"]["prompt"] for note in notes[:4]) for notes in (here, there)]
    assert sorted(map(len, sent[0])) == sorted(map(len, sent[1]))
    assert not any(prompt in sent[1] for prompt in sent[0])
    assert here[0]["came"] < there[0]["came"] and there[4]["came"] < here[4]["came"]


def test_dead(tmp_path: Path) -> None:
    """--ab without a round in which both sides have answered says why there is no comparison, everywhere."""
    one, other = (
        ServerScript(first_token_ms=[5.0], token_count=1, failures=dict.fromkeys(each, 503))
        for each in ("0", "1")
    )
    file = tmp_path / "a.json"
    with run_scripted_server(one) as a, run_scripted_server(other) as b:
        words = "--concurrency 1 --requests 1 --repeat 2"
        shown = invoke_bench("--ab", a.url, b.url, words, "--output", file).output

    found = validate_document(json.loads(file.read_text("utf-8")))
    says = "A and B have no round in which both have a successful request"
    assert (found["comparison"], found["uncompared"]) == (None, says)
    assert f"No comparison: {says}" in " ".join(shown.split())
    with pytest.raises(ValueError, match="B has no successful request"):
        compare_targets(
            build_target(np.random.default_rng(1), 1), {"runs": [{"requests": []}]}, True
        )


def judge(*words: object) -> tuple[int, str]:
    """The exit code and the first words of the verdict on two files."""
    result = invoke_bench("compare", *words)
    return result.exit_code, result.stderr


def test_files(bench: RunBench, tmp_path: Path) -> None:
    """--compare, `compare`, --fail-if: worse, as asked and what cannot be told have exit codes of their own.

    The flags in which the loads differ are told.
    """
    old, new, requests = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "requests.csv"
    words = "--concurrency 1 --requests 3 --repeat 3"
    with run_scripted_server(ServerScript(first_token_ms=[10.0], token_count=1)) as server:
        bench("--url", server.url, words, "--output", old, "--csv", requests)
    with run_scripted_server(ServerScript(first_token_ms=[60.0], token_count=1)) as server:
        compared = ("--compare", old, "--fail-if", "ttft.p95 > +20ms", "--json", "--output", new)
        worse = invoke_bench("--url", server.url, words, *compared)
    check_csv(requests)

    assert validate_document(json.loads(worse.stdout))["comparison"]["paired"] is False
    assert "loads differ" not in worse.stderr
    verdicts = [
        (worse.exit_code, worse.stderr, 1, "WORSE"),
        (*judge(old, new, "--fail-if", "ttft.mean > +5000%"), 0, "AS ASKED"),
        (*judge(old, new, "--fail-if", "nothing.mean > +1ms"), 2, "CANNOT TELL"),
    ]
    for code, said, wanted, outcome in verdicts:
        # A machine that was too busy cannot tell.
        if "there is no valid comparison" not in said:
            assert (code, outcome in said) == (wanted, True), said
    document = json.loads(new.read_text("utf-8"))
    document["load"]["concurrency"] = [[2, None]]
    del document["targets"][0]["runs"][1:]
    new.write_text(json.dumps(document), "utf-8")
    shown = invoke_bench("compare", old, new)
    assert shown.exit_code == 0 and "The loads differ in: concurrency" in shown.stderr
    assert "prefill.compute mean" in shown.stdout and "No intervals and no marks" in shown.stdout


def check_csv(file: Path) -> None:
    """It has a line for each request, with its round and a column for each stage."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["round"] for row in rows] == list("111222333")
    names = [
        name
        for name in rows[0]
        if name.startswith("prefill.") or name in ("unattributed_ms", "outside_ms")
    ]
    for row in rows:
        assert sum(float(row[name]) for name in names) == pytest.approx(
            float(row["ttft_ms"]), abs=0.01
        )


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"format": "other"}',
        f'{{"format": "{RESULT_FORMAT}"}}',
        f'{{"format": "{RESULT_FORMAT}", "targets": [{{"runs": [], "summary": {{"stages_ms": [1]}}}}]}}',
    ],
)
def test_strange(tmp_path: Path, text: str) -> None:
    """A file that is no result of the benchmark is named, without a traceback."""
    file = tmp_path / "strange.json"
    file.write_text(text, "utf-8")
    result = invoke_bench("compare", file, file)

    assert result.exit_code == 1
    assert "strange.json" in result.output


@pytest.mark.parametrize("factor", [0.001, 1.0, 300.0])
def test_width(factor: float) -> None:
    """All tables and headlines fit 80 columns, with the longest names and seconds; no number is cut."""
    names = ("prefill_decode.prefill.compute", "encode.encoder.compute", "prefill_decode.dispatch")
    parts = {
        name: round(each * factor) for name, each in zip(names, (20_000, 9_000, 1), strict=True)
    }
    lengths = [round(each * 1000 * factor) / 1000 for each in (10, 20, 40)]
    target = build_target_document([build_result(at, lengths, parts) for at in range(4)])
    comparison = compare_targets(target, copy.deepcopy(target), paired=False)
    rate = {"rate": 123.0, "verdict": "undecided", "requests": 12_345, "overloaded": 2}
    rate |= {"beyond": [0.123, 1.0], "ttft_ms": {"p50": 12_345.6, "p95": 12_345.6}}
    rate["slowest_stages_ms"] = dict.fromkeys(names, 12_345.6)
    limit = {"conditions": ["ttft.p95<500", "tpot.p95<50"], "low": 0.0, "high": None}
    limit |= {"estimate": 1.0, "confidence": 0.95, "ended": "Ctrl-C"}
    sweep: dict[str, Any] = {"unit": "requests/s", "rates": [rate], "knee": None, "limit": limit}
    sweep |= {"explanation": "", "whatif": None}
    document = {"targets": [target], "comparison": comparison, "uncompared": "", "sweep": sweep}
    out = io.StringIO()
    print_document(document, Console(file=out, width=80))

    text = out.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in text
    assert sum("prefill_decode.prefill.compute" in line for line in lines) >= 3
    assert "the limit is above 0 requests/s (95%)" in text
    assert text.count("12345.6") == 2 and "37036.8" in text and "100.0%" in text
    assert [lines[3].count(sign) for sign in "█▒░"] == [7, 6, 7]
