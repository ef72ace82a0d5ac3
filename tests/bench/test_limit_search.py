# SPDX-License-Identifier: Apache-2.0
"""The search for the highest rate, over many seeds against queues whose true limit is known; a sweep's knee,
and what would move it, where both are known: vLLM's own Scheduler serves the load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from bench.conftest import RunBench, invoke_bench, validate_document
from bench.scripted_server import ServerScript, run_scripted_server
from tests.explain.stored_records import (
    BEFORE_US,
    Arrival,
    Device,
    build_served_record,
    build_spans,
    find_truth,
    hasten,
    run_scheduler,
    store_spans,
)
from ttft_otel.bench import bench_session, load_plan
from ttft_otel.bench.http_exchange import RawResponse
from ttft_otel.bench.limit_search import LimitSearch, RateEvidence, parse_condition
from ttft_otel.bench.load_driver import LoadRun, RequestResult
from ttft_otel.bench.request_factory import BenchRequest
from ttft_otel.commands import bench as bench_command
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.explain.whatif.what_if import FACTORS
from ttft_otel.model.names import keys
from ttft_otel.model.timing import ServerTiming

Times = NDArray[np.float64]
SERVICE_S = 0.1


def draw_constant(chance: np.random.Generator, count: int) -> Times:
    """Service times of a server that serves every request alike (M/D/1)."""
    return np.full(count, SERVICE_S)


def draw_mixed(chance: np.random.Generator, count: int) -> Times:
    """One request of ten takes eleven times as long as the others."""
    return np.where(chance.random(count) < 0.9, SERVICE_S / 2, 5.5 * SERVICE_S)


def simulate_queue(
    chance: np.random.Generator,
    rate: float,
    count: int,
    draw: Callable[[np.random.Generator, int], Times],
) -> Times:
    """Milliseconds from arrival to end of `count` requests at an idle server with one place (Lindley)."""
    gaps, services = chance.exponential(1 / rate, count), draw(chance, count)
    walk = np.concatenate(([0.0], np.cumsum(services[:-1] - gaps[1:])))
    return 1000 * (walk - np.minimum.accumulate(walk) + services)


def compute_tail(rate: float, limit_s: float) -> float:
    """The share of requests that stay for longer than `limit_s` in an M/D/1 queue (Erlang)."""
    wait_s = limit_s - SERVICE_S
    terms = (
        (rate * (place * SERVICE_S - wait_s)) ** place
        / math.factorial(place)
        * math.exp(-rate * (place * SERVICE_S - wait_s))
        for place in range(int(wait_s / SERVICE_S) + 1)
    )
    return 1 - (1 - rate * SERVICE_S) * sum(terms)


def find_crossing(compute_share: Callable[[float], float], tail: float) -> float:
    """The rate at which the share reaches `tail`."""
    low, high = 0.1, 1 / SERVICE_S
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if compute_share(middle) < tail else (low, middle)
    return low


def search_limit(
    seed: int, condition: str, draw: Callable[[np.random.Generator, int], Times]
) -> LimitSearch:
    """A search against a simulated queue."""
    chance = np.random.default_rng(seed)
    search = LimitSearch([parse_condition(condition)], start=1.0)
    while not search.ended:
        count = search.count_requests()
        spent_ms = simulate_queue(chance, search.rate, count, draw)
        search.record_round({"ttft": spent_ms.tolist()}, count)
    return search


@pytest.mark.parametrize(
    ("condition", "searches"),
    [
        ("ttft.p95<500", 40),
        pytest.param("ttft.p95<500", 100, marks=pytest.mark.full),
        pytest.param("ttft.p95<300", 100, marks=pytest.mark.full),
        pytest.param("ttft.p99<500", 100, marks=pytest.mark.full),
        pytest.param("ttft.p90<1000", 100, marks=pytest.mark.full),
    ],
)
def test_limit(condition: str, searches: int) -> None:
    """The limit of M/D/1, which is known by formula, is in the interval in 95 of 100 searches."""
    asked = parse_condition(condition)
    limit = find_crossing(lambda rate: compute_tail(rate, asked.limit_ms / 1000), asked.tail)
    found = [search_limit(seed, condition, draw_constant) for seed in range(searches)]

    assert sum(each.low <= limit <= each.high for each in found) >= 0.95 * searches
    assert np.median([each.high / each.low for each in found]) < 2.0
    estimates = [each.estimate or 0.0 for each in found]
    assert np.median(estimates) == pytest.approx(limit, rel=0.06)


@pytest.mark.full
def test_limit_mixed() -> None:
    """With service times that differ much, the limit by a long simulation is in the interval."""
    condition = "ttft.p95<1500"
    chance = np.random.default_rng(1)
    limit = find_crossing(
        lambda rate: float((simulate_queue(chance, rate, 300_000, draw_mixed) > 1500).mean()), 0.05
    )
    found = [search_limit(seed, condition, draw_mixed) for seed in range(100)]

    assert sum(each.low <= limit <= each.high for each in found) >= 95


def test_two_conditions() -> None:
    """All conditions must hold: the stricter one decides, and the interval covers its limit."""
    chance = np.random.default_rng(3)
    conditions = [parse_condition("ttft.p95<500"), parse_condition("tpot.p95<50")]
    search = LimitSearch(conditions, start=1.0)
    while not search.ended:
        count = search.count_requests()
        # The limits: the p95 of the tokens 3.87, that of the TTFT 6.9.
        gaps_ms = chance.normal(12.5 * search.rate, 1.0, count)
        ttfts_ms = simulate_queue(chance, search.rate, count, draw_constant)
        search.record_round({"ttft": ttfts_ms.tolist(), "tpot": gaps_ms.tolist()}, count)

    assert 3.3 < search.low < 3.87 < search.high < 4.5


@pytest.mark.parametrize(("limit", "low", "high"), [(0, 0, 1), (6, 6, 7)])
def test_concurrency(limit: int, low: int, high: int) -> None:
    """Whole numbers: the last that holds and the first that fails, or none that holds."""
    search = LimitSearch([parse_condition("latency.p90 < 100 ms")], start=2, is_whole=True)
    while not search.ended:
        spent_ms = 50.0 if search.rate <= limit else 200.0
        search.record_round({"latency": [spent_ms] * 200}, 200)

    assert (search.low, search.high) == (low, high)


def test_overload() -> None:
    """Rounds that end early because the queue only grows are evidence; what was not sent counts as well."""
    search = LimitSearch([parse_condition("ttft.p95<500")], start=100.0, max_rounds=2)
    for _ in range(2):
        search.rate = 100.0
        search.record_round({"ttft": [100.0] * 60 + [math.inf] * 60}, 200)

    assert search.high == 100.0


@pytest.mark.full
def test_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken as independent, requests that wait in one queue prove too much: the interval misses the limit."""

    def add_round(self: RateEvidence, *words: Any) -> None:
        add_dependent_round(self, *words)
        self.dependence = 1.0

    add_dependent_round = RateEvidence.add_round
    monkeypatch.setattr(RateEvidence, "add_round", add_round)
    limit = find_crossing(lambda rate: compute_tail(rate, 0.5), 0.05)
    found = [search_limit(seed, "ttft.p95<500", draw_constant) for seed in range(50)]

    assert sum(each.low <= limit <= each.high for each in found) < 45


