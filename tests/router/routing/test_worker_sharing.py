# SPDX-License-Identifier: Apache-2.0
"""The benchmark of shared books, as it is called, on a short trace."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.routing.mooncake_traces import TraceRow
from benchmarks.routing.worker_sharing import spread_arrivals
from benchmarks.routing.worker_simulation import run_workers
from router.routing.small_trace import run_benchmark

CASE = {
    "name": "case",
    "trace": "conversation",
    "instances": 4,
    "load": 0.8,
    "slow": 0,
    "cache": 1000,
    "noise": 0,
    "lag": 0,
    "index": "events",
}


def build_rows(count: int) -> tuple[TraceRow, ...]:
    """Prompts of different lengths, ten a second, that share nothing."""
    chance = random.Random(7)
    return tuple(
        TraceRow(number / 10, chance.randrange(1000, 20_000), (number + 1,), str(number))
        for number in range(count)
    )


@pytest.mark.parametrize("policy", ["least_requests", "calibrated", "qps"])
def test_sharing_is_as_one(policy: str) -> None:
    """What is said makes up for what a worker does not do itself; without it the mean is worse."""
    rows = build_rows(600)
    one = run_workers(CASE, policy, rows, 1, 1, False).mean_ttft_s
    sharing = run_workers(CASE, policy, rows, 1, 4, True).mean_ttft_s
    apart = run_workers(CASE, policy, rows, 1, 4, False).mean_ttft_s

    assert sharing < 1.1 * one
    assert sharing < apart


def test_same_seed_same_figures() -> None:
    """Nothing but the seeds decides."""
    rows = build_rows(100)

    assert (
        run_workers(CASE, "calibrated", rows, 3, 4, True).mean_ttft_s
        == run_workers(CASE, "calibrated", rows, 3, 4, True).mean_ttft_s
    )


def test_arrivals_are_spread() -> None:
    """Over no more than the time to which the trace rounded them, so that their order by times stays."""
    rows = tuple(TraceRow(3.0 * (number // 10), 100, (), "") for number in range(100))

    spread = spread_arrivals(rows, 1)

    assert len({row.arrival_s for row in spread}) == 100
    assert all(0 <= row.arrival_s - 3 * (number // 10) <= 3 for number, row in enumerate(spread))


def test_command(tmp_path: Path) -> None:
    """The figures with their goal, in a file."""
    # Forty requests may miss a goal, which is exit code 1.
    figures = run_benchmark(
        tmp_path,
        "worker_sharing",
        CASE,
        "--cases",
        "case",
        "--policies",
        "least_requests",
        check=False,
    )

    assert [figure["goal"] for figure in figures.values()] == [1.03, 1.02, None, None]
