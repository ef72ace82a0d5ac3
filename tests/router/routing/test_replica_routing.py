# SPDX-License-Identifier: Apache-2.0
"""The benchmark of replicas that share nothing: which policies lose by it, and the command as called."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.routing.mooncake_traces import TraceRow
from benchmarks.routing.worker_simulation import WorkerSimulation, run_workers
from router.routing.small_trace import run_benchmark

CASE = {
    "name": "case",
    "trace": "conversation",
    "instances": 4,
    "load": 0.7,
    "slow": 0,
    "cache": 1000,
    "noise": 0,
    "lag": 0,
    "index": "history",
}


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
    return run_workers(CASE, policy, build_conversations(60, 6), 1, replicas, False)


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


def test_command(tmp_path: Path) -> None:
    """Two figures for each policy and number of replicas."""
    figures = run_benchmark(
        tmp_path, "replica_routing", CASE, "--case", "case", "--policies", "session"
    )
    kinds = ("mean TTFT, s", "cached share")
    assert list(figures) == [
        f"{kind}, session, {replicas} replicas, case" for replicas in (1, 2, 4) for kind in kinds
    ]