def test_nothing_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit below what one request takes: every rate fails, early, and the table says so."""
    # A busy machine that sends late does not end the search: what is sent when is not the question here.
    monkeypatch.setattr(bench_session, "MAX_LATENESS", 10.0)
    script = ServerScript(first_token_ms=[30.0], token_count=1, has_queue=True)
    file = tmp_path / "found.json"
    with run_scripted_server(script) as server:
        words = "--find ttft.p90<5 --rate 80 --requests 60 --input-len 10 --repeat 2 --output"
        shown = invoke_bench("--url", server.url, words, file).output
    found = validate_document(json.loads(file.read_text("utf-8")))

    interval = found["sweep"]["limit"]
    assert (interval["low"], interval["high"]) == (0, 80), interval
    assert any(row["overloaded"] for row in found["sweep"]["rates"])
    assert found["targets"][0]["runs"], "the lowest rate that was tried"
    assert "the limit is between 0 and" in shown and "80! ✗" in shown


@dataclass
class KnownEngine:
    """Serves loads in no time as an engine with these limits and this device, and stores their spans."""

    limits: EngineLimits
    device: Device
    database: Path
    at_ns: int = field(default_factory=lambda: monotonic_ns() - 3600 * 10**9)
    loads: list[list[Arrival]] = field(default_factory=list)

    async def serve(self, run: LoadRun, arrivals: Iterable[tuple[float, BenchRequest]]) -> None:
        """Instead of run_open_loop(): results of an hour ago, one load after the other."""
        load = []
        for offset_s, request in arrivals:
            body = json.loads(request.body)
            at_us = round(offset_s * 1e6) + BEFORE_US
            load.append(Arrival(at_us, len(body["prompt"]), body["max_tokens"]))
        records = []
        for arrival, one in zip(
            load, run_scheduler(tuple(load), self.limits, self.device), strict=True
        ):
            number = run.started + 1000 * len(self.loads)
            record = build_served_record(number, arrival, one)
            sent_ns = self.at_ns + (arrival.at_us - BEFORE_US) * 1000
            wall_ns = sent_ns + time_ns() - monotonic_ns()
            records.append(msgspec.structs.replace(record, start_ns=wall_ns))
            lengths = record.ttft.stages
            ttft_us = sum(lengths.values())
            end_ns = sent_ns + 1000 * (ttft_us + one.end - one.first_token)
            run.started += 1
            run.results.append(
                RequestResult(
                    record.request_id,
                    record.trace_id,
                    RawResponse(sent_ns, sent_ns=sent_ns, end_ns=end_ns, status=200),
                    ServerTiming(lengths, 0, ttft_us),
                    token_times_ns=[sent_ns + 1000 * ttft_us, end_ns],
                    prompt_tokens=arrival.tokens,
                    cached_tokens=0,
                    completion_tokens=arrival.answer,
                )
            )
        settings = {
            "service.instance.id": "chat-1",
            keys.ENGINE_MAX_SEQS: self.limits.max_num_seqs,
            keys.ENGINE_MAX_TOKENS: self.limits.max_batched_tokens,
        }
        store_spans(self.database, build_spans(records, settings))
        self.loads.append(load)
        self.at_ns = run.end_ns + 10**9


def measure_capacity(engine: KnownEngine) -> float:
    """Requests a second where all are there from the start."""
    waiting = tuple(replace(each, at_us=0) for each in engine.loads[0])
    served = run_scheduler(waiting, engine.limits, engine.device)
    return len(waiting) / max(one.end for one in served) * 1e6


def find_p95_ms(load: Sequence[Arrival], limits: EngineLimits, *devices: Device) -> float:
    """The true p95 of the TTFT where the load comes 1.5 times as fast."""
    faster = hasten(load, bench_command.WHATIF_RATE)
    (p95_us,) = find_truth(faster, limits, devices, shares=(0.95,))
    return float(p95_us) / 1000


# Places are few and a step costs the same for one or four; or places are many and each token costs.
CASES = {
    "few_places": (EngineLimits(2, 2048), Device(base_us=8000, token_us=10), 10),
    "slow_tokens": (EngineLimits(64, 8192), Device(base_us=500, token_us=450), 2),
}
RATES = (2, 7, 35)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "stage", "plan"),
    [
        pytest.param(
            *("few_places", "prefill.queue", "1 instance with --max-num-seqs 4"),
            marks=pytest.mark.full,  # 20 s of simulated servers
        ),
        ("slow_tokens", "prefill.compute", "2 instances"),
    ],
)
def test_knee(
    bench: RunBench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    stage: str,
    plan: str,
) -> None:
    """The knee is below the capacity, the stage that breaks first is named, and the plan is the right one.

    Right: with it the engine keeps the p95 of the knee at 1.5 times its rate, and with less it does not.
    """
    limits, device, answer = CASES[name]
    engine = KnownEngine(limits, device, tmp_path / "spans.db")
    monkeypatch.setattr(load_plan, "run_open_loop", engine.serve)
    monkeypatch.setattr(bench_command, "WHATIF_REPETITIONS", 3)
    words = f"--input-len 90 --spread 0.6 --requests 80 --output-len {answer} --db"
    rates = ",".join(map(str, RATES))
    found = bench("--url http://127.0.0.1:1 --model m --rate", rates, words, engine.database)[
        "sweep"
    ]

    assert found["knee"] == RATES[1] < measure_capacity(engine) < RATES[2]
    assert found["explanation"].startswith(f"{stage} grows first: ")
    assert f": {plan}. It does in" in found["whatif"], found["whatif"]
    load, target_ms = engine.loads[1], found["rates"][1]["ttft_ms"]["p95"]
    if name == "few_places":
        assert find_p95_ms(load, limits, device) > target_ms
        assert find_p95_ms(load, replace(limits, max_num_seqs=4), device) <= target_ms
    else:
        for places, tokens in FACTORS:
            other = replace(
                limits,
                max_num_seqs=round(places * limits.max_num_seqs),
                max_batched_tokens=round(tokens * limits.max_batched_tokens),
            )
            assert find_p95_ms(load, other, device) > target_ms, "no setting is enough"
        assert find_p95_ms(load, limits, device, device) <= target_ms
