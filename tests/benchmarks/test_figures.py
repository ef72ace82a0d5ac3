# SPDX-License-Identifier: Apache-2.0
"""Figures of the benchmarks: goals are for ratios to a reference of the same run, never for a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks import bare_transport, collector, index, router, router_latency, serving
from benchmarks.figures import Figure, build_figure, divide_rounds, report_figures
from benchmarks.peer_clients import (
    OUTPUT_TOKENS,
    Load,
    Reading,
    measure_errors,
    play_client,
    start_truth_server,
    take_notes,
)
from benchmarks.router import RouterSubject
from benchmarks.router_latency import LatencySamples, StampedClient
from benchmarks.routing import decision_cost
from benchmarks.serving_load import LoadResult

ROOT = Path(__file__).parents[2]


def build_router_figures(traced_us: float = 155.0, speed: float = 1.0) -> dict[str, Figure]:
    """Figures of routers that take microseconds as given, on a machine `speed` times as fast."""
    cost_us = {"traced": traced_us, "untraced": 150.0, "rust": 160.0, "fastapi": 310.0}
    cost_us["traced P/D"] = 1.5 * traced_us
    routers = []
    for name, us in cost_us.items():
        subject = RouterSubject(name, (), 0)
        for rounds in subject.cpu_us_by_case.values():
            rounds += [us / speed, us * 1.1 / speed, us * 0.9 / speed]
        routers.append(subject)
    return router.compute_router_figures(routers, 0.0)


def build_collector_figures(config_us: float = 9.0, speed: float = 1.0) -> dict[str, Figure]:
    """Figures of three configurations, the first of them the reference."""
    cost_us = {"passed on": 5.5, "config.yaml": config_us, "with sampling.yaml": 8.0}
    return collector.judge_collector_figures({name: us / speed for name, us in cost_us.items()})


def build_index_figures(lookup_us: float = 11.0, speed: float = 1.0) -> dict[str, Figure]:
    """Figures of one size of fleet."""
    values = {"MB": 180.0, "dictionary MB": 120.0}
    times = {"lookup": lookup_us, "stored": 5.0, "removed": 6.0, "filling": 2.0, "clearing": 3.0}
    times |= {"dictionary lookup": 3.6, "dictionary growth": 30.0}
    return index.build_index_figures(
        values | {name: value / speed for name, value in times.items()}, "2 instances"
    )


def build_serving_figures(p99: float = 1000.0, speed: float = 1.0) -> dict[str, Figure]:
    """Figures of servers without, with our and with vLLM's own tracing, and of one without again."""
    throughputs_p99s = {
        "off": (20.0, 1000.0),
        "on": (19.9, p99),
        "own": (19.2, 1001.0),
        "again": (20.1, 999.0),
    }
    return serving.compute_serving_figures(
        serving.MODES,
        {
            name: [
                LoadResult(
                    count * speed,
                    *(us / speed for us in (last, 500.0, 80.0)),
                    {"python": 900.0 / speed},
                )
            ]
            * 3
            for name, (count, last) in throughputs_p99s.items()
        },
    )


def test_more_cpu_time_by_process() -> None:
    """What a request takes more than in the base's round, in each process that both rounds have."""
    base, more = (
        LoadResult(20.0, 1.0, 1.0, 80.0, {"python": api_us, "worker": 500.0, name: 1.0})
        for api_us, name in ((300.0, "left"), (340.0, "came"))
    )
    figures = serving.compare_processes("on", [more] * 7, [base] * 7)

    assert {name: figure["value"] for name, figure in figures.items()} == {
        "on_more_cpu_us_in_python": 40.0,
        "on_more_cpu_us_in_worker": 0.0,
    }


def build_decision_figures(decision_us: float = 90.0, speed: float = 1.0) -> dict[str, Figure]:
    """Figures of the fleet that has a goal."""
    costs = {"lookup": 34.0, "decision": decision_us, "decision, trapezoid": 62.0, "accounts": 45.0}
    passes = [{name: us / speed for name, us in costs.items()}]
    return decision_cost.build_decision_figures(passes, 128)


BUILDERS: Mapping[str, tuple[Callable[..., dict[str, Figure]], float]] = {
    # The builder, and a first argument that misses a goal.
    "router": (build_router_figures, 400.0),
    "collector": (build_collector_figures, 12.0),
    "index": (build_index_figures, 80.0),
    "serving": (build_serving_figures, 1100.0),
    "decision": (build_decision_figures, 120.0),
}


def list_judgements(figures: Mapping[str, Figure]) -> dict[str, tuple[float, bool]]:
    """Figures that have a goal: value and whether it is met."""
    return {
        name: (figure["value"], figure["met"])
        for name, figure in figures.items()
        if figure["goal"] is not None
    }


@pytest.mark.parametrize("name", BUILDERS)
def test_machine_does_not_matter(name: str) -> None:
    """On a machine of half the speed every figure with a goal has the same value; times double."""
    build, _ = BUILDERS[name]
    usual, slow = build(), build(speed=0.5)

    assert list_judgements(usual) == list_judgements(slow) != {}
    assert all(figure["met"] for figure in usual.values())
    assert usual != slow, "no time is shown"


