# SPDX-License-Identifier: Apache-2.0
"""Data parallelism of a model with experts: ranks work in step, and wait for each other.

vLLM's DPEngineCoreProc, whose ranks' communicator has two calls from lab/vllm_plugins/cpu_experts. It takes
minutes and runs only with `scripts/test --full`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lab import tiny_models
from tests.live.bench import LiveDeployment
from tests.live.conftest import DeploymentDeck
from tests.live.test_alone import read_dispatch_parts, run_alone
from tests.live.test_injected import Injection, check_stage
from ttft_otel.model import stages
from ttft_otel.model.names import keys

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
DELAY_US = 300_000


@pytest.fixture(scope="module")
def ranks(
    deck: DeploymentDeck, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveDeployment]:
    """Two ranks that ask after each step whether any of them has work left."""
    with run_alone(
        deck,
        tmp_path_factory.mktemp("ranks"),
        ("--data-parallel-size", "2", "--dp-sync-interval", "1", "--api-server-count", "1"),
        model=tiny_models.build_model(tiny_models.EXPERTS_RECIPE),
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        plugins=("cpu_experts",),
    ) as bench:
        yield bench


def send_to_rank(bench: LiveDeployment, rank: int, **fields: Any) -> dict[str, int]:
    """The breakdown of a request to this rank."""
    return bench.read_one(headers={"X-data-parallel-rank": str(rank)}, max_tokens=1, **fields)


def trace_at_rank(bench: LiveDeployment, rank: int) -> str:
    """The trace of one request to this rank."""
    return bench.send_traced(max_tokens=1, headers={"X-data-parallel-rank": str(rank)})[1]


def test_both_ranks_close(ranks: LiveDeployment) -> None:
    """Nothing is unattributed on either rank, of one chunk or several, alone or beside the other's work."""
    found = [send_to_rank(ranks, turn % 2, words=words) for turn in range(4) for words in (40, 900)]

    assert all(each[stages.UNATTRIBUTED] == 0 for each in found), found
    for rank in (0, 1):
        assert ranks.fetch_ttft(trace_at_rank(ranks, rank))[keys.RANK] == rank
    assert ranks.list_complaints("mono") == []


def test_a_late_rank_is_dispatch(ranks: LiveDeployment) -> None:
    """What another rank takes before it meets this one is in dispatch alone, in its part dp_sync."""
    check_stage(
        ranks, Injection("other_rank", 400, 100), "dispatch", lambda: send_to_rank(ranks, 0)
    )
    with ranks.control.inject_delay("other_rank", DELAY_US / 1000):
        parts = read_dispatch_parts(ranks, trace_at_rank(ranks, 1))

    assert 0.9 * DELAY_US <= parts["dp_sync"] <= 1.2 * DELAY_US, parts


def test_a_batch_for_another_rank_holds_the_queue(ranks: LiveDeployment) -> None:
    """Who comes to a rank without requests, while the other one answers, waits for that one's step."""
    answer = threading.Thread(
        target=ranks.send_request,
        args=(ranks.front_url,),
        kwargs={
            "headers": {"X-data-parallel-rank": "0"},
            "max_tokens": 60,
            "extra": {"ignore_eos": True},
        },
    )
    with ranks.control.inject_delay("forward", 100):
        answer.start()
        time.sleep(1)
        found = [ranks.fetch_ttft(trace_at_rank(ranks, 1)) for _ in range(6)]
    answer.join()

    queued = sum(each.get(keys.name_stage_attribute("prefill.queue"), 0) for each in found)
    held = sum(each.get(keys.name_held_attribute("other_rank"), 0) for each in found)
    assert queued >= 100_000, found
    assert held >= 0.95 * queued, found
    assert all(each[keys.UNATTRIBUTED_US] == 0 for each in found)
