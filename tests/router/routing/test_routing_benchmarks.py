# SPDX-License-Identifier: Apache-2.0
"""benchmarks/routing: simulations with a known answer, rules of other routers, and what is said of runs."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from benchmarks.routing import experiment_statistics, hold_simulation, load_kinds, simulation_tables
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
from benchmarks.routing.fleet_simulation import simulate_case
from benchmarks.routing.mooncake_traces import TraceRow
from benchmarks.routing.peer_policies import (
    MAX_PENALTY_S,
    PEAK_THROUGHPUT,
    PEER_POLICIES,
    DynamoPolicy,
)
from benchmarks.routing.predicted_latency import (
    MAX_PREDICTED_PENALTY_S,
    BoostedTrees,
    filter_candidates,
    score_deficits,
)
from benchmarks.routing.worker_simulation import run_workers
from ttft_otel.commands.bench import bench
from ttft_otel.commands.router.command import command as router
from ttft_otel.router.routing.policies.block_index import BlockHolders
from ttft_otel.router.routing.policies.policy_state import PolicyState
from ttft_otel.router.routing.policies.prefill_model import PredictionQuality
from ttft_otel.router.types import Decision, RoutingRequest, parse_instance_url

ROOT = Path(__file__).parents[3]
SIMULATE = ROOT / "benchmarks" / "routing" / "simulate.py"
RESULTS_FOLDER = ROOT / "benchmarks" / "results"
RESULTS = RESULTS_FOLDER / "routing-simulation.json"
REPORT = RESULTS.with_name("2026-11-26-routing-simulation.md")
CASES = json.loads(SIMULATE.with_name("cases.json").read_text("utf-8"))
DEFAULT_CASE: dict[str, Any] = dict(
    CASES["cases"][0], name="case", kind="recorded", instances=1, load=1.0, noise=0, lag=0
)
ALL_POLICIES = (*CASES["policies"], "oracle")
SHARED_CASE = {**DEFAULT_CASE, "instances": 4, "load": 0.8}


def compute_prefill_s(tokens: int, cached: int) -> float:
    """Seconds of a prefill on a simulated instance."""
    return (
        0.005 + 40e-6 * (tokens - cached) + 1.3e-9 * (cached + 1 + tokens) * (tokens - cached) / 2
    )


def simulate_policies(
    rows: Sequence[TraceRow], policies: Sequence[str] = ALL_POLICIES, **case: object
) -> dict[str, Any]:
    """The results of these policies on this trace."""
    full_case = {**DEFAULT_CASE, "load": 1e-4, **case}
    return {name: simulate_case(full_case, name, tuple(rows), 1) for name in policies}


def build_row(at_s: float, tokens: int, *blocks: int, output: int = 1) -> TraceRow:
    """A request whose prompt begins with these blocks."""
    return TraceRow(at_s, tokens, blocks, str(blocks[:2]), output)


def run_benchmark(
    folder: Path, module: str, case: Mapping[str, Any], *flags: str, check: bool = True
) -> Any:
    """The JSON that the benchmark `module` writes for `case` on a recorded trace of forty requests.

    check: whether it has to end with 0.
    """
    rows: list[dict[str, Any]] = [
        {
            "timestamp": 300 * number,
            "input_length": 600 * (1 + number % 7),
            "output_length": 1,
            "hash_ids": [0, 1 + number % 9, number + 1000],
        }
        for number in range(40)
    ]
    (folder / "conversation_trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "cases.json").write_text(json.dumps({"cases": [case]}))
    command = [sys.executable, "-m", f"benchmarks.routing.{module}", "--traces", folder]
    command += ["--list", folder / "cases.json", "--json", folder / "out.json", *flags]
    subprocess.run(command, cwd=ROOT, check=check, capture_output=True)
    return json.loads((folder / "out.json").read_text("utf-8"))


def test_queue() -> None:
    """One instance: first come first served, and who comes later finds what the first left."""
    rows = [build_row(0, 1500, 1, 2), build_row(0, 1100, 1, 2), build_row(60, 100)]
    prefills_s = [compute_prefill_s(*each) for each in ((1500, 0), (1100, 1024), (100, 0))]
    mean = (prefills_s[0] + sum(prefills_s)) / 3

    for name, found in simulate_policies(rows).items():
        assert found["mean"] == pytest.approx(mean, abs=2e-5)
        assert found["hit"] == pytest.approx(1024 / 2700, abs=1e-5), name


def test_decodes() -> None:
    """A prompt that comes while another one is answered waits for a step, and shares the next one with it."""
    rows = [build_row(0, 512, 1, output=11), build_row(1, 512, 2), build_row(60, 10)]
    prefill = compute_prefill_s(512, 0)

    for found in simulate_policies(rows, load=1e-5).values():
        # Nothing else runs: ten steps of 5 ms, one token, and what it reads of its context.
        steps = [0.005 + 40e-6 + 40e-9 * (512 + n) for n in range(1, 11)]
        assert found["tpot_p99"] == pytest.approx(sum(steps) / 10, rel=0.01)
        assert found["mean"] == pytest.approx(
            (2 * prefill + compute_prefill_s(10, 0)) / 3, rel=0.01
        )


def test_spread() -> None:
    """Two instances and two long prompts at once: whoever looks at load uses both."""
    rows = [
        build_row(0, 8000, *range(15)),
        build_row(0, 8000, *range(100, 115)),
        build_row(60, 10),
    ]
    mean = (2 * compute_prefill_s(8000, 0) + compute_prefill_s(10, 0)) / 3

    results = simulate_policies(rows, instances=2)

    # By hash, or at random until it has learned: an instance may be chosen twice.
    blind = ("session", "kvaware", "predicted_latency")
    for name in results.keys() - blind:
        assert results[name]["mean"] == pytest.approx(mean, abs=2e-5)


def test_same_again() -> None:
    """The same seed gives the same numbers, with noise, lag and slow instances too."""
    rows = [build_row(0.3 * n, 600 * (1 + n % 7), n % 5) for n in range(200)]
    policies = ("calibrated", "round_robin", "power_of_two")

    one, other = (
        simulate_policies(rows, policies, load=1.0, instances=4, slow=0.5, noise=0.3, lag=1)
        for _ in range(2)
    )

    for each in (*one.values(), *other.values()):
        each.pop("cpu")
    assert one == other
    assert one["calibrated"]["mean"] < one["round_robin"]["mean"]


def test_command_adds_seeds(tmp_path: Path) -> None:
    """Other seeds draw the trace's sessions anew; what was kept of the first stays as it is."""
    case = {**DEFAULT_CASE, "instances": 2}
    first = run_benchmark(tmp_path, "simulate", case, "--policies", "trapezoid", "calibrated")

    flags = ("--seeds", "2", "3", "--policies", "trapezoid")
    found = run_benchmark(tmp_path, "simulate", case, *flags)["cases"][0]
    means = {seed: each["trapezoid"]["mean"] for seed, each in found["seeds"].items()}

    assert found["seeds"]["1"] == first["cases"][0]["seeds"]["1"]
    assert len(set(means.values())) == 3
    assert all(0.2 < mean / means["1"] < 5 for mean in means.values())
    assert list(found["seeds"]["2"]) == ["trapezoid"]