@pytest.mark.parametrize("name", BUILDERS)
def test_goals_can_be_missed(name: str) -> None:
    """What costs more than the goal allows is not met."""
    build, missing = BUILDERS[name]

    assert not all(met for _, met in list_judgements(build(missing)).values())


def test_hook_figures() -> None:
    """Each case of the hooks has a ratio with a goal, and two times without one.

    In a process of its own: the benchmark replaces the sender and patches its hosts for good.
    """
    code = (
        "import json; from benchmarks import hooks\n"
        "print(json.dumps(hooks.measure_hook_figures(rounds=1)))"
    )
    command = (sys.executable, "-c", code)
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    figures: dict[str, Figure] = json.loads(done.stdout)
    ratios = {name for name, figure in figures.items() if figure["goal"] is not None}
    cases = {name.partition("_per_")[0] for name in ratios}

    assert cases >= {"api_request", "core_request", "decode_step", "decode_step_connector"}
    assert ratios == {name for name in figures if "_per_" in name}
    times = {f"{case}{end}" for case in cases for end in ("_us", "_reference_us")}
    assert set(figures) == ratios | times
    assert all(figures[f"{case}_reference_us"]["value"] > 0 for case in cases)


def test_added_latency() -> None:
    """Percentiles of a router less those of the instance itself, first and later tokens apart."""
    direct = LatencySamples([100.0] * 100, [50.0] * 100)
    router_samples = LatencySamples([180.0] * 98 + [1100.0] * 2, [70.0] * 100)
    added_us = router_latency.compare_samples({"": direct, "ours": router_samples}, "50%")

    assert added_us == {
        "50%: TTFT p50 added by ours, us": 80.0,
        "50%: TTFT p99 added by ours, us": 1000.0,
        "50%: token p50 added by ours, us": 20.0,
        "50%: token p99 added by ours, us": 20.0,
    }


def test_stamps_are_read_whatever_arrives_together() -> None:
    """An event that comes in two pieces has the time of the second one; the end frees the connection."""
    samples, idle = LatencySamples(), list[StampedClient]()
    client = StampedClient(samples, idle)
    stamped = bare_transport.EVENT_CHUNK.replace(bare_transport.STAMP_PLACE, b"%020d" % 1)
    answer = bare_transport.STREAM_START + stamped + stamped + bare_transport.DONE_CHUNK
    for piece in (answer[:-300], answer[-300:-2], answer[-2:]):
        client.data_received(piece)

    assert (len(samples.first), len(samples.later)) == (1, 2)
    assert idle == [client]


def test_ratios_pair_rounds() -> None:
    """A round is divided by its own reference, so what both had to bear does not count."""
    assert divide_rounds([2.0, 20.0], [1.0, 10.0]) == [2.0, 2.0]
    with pytest.raises(ValueError):
        divide_rounds([1.0], [1.0, 2.0])


def test_agreement_needs_a_tokenizer() -> None:
    """Without --tokenizer the remedy is said, instead of a peer that looks for a tokenizer "None"."""
    command = [sys.executable, str(ROOT / "benchmarks" / "agreement.py")]
    command += ["--url", "http://127.0.0.1:1", "--model", "m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 2
    assert "needs --tokenizer" in done.stderr


def test_clients_are_held_against_the_truth() -> None:
    """What a client says is compared with the notes of its own requests, all of which are found."""
    note = {"came": 1_000_000, "tokens": [21_000_000, 31_000_000, 43_000_000]}
    errors = measure_errors(Reading([21.5, 20.5], [11.0, 13.0]), [note, note])
    with start_truth_server(None) as url:
        reading, notes, _ = play_client("ttft-otel bench", Load(url, "", 100.0, 20))

    assert (errors["ttft_ms mean"], errors["itl_ms mean"], errors["missing"]) == (1.0, 1.0, 0)
    assert len(reading.ttft_ms) == len(notes) == 20
    assert {len(each["tokens"]) for each in notes} == {OUTPUT_TOKENS}


def test_a_real_server_is_noted_from_outside() -> None:
    """With an upstream each request is noted before it is passed on, and each token after it has come."""
    with start_truth_server(None) as upstream, start_truth_server(upstream) as url:
        reading, notes, _ = play_client("ttft-otel bench", Load(url, "", 100.0, 20))
        truths = take_notes(upstream)

    assert len(reading.ttft_ms) == len(notes) == len(truths) == 20
    assert {len(each["tokens"]) for each in notes} == {OUTPUT_TOKENS}
    came, true_came = (sorted(each["came"] for each in some) for some in (notes, truths))
    assert all(one <= other for one, other in zip(came, true_came, strict=True))
    told, true = (sorted(t for each in some for t in each["tokens"]) for some in (notes, truths))
    assert all(one >= other for one, other in zip(told, true, strict=True))


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file holds what was judged; a missed goal is marked and is the exit code."""
    met, missed = build_figure([1.0], 2.0), build_figure([1.0, 3.0, 5.0], 2.0)
    file = tmp_path / "figures.json"

    assert report_figures({"a ratio": met}, None) == 0
    assert report_figures({"a ratio": met, "another": missed}, file) == 1
    assert json.loads(file.read_text("utf-8")) == {"a ratio": met, "another": missed}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["another", "3", "[1,", "5]", "goal", "2", "MISSED"]
