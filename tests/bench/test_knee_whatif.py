# SPDX-License-Identifier: Apache-2.0
"""From a sweep's knee to what would move it, where both are known: vLLM's own Scheduler serves the load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic_ns, time_ns

import msgspec
import pytest

from bench.conftest import RunBench
from tests.explain.scheduler_truth import (
    BEFORE_US,
    Arrival,
    Device,
    find_truth,
    hasten,
    run_scheduler,
)
from tests.explain.stored_records import build_served_record, build_spans, store_spans
from ttft_otel.bench import load_plan
from ttft_otel.bench.http_exchange import RawResponse
from ttft_otel.bench.load_driver import LoadRun, RequestResult
from ttft_otel.bench.request_factory import BenchRequest
from ttft_otel.commands import bench as bench_command
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.explain.whatif.plan_search import FACTORS
from ttft_otel.model.names import keys
from ttft_otel.model.timing import ServerTiming

pytestmark = pytest.mark.filterwarnings("ignore")


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