TURNS = [build_row(n, 1100, 1, 2) for n in range(10)]
COLD_S, WARM_S, SHORT_S = (compute_prefill_s(*each) for each in ((1100, 0), (1100, 1024), (100, 0)))
ADAPTER_ROWS = [
    TraceRow(float(at), 100, (), "", adapter=adapter) for at, adapter in enumerate((1, 1, 2, 1))
]
IMAGE_ROWS = [*(TraceRow(0.0, 100, (), "", images=n) for n in (2, 1)), build_row(9, 100)]


@pytest.mark.parametrize(
    ("rows", "case", "mean_s"),
    [
        (TURNS, {}, (COLD_S + 9 * WARM_S) / 10),
        # In the middle the only instance slows, or loses what it has cached.
        (TURNS, {"event": "slows"}, (COLD_S + 4 * WARM_S + 5 * WARM_S / 0.4) / 10),
        (TURNS, {"event": "restarts"}, (2 * COLD_S + 8 * WARM_S) / 10),
        # It loads an adapter that is not among those that it keeps, and the prefill waits.
        (ADAPTER_ROWS, {"adapters": 1}, SHORT_S + 3 / 4 * 0.1),
        (ADAPTER_ROWS, {"adapters": 2}, SHORT_S + 2 / 4 * 0.1),
        # Three images at once: the last one waits for an encoder, its prompt for that.
        (IMAGE_ROWS, {"encoders": 2}, SHORT_S + (0.04 + 0.08) / 3),
    ],
)
def test_what_happens(rows: list[TraceRow], case: dict[str, Any], mean_s: float) -> None:
    """Events, adapters and encoders take as long as they are said to."""
    found = simulate_policies(rows, ["calibrated"], **case)["calibrated"]

    assert found["mean"] == pytest.approx(mean_s, abs=2e-5)


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


