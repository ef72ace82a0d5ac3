# SPDX-License-Identifier: Apache-2.0
"""Replicas as processes, with a store and without: sessions stay, loads are shared, whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from router import fake_instances
from router.fake_instances import InstancePlan
from router.shared_state.test_store_link import run_store

from commands.router.test_router_process import CommandProcess, run_command
from commands.router.test_worker_processes import (
    post_alone,
    wait_for_metric,
    wait_for_workers,
)
from ttft_otel.model.names import metric_names

STREAMS = 6


async def wait_for_load(it: CommandProcess, number: int) -> None:
    """Wait until it believes that so many are in flight, whichever of its workers is asked."""
    await it.wait_for_all(
        1, lambda found: sum(each["in_flight"] for each in found.values()) == number
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "workers"),
    [("least_requests", "2"), *(pytest.param("ttft", n, marks=pytest.mark.full) for n in "12")],
)
async def test_replicas_decide_on_the_whole_load(tmp_path: Path, policy: str, workers: str) -> None:
    """Streams that stay open are spread evenly; when a replica is killed, the other forgets its load."""
    permits = asyncio.Semaphore(0)
    plan = InstancePlan(permits=permits)
    async with (
        run_store(tmp_path) as store,
        fake_instances.run_instance(plan) as a,
        fake_instances.run_instance(plan) as b,
        AsyncExitStack() as stack,
    ):
        flags = ("--routing-logic", policy, "--workers", workers, "--shared-state", store.url)
        replicas = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            run = run_command(tmp_path / name, "--backend", a.url, "--backend", b.url, *flags)
            replicas.append(await stack.enter_async_context(run))
        for each in replicas:
            if workers == "2":
                await wait_for_workers(each, 2)
            await wait_for_metric(each, metric_names.ROUTER_REPLICAS, 1)
        streams = []
        for count in range(1, STREAMS + 1):
            streams.append(asyncio.create_task(post_alone(replicas[count % 2])))
            for each in replicas:
                await wait_for_load(each, count)
        if policy == "least_requests":
            assert [len(each.received) for each in (a, b)] == [STREAMS // 2] * 2
        pids = replicas[0].list_workers()
        replicas[0].send_signal(signal.SIGKILL)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await wait_for_load(replicas[1], STREAMS // 2)
        for _ in range(100):
            permits.release()
        assert sorted(await asyncio.gather(*streams)) == [0] * 3 + [200] * 3
        await wait_for_load(replicas[1], 0)
