# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of several workers with shared books, and of replicas that share nothing, on short traces."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.routing.load_kinds import spread_arrivals
from benchmarks.routing.mooncake_traces import TraceRow
from benchmarks.routing.worker_simulation import WorkerSimulation, run_workers

ROOT = Path(__file__).parents[3]
CASE = {"name": "case", "kind": "recorded", "requests": 1000, "event": "", "instances": 4}
CASE |= {"load": 0.8, "slow": 0, "cache": 1000, "noise": 0, "lag": 0, "index": "events"}
REPLICA_CASE = {**CASE, "load": 0.7, "index": "history"}


def run_benchmark(
    folder: Path, module: str, case: dict[str, Any], *flags: str, check: bool = True
) -> Any:
    """The JSON that the benchmark `module` writes for `case`. check: whether it has to end with 0."""
    rows: list[dict[str, Any]] = [
        {"timestamp": 100 * number, "input_length": 2000, "output_length": 1, "hash_ids": [number]}
        for number in range(40)
    ]
    (folder / "conversation_trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "cases.json").write_text(json.dumps({"cases": [case]}))
    subprocess.run(
        [
            *(sys.executable, "-m", f"benchmarks.routing.{module}", "--traces", folder),
            *("--list", folder / "cases.json", "--seeds", "1", *flags),
            *("--json", folder / "out.json"),
        ],
        cwd=ROOT,
        check=check,
        capture_output=True,
    )
    return json.loads((folder / "out.json").read_text("utf-8"))


def build_rows(count: int) -> tuple[TraceRow, ...]:
    """Prompts of different lengths, ten a second, that share nothing."""
    chance = random.Random(7)
    return tuple(
        TraceRow(number / 10, chance.randrange(1000, 20_000), (number + 1,), str(number))
        for number in range(count)
    )


@pytest.mark.parametrize("policy", ["least_requests", "calibrated"])
def test_sharing_is_as_one(policy: str) -> None:
    """What is said makes up for what a worker does not do itself; without it the mean is worse."""
    rows = build_rows(600)
    one = run_workers(CASE, policy, rows, 1, 1, False).mean_ttft_s
    sharing = run_workers(CASE, policy, rows, 1, 4, True).mean_ttft_s
    apart = run_workers(CASE, policy, rows, 1, 4, False).mean_ttft_s

    assert sharing < 1.1 * one
    assert sharing < apart


def test_arrivals_are_spread() -> None:
    """Over no more than the time to which the trace rounded them, so that their order by times stays."""
    rows = tuple(TraceRow(3.0 * (number // 10), 100, (), "") for number in range(100))

    spread = spread_arrivals(rows, 1)

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


def run_replicas(policy: str, replicas: int) -> WorkerSimulation:
    """The simulation with so many replicas, at its end."""
    return run_workers(REPLICA_CASE, policy, build_conversations(60, 6), 1, replicas, False)


def test_hashed_is_as_one() -> None:
    """Whichever replica is asked, a session goes to one instance: times and hits are those of one router."""
    one, four = run_replicas("session", 1), run_replicas("session", 4)

    assert four.ttfts_s == one.ttfts_s
    assert four.cached_tokens == one.cached_tokens > 0


def test_remembered_is_not() -> None:
    """A replica knows the prefixes that it sent itself; what it does not know it sends anywhere."""
    one, four = run_replicas("prefix", 1), run_replicas("prefix", 4)

    assert four.cached_tokens < 0.8 * one.cached_tokens
    # By hashing what prompts begin with the same prefixes are found by each replica.
    hashed = run_replicas("hashed_prefix", 4).cached_tokens
    assert hashed > four.cached_tokens


def test_commands(tmp_path: Path) -> None:
    """The figures with their goal, in a file; of replicas two for each policy and number."""
    # Forty requests may miss a goal, which is exit code 1.
    flags = ("--cases", "case", "--policies", "least_requests")
    figures = run_benchmark(tmp_path, "worker_sharing", CASE, *flags, check=False)
    assert [figure["goal"] for figure in figures.values()] == [1.03, 1.02, None, None]
    flags = ("--case", "case", "--policies", "session")
    assert list(run_benchmark(tmp_path, "replica_routing", REPLICA_CASE, *flags)) == [
        f"{kind}, session, {replicas} replicas, case"
        for replicas in (1, 2, 4)
        for kind in ("mean TTFT, s", "cached share")
    ]