@pytest.mark.parametrize(
    ("instances", "load"), [(4, 3.0), pytest.param(1, 0.85, marks=pytest.mark.full)]
)
def test_a_hold_serves_short_prompts_sooner_and_all_no_later(instances: int, load: float) -> None:
    """With --max-queue-ms short prompts behind long ones have a lower p99, and all a lower mean."""
    rows = load_kinds.read_rows("heavy_tails", ROOT, 1, 400)
    case = {**DEFAULT_CASE, "kind": "heavy_tails", "instances": instances, "load": load}

    without, held = (hold_simulation.simulate_hold(case, rows, 1, limit) for limit in (0.0, 0.25))

    assert held["held"] > 0.1 and not without["held"]
    assert held["mean"] < without["mean"]
    assert held["short_p99"] < 0.9 * without["short_p99"]


def build_rows(count: int) -> tuple[TraceRow, ...]:
    """Prompts of different lengths, ten a second, that share nothing."""
    chance = random.Random(7)
    return tuple(
        TraceRow(number / 10, chance.randrange(1000, 20_000), (number + 1,), str(number))
        for number in range(count)
    )


@pytest.mark.parametrize(
    "policy", [pytest.param("least_requests", marks=pytest.mark.full), "calibrated"]
)
def test_sharing_is_as_one(policy: str) -> None:
    """What is said makes up for what a worker does not do itself; without it the mean is worse."""
    rows = build_rows(600)
    one = run_workers(SHARED_CASE, policy, rows, 1, 1, False).mean_ttft_s
    sharing = run_workers(SHARED_CASE, policy, rows, 1, 4, True).mean_ttft_s
    apart = run_workers(SHARED_CASE, policy, rows, 1, 4, False).mean_ttft_s

    assert sharing < 1.1 * one
    assert sharing < apart


