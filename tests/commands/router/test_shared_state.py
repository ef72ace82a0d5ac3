# SPDX-License-Identifier: Apache-2.0
"""Replicas as processes, with a store and without: sessions stay, loads are shared, whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner
from router import fake_instances
from router.fake_instances import FakeInstance, InstancePlan
from router.shared_state.store_server import StoreServer, needs_store, run_store

from commands.router.test_router_process import CommandProcess, run_command
from commands.router.test_worker_processes import (
    list_worker_pids,
    post_alone,
    wait_for_metric,
    wait_for_workers,
)
from ttft_otel.commands.router.command import command
from ttft_otel.model.names import metric_names

STREAMS = 6


class Replica:
    """One replica: its process and its admin port."""

    def __init__(self, process: CommandProcess, admin: str) -> None:
        self.process, self.admin = process, admin

    async def read_instances(self) -> dict[str, dict[str, object]]:
        """What its admin port says of each instance, by URL."""
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{self.admin}/instances") as response:
                return {each["url"]: each for each in (await response.json())["instances"]}

    async def wait_for_load(self, number: int) -> None:
        """Wait until it believes that so many are in flight, whichever of its workers is asked."""
        answers = 0
        while answers < 8:
            found = sum(
                int(str(each["in_flight"])) for each in (await self.read_instances()).values()
            )
            answers = answers + 1 if found == number else 0
            await asyncio.sleep(0.01)


@asynccontextmanager
async def run_replicas(
    folder: Path,
    instances: Sequence[FakeInstance],
    stores: Sequence[StoreServer | None],
    *flags: str,
) -> AsyncIterator[list[Replica]]:
    """A replica for each of `stores`, which may be one; None shares nothing."""
    async with AsyncExitStack() as stack:
        replicas = []
        for number, store in enumerate(stores):
            home = folder / str(number)
            home.mkdir()
            admin = fake_instances.find_unused_url()
            shared = () if store is None else ("--shared-state", store.url)
            process = await stack.enter_async_context(
                run_command(
                    home,
                    *shared,
                    *("--admin-port", admin.rpartition(":")[2]),
                    *(flag for each in instances for flag in ("--backend", each.url)),
                    *flags,
                )
            )
            replicas.append(Replica(process, admin))
            if store is not None:
                await wait_for_metric(process, metric_names.ROUTER_SHARED_STATE_UP, 1)
        yield replicas


@needs_store
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "workers"),
    [("least_requests", "2"), *(pytest.param("ttft", n, marks=pytest.mark.full) for n in "12")],
)
async def test_replicas_decide_on_the_whole_load(tmp_path: Path, policy: str, workers: str) -> None:
    """Streams that stay open are spread evenly; when a replica is killed, the other forgets its load."""
    plan = InstancePlan(permits=asyncio.Semaphore(0))
    async with (
        run_store(tmp_path) as store,
        fake_instances.run_instance(plan) as a,
        fake_instances.run_instance(plan) as b,
        run_replicas(
            tmp_path, (a, b), (store, store), "--routing-logic", policy, "--workers", workers
        ) as replicas,
    ):
        for each in replicas:
            if workers == "2":
                await wait_for_workers(each.process, 2)
            await wait_for_metric(each.process, metric_names.ROUTER_REPLICAS, 1)
        streams = []
        for count in range(1, STREAMS + 1):
            replica = replicas[count % 2]
            streams.append(asyncio.create_task(post_alone(replica.process)))
            for each in replicas:
                await each.wait_for_load(count)
        if policy == "least_requests":
            assert [len(each.received) for each in (a, b)] == [STREAMS // 2] * 2
        pids = list_worker_pids(replicas[0].process)
        replicas[0].process.send_signal(signal.SIGKILL)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await replicas[1].wait_for_load(STREAMS // 2)
        assert plan.permits is not None
        for _ in range(100):
            plan.permits.release()
        assert sorted(await asyncio.gather(*streams)) == [0] * 3 + [200] * 3
        await replicas[1].wait_for_load(0)


@needs_store
@pytest.mark.full
async def test_an_open_breaker_warns_the_others(tmp_path: Path) -> None:
    """A failing instance costs each other replica one request; who shares nothing pays all three."""
    async with (
        run_store(tmp_path) as store,
        fake_instances.run_instance(InstancePlan(breaks_stream=True)) as bad,
        fake_instances.run_instance() as good,
        run_replicas(
            tmp_path,
            (bad, good),
            (store, store, None),
            *("--routing-logic", "round_robin", "--retries", "0"),
            *("--breaker-failures", "3", "--health-interval", "3600"),
        ) as (first, second, alone),
    ):
        costs = []
        for replica in (first, second, alone):
            before = len(bad.received)
            for _ in range(8):
                await post_alone(replica.process)
                if (await replica.read_instances())[bad.url]["breaker"] == "open":
                    break
            costs.append(len(bad.received) - before)
            await asyncio.sleep(0.2)
    assert costs == [3, 1, 3]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shared-state", "http://store"], "write redis://"),
        (["--shared-state", "redis://:secret@"], "write redis://"),
        (["--shared-state", "redis://store/index"], "write redis://"),
        (["--shared-state", "rediss://store?ssl_cert_reqs=none"], "only ssl_ca_certs"),
        (["--shared-state", "rediss://store?ssl_ca_certs=/none"], "/none cannot be read"),
        (["--shared-state", "redis://store", "--shared-state-password-file", "/none"], "be read"),
        (["--shared-state-prefix", "mine"], "need --shared-state"),
    ],
)
def test_what_is_wrong_is_said(flags: list[str], words: str) -> None:
    """Before anything listens, and without a password that may be in the URL."""
    given = ["--backend", "http://127.0.0.1:1", *flags]
    refused = CliRunner().invoke(command, given)
    assert refused.exit_code == 2 and words in " ".join(refused.output.split())
    assert "secret" not in refused.output


async def test_without_the_flag_the_client_is_not_imported(tmp_path: Path) -> None:
    """It costs a router that shares nothing neither time nor memory."""
    code = (
        "import sys; from ttft_otel.commands.router.command import command\n"
        "try: command(['--backend', 'http://127.0.0.1:1', '--port', '1', '--host', '192.0.2.1',"
        " '--insecure'])\n"
        "except BaseException: pass\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'redis'])"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert said.decode().strip() == "[]"