def test_arrivals_are_spread() -> None:
    """Over no more than the time to which the trace rounded them, so that their order by times stays."""
    rows = tuple(TraceRow(3.0 * (number // 10), 100, (), "") for number in range(100))

    spread = load_kinds.spread_arrivals(rows, 1)

    assert len({row.arrival_s for row in spread}) == 100
    assert all(0 <= row.arrival_s - 3 * (number // 10) <= 3 for number, row in enumerate(spread))


def build_conversations(count: int, turns: int) -> tuple[TraceRow, ...]:
    """Conversations that take turns; each turn's prompt begins with all of the turn before."""
    chance = random.Random(3)
    rows = []
    for turn in range(turns):
        for session in range(count):
            blocks = (0, *(1000 * (session + 1) + block for block in range(6 * (turn + 1))))
            arrival_s = 10 * turn + 10 * chance.random()
            rows.append(TraceRow(arrival_s, 512 * len(blocks), blocks, str(session)))
    return tuple(sorted(rows, key=lambda row: row.arrival_s))


def test_replicas() -> None:
    """Whichever replica is asked, a session goes to one instance; of prefixes it knows those that it sent."""
    case, rows = SHARED_CASE | {"load": 0.7, "index": "history"}, build_conversations(60, 6)
    runs = (("session", 1), ("session", 4), ("prefix", 1), ("prefix", 4), ("hashed_prefix", 4))
    one, four, one_knows, four_know, hashed = (
        run_workers(case, policy, rows, 1, replicas, False) for policy, replicas in runs
    )

    assert four.ttfts_s == one.ttfts_s
    assert four.cached_tokens == one.cached_tokens > 0
    assert four_know.cached_tokens < 0.8 * one_knows.cached_tokens
    # By hashing what prompts begin with the same prefixes are found by each replica.
    assert hashed.cached_tokens > four_know.cached_tokens


def test_worker_commands(tmp_path: Path) -> None:
    """The figures with their goal, in a file; of replicas two for each policy and number."""
    case = {**SHARED_CASE, "index": "history"}
    # So few requests may miss a goal, which is exit code 1.
    flags = ("--cases", "case", "--seeds", "1", "--policies", "least_requests")
    figures = run_benchmark(tmp_path, "worker_sharing", case, *flags, check=False)
    assert [figure["goal"] for figure in figures.values()] == [1.03, 1.02, None, None]
    flags = ("--case", "case", "--seeds", "1", "--policies", "session")
    assert list(run_benchmark(tmp_path, "replica_routing", case, *flags)) == [
        f"{kind}, session, {replicas} replicas, case"
        for replicas in (1, 2, 4)
        for kind in ("mean TTFT, s", "cached share")
    ]


BLOCK_TOKENS = 512


class Peer:
    """The policy `name` of a peer, and three idle instances of which it knows nothing yet.

    depths: how many of a prompt's first blocks they have cached. work: tokens to be computed there.
    """

    def __init__(self, name: str, depths: Sequence[int] = (), work: Sequence[int] = ()) -> None:
        self.instances = [
            parse_instance_url(f"http://127.0.0.1:{9000 + number}", "mono") for number in range(3)
        ]
        self.policy = PEER_POLICIES[name](PolicyState(BlockHolders(BLOCK_TOKENS)))
        for instance, depth in zip(self.instances, depths, strict=False):
            self.policy.state.index.add_blocks(instance.url, range(1, depth + 1))
        for instance, tokens in zip(self.instances, work, strict=False):
            request = self.build_request((), instance.url, tokens)
            self.policy.state.record_sent(request, Decision(instance, 0.0, "made"), 0)

    def build_request(self, blocks: Sequence[int], name: str, tokens: int = 0) -> RoutingRequest:
        """A prompt of these blocks, or of so many tokens."""
        tokens = tokens or len(blocks) * BLOCK_TOKENS
        keys = tuple(blocks)
        return RoutingRequest(
            "mono", "", "model", name, {}, b"", prompt_tokens=tokens, block_keys=keys
        )

    def choose(
        self, blocks: Sequence[int] = range(1, 11), name: str = "request", count: int = 3
    ) -> tuple[int, float]:
        """Which of the first `count` instances it chooses for a prompt of these blocks, and its score."""
        request = self.build_request(blocks, name)
        found = self.policy.choose_instance(request, self.instances[:count], 0, False)
        return self.instances.index(found.instance), found.score


def test_dynamo_example() -> None:
    """Its guide: of 10 blocks 2, 5 and 8 overlap, 10, 5 and 9 are active: costs are 18, 10 and 11."""
    peer = Peer("dynamo", (2, 5, 8))
    assert isinstance(peer.policy, DynamoPolicy)
    for instance, active in zip(peer.instances, (10, 5, 9), strict=True):
        peer.policy._active_tokens[instance.url] = active * BLOCK_TOKENS

    assert peer.choose(name="first") == (1, 10 * BLOCK_TOKENS)
    # An answer that has ended has no blocks any more.
    peer.policy.record_end("first")
    assert peer.policy._active_tokens[peer.instances[1].url] == 5 * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("depths", "work", "chosen"),
    [
        # Who has 80 % of the prompt gets it until its queue is longer than others' by the allowed time.
        ((8, 7), (int(0.9 * MAX_PENALTY_S * PEAK_THROUGHPUT), 0, 50_000), 0),
        ((8, 7), (int(1.1 * MAX_PENALTY_S * PEAK_THROUGHPUT), 0, 50_000), 1),
        # Nobody has enough: the least tokens to compute, those of the prompt that are not cached included.
        ((7,), (0, 1, 1), 0),
    ],
)
def test_llmd(depths: Sequence[int], work: Sequence[int], chosen: int) -> None:
    """Affinity up to a bound, else the least work."""
    found, score = Peer("llmd", depths, work).choose()

    assert found == chosen
    assert depths != (7,) or score == 3 * BLOCK_TOKENS


def test_cache_aware() -> None:
    """The longest match if it is more than 0.3 of the prompt, else who was sent least."""
    peer = Peer("cache_aware")

    first, _ = peer.choose()
    assert peer.choose((*range(1, 5), *range(100, 106)))[0] == first  # 4 of 10
    second, _ = peer.choose((*range(1, 4), *range(200, 207)))  # 3 of 10
    assert {first, second, peer.choose(range(300, 310))[0]} == {0, 1, 2}


@pytest.mark.parametrize(("low", "high", "chosen"), ((0, 64, 0), (0, 65, 1), (200, 265, 0)))
def test_cache_aware_imbalance(low: int, high: int, chosen: int) -> None:
    """More than 64 requests apart, and half as many again: the fewest requests, whatever is cached."""
    peer = Peer("cache_aware")
    peer.choose(count=1)
    for number, instance in enumerate(peer.instances):
        instance.in_flight = low if number else high

    assert peer.choose(count=2)[0] == chosen


def test_power_of_two() -> None:
    """The busiest of three is never chosen, and each of the others is."""
    peer = Peer("power_of_two")
    peer.instances[0].in_flight = 5

    assert {peer.choose(())[0] for _ in range(100)} == {1, 2}


def test_latency_deficits() -> None:
    """Its scorer's example, all too slow: 10 and 5 above the objectives have more than 100 and 30."""
    less, more = score_deficits(numpy.array([10.0, 100.0]), numpy.array([5.0, 30.0]))
    assert less == 1.01 and more == 0.01
    # 0.8 for TTFT and 0.2 for TPOT, of those that differ.
    opposite = score_deficits(numpy.array([1.0, 2.0]), numpy.array([2.0, 1.0]))
    assert list(opposite) == pytest.approx([0.81, 0.21], abs=0.011)
    assert list(score_deficits(numpy.array([1.0, 1.0]), numpy.array([2.0, 1.0]))) == [0.01, 1.01]


@pytest.mark.parametrize(
    ("shares", "penalty_s", "in_flight", "kept"),
    (
        ((0.995, 0.9, 0.0), 0.9 * MAX_PREDICTED_PENALTY_S, (1, 1, 1), [0]),
        ((0.995, 0.9, 0.0), 1.1 * MAX_PREDICTED_PENALTY_S, (1, 1, 1), [0, 1]),
        ((0.9, 0.85, 0.7), 0.0, (1, 1, 1), [0, 1]),
        ((0.7, 0.5, 0.0), 0.0, (1, 1, 1), [0, 1, 2]),
        ((0.9, 0.85, 0.7), 0.0, (1, 0, 0), [1]),
    ),
    ids=("nearly all", "too slow of these", "most", "no affinity", "idle"),
)
def test_latency_filters(
    shares: Sequence[float], penalty_s: float, in_flight: Sequence[int], kept: Sequence[int]
) -> None:
    """Its example of an idle one, which has the score to itself; stickiness as its filter's page has it."""
    ttfts_ms = numpy.array([1000 * penalty_s + 50, 50, 50])

    assert list(filter_candidates(numpy.array(shares), ttfts_ms, in_flight)) == kept


def test_latency_trees() -> None:
    """They learn what requests take, from samples as it has them."""
    chance = numpy.random.default_rng(1)
    seen, new = (chance.random((count, 3)) * [20_000, 10, 1] for count in (1000, 100))
    seen_ms, new_ms = (5 + 0.04 * each[:, 0] + 20 * each[:, 1] for each in (seen, new))

    errors = BoostedTrees(seen, seen_ms).predict(new) / new_ms - 1

    assert float(numpy.abs(errors).mean()) < 0.05


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
def test_live_reports() -> None:
    """Both reports show their kept results; the pictures are of the one with all loads."""
    found = json.loads((RESULTS_FOLDER / "routing-live.json").read_text("utf-8"))
    latest = json.loads((RESULTS_FOLDER / "routing-live-2.json").read_text("utf-8"))

    for day, results in (("22", found), ("26", latest)):
        page = (RESULTS_FOLDER / f"2026-11-{day}-routing-live.md").read_text("utf-8")
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
    told = json.loads((RESULTS_FOLDER / "routing-decision.json").read_text("utf-8"))
    page = (RESULTS_FOLDER / "2026-11-22-routing-costs.md").read_text("utf-8")

    for size in (2, 16, 128, 1000):
        parts = ("lookup", "score", "decision", "decision, trapezoid", "accounts")
        values = [told[f"us of {part}, {size} instances"]["value"] for part in parts]
        row = " | ".join(f"{value:,.0f}".replace(",", " ") for value in (size, *values))
        assert f"| {row} |\n" in page
