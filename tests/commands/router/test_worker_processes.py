# SPDX-License-Identifier: Apache-2.0
"""`--workers` as real processes: clients and operators see one router, also while workers are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from router import fake_instances
from router.fake_instances import STREAM_EVENTS, FakeInstance, InstancePlan

from commands.router.test_router_process import CommandProcess, run_command
from ttft_otel.commands.router.command import command
from ttft_otel.model.names import env_names, header_names, metric_names

FEW_CLIENTS = 4


def list_worker_pids(it: CommandProcess) -> list[int]:
    """The processes of the workers that run now."""
    children = Path(f"/proc/{it.process.pid}/task/{it.process.pid}/children").read_text("ascii")
    return [int(pid) for pid in children.split()]


async def read_metrics(it: CommandProcess) -> dict[str, float]:
    """The samples of /metrics, asked for on a connection of its own."""
    async with aiohttp.ClientSession() as client:
        async with client.get(f"{it.router.url}/metrics") as response:
            lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def wait_for_workers(it: CommandProcess, count: int, restarts: int = 0) -> None:
    """Wait until so many serve, and so many were replaced."""
    while True:
        metrics = await read_metrics(it)
        is_right = metrics.get(metric_names.ROUTER_WORKERS) == count
        if is_right and metrics.get(f"{metric_names.ROUTER_WORKER_RESTARTS}_total", 0) >= restarts:
            return
        await asyncio.sleep(0.1)


async def wait_for_metric(it: CommandProcess, name: str, value: float) -> None:
    """Wait until /metrics shows this value: a worker writes its own once a second."""
    while (await read_metrics(it)).get(name) != value:
        await asyncio.sleep(0.1)


async def post_alone(it: CommandProcess, request_id: str = "") -> int:
    """The status of a request on a connection of its own, 0 when it was cut."""
    headers = {header_names.REQUEST_ID: request_id} if request_id else {}
    try:
        async with aiohttp.ClientSession() as client:
            body = {"model": "tiny", "stream": True, "messages": []}
            url = f"{it.router.url}/v1/chat/completions"
            async with client.post(url, json=body, headers=headers) as response:
                return response.status if await response.read() == b"".join(STREAM_EVENTS) else 0
    except aiohttp.ClientError:
        return 0


@pytest.mark.slow
async def test_one_router(tmp_path: Path) -> None:
    """Reports and metrics are those of all workers; SIGHUP reloads and SIGTERM drains all of them."""
    file = tmp_path / "router.yaml"
    plan = InstancePlan(permits=asyncio.Semaphore(1000))
    async with fake_instances.run_instance(plan) as a, fake_instances.run_instance() as b:
        file.write_text(f"backend: [{a.url}]\n")
        flags = ("--config", str(file), "--workers", "3", "--reports", "100")
        # Without an endpoint that answers: reports are kept all the same.
        traced = {env_names.TTFT_OTEL: "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
        async with run_command(tmp_path, *flags, **traced) as it:
            await wait_for_workers(it, 3)
            assert len(list_worker_pids(it)) == 3
            ids = [f"request-{number}" for number in range(12)]
            assert [await post_alone(it, each) for each in ids] == [200] * 12
            for each in ids:
                async with aiohttp.ClientSession() as client:
                    async with client.get(f"{it.router.url}/ttft_report/{each}") as response:
                        assert response.status == 200, each
            assert await it.get_status("/ttft_report/nobody") == 404
            await wait_for_metric(it, f'{metric_names.ROUTER_REQUESTS}_total{{result="2xx"}}', 12)

            file.write_text(f"backend: [{b.url}]\n")
            it.send_signal(signal.SIGHUP)
            await it.wait_for_log(f"added {b.url}; removed {a.url}", 3)
            assert [await post_alone(it) for _ in range(6)] == [200] * 6
            assert (len(a.received), len(b.received)) == (12, 6)
            await wait_for_metric(it, f'{metric_names.ROUTER_RELOADS}_total{{result="ok"}}', 1)

            it.send_signal(signal.SIGTERM)
            assert await it.process.wait() == 0
            assert it.log.read_text().count("shutting down") == 3


def describe_process(pid: int) -> dict[str, Any]:
    """What a router's process has beside serving: what several workers need, by the kernel's own account."""
    proc = Path(f"/proc/{pid}")
    links = []
    for each in (proc / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(each.readlink()))
    return {
        "processes": len((proc / "task" / str(pid) / "children").read_text("ascii").split()),
        "threads": sorted(
            (each / "comm").read_text("utf-8").strip() for each in (proc / "task").iterdir()
        ),
        "sockets": sum(link.startswith("socket:") for link in links),
        # Anonymous memory that forked processes share.
        "shared memory": (proc / "maps").read_text("utf-8").count("/dev/zero (deleted)")
        + sum(link.startswith("/memfd:") for link in links),
    }


@pytest.mark.full
async def test_one_worker_starts_nothing(tmp_path: Path) -> None:
    """--workers 1 needs no process, thread, socket or shared memory more than no flag; 2 do, and no file."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    async def describe(*flags: str) -> dict[str, Any]:
        env = {"XDG_RUNTIME_DIR": str(temporary), "TMPDIR": str(temporary)}
        async with (
            fake_instances.run_instance() as one,
            run_command(tmp_path, "--backend", one.url, *flags, **env) as it,
        ):
            assert await post_alone(it) == 200
            if "2" in flags:
                await wait_for_workers(it, 2)
            assert not [*temporary.iterdir()]
            return describe_process(it.process.pid)

    plain = await describe()
    one = await describe("--workers", "1")
    two = await describe("--workers", "2")
    assert plain["processes"] == one["processes"] == 0
    assert plain["threads"] == one["threads"]
    assert plain["shared memory"] == one["shared memory"] == 0
    assert abs(plain["sockets"] - one["sockets"]) <= 1, "a probe may be under way in either"
    # Of each worker: two sockets, and a page of numbers for all beside two of metrics.
    assert two["processes"] == 2 and two["sockets"] >= 4 and two["shared memory"] == 5


@asynccontextmanager
async def run_two_workers(
    folder: Path, permits: asyncio.Semaphore
) -> AsyncIterator[tuple[FakeInstance, CommandProcess]]:
    """An instance, each chunk of which needs one of `permits`, and a router with two workers that serve."""
    async with (
        fake_instances.run_instance(InstancePlan(permits=permits)) as one,
        run_command(folder, "--backend", one.url, "--workers", "2") as it,
    ):
        await wait_for_workers(it, 2)
        yield one, it


async def test_drain(tmp_path: Path) -> None:
    """After SIGTERM the open streams of all workers are completed, then all processes end with status 0."""
    permits = asyncio.Semaphore(0)
    async with run_two_workers(tmp_path, permits) as (one, it):
        streams = [asyncio.create_task(post_alone(it)) for _ in range(FEW_CLIENTS)]
        while len(one.received) < FEW_CLIENTS:
            await asyncio.sleep(0.01)
        it.send_signal(signal.SIGTERM)
        await it.wait_for_log("shutting down", 2)
        for _ in range(2 * FEW_CLIENTS):
            permits.release()
        assert await asyncio.gather(*streams) == [200] * FEW_CLIENTS
        assert await it.process.wait() == 0


async def list_instances(it: CommandProcess, admin: str) -> dict[str, Any]:
    """The admin API's instances by URL, asked for on a connection of its own."""
    async with aiohttp.ClientSession() as client:
        async with client.get(f"{admin}/instances") as response:
            return {each["url"]: each for each in (await response.json())["instances"]}


async def test_orders_reach_all(tmp_path: Path) -> None:
    """An instance added through one worker is known to all, and to the successor of a killed worker."""
    async with fake_instances.run_instance() as a, fake_instances.run_instance() as b:
        admin = fake_instances.find_unused_url()
        flags = ("--backend", a.url, "--workers", "2", "--admin-port", admin.rpartition(":")[2])
        async with run_command(tmp_path, *flags) as it:
            await wait_for_workers(it, 2)
            for order in (
                {"action": "add", "leg": "mono", "url": b.url},
                {"action": "drain", "leg": "mono", "url": a.url},
            ):
                async with it.router.client.post(f"{admin}/instances", json=order) as response:
                    assert response.status == 200
            for restarts in (0, 1, 2):
                await wait_for_workers(it, 2, restarts)
                # Connections are spread by chance: of ten, both workers have some.
                answers = 0
                while answers < 10:
                    found = await list_instances(it, admin)
                    states = {url: each["state"] for url, each in found.items()}
                    is_right = states == {a.url: "draining", b.url: "healthy"}
                    answers = answers + 1 if is_right else 0
                pids = list_worker_pids(it)
                signal_worker(pids[0])
                while pids[0] in list_worker_pids(it) or len(list_worker_pids(it)) < 2:
                    await asyncio.sleep(0.02)


def signal_worker(pid: int) -> None:
    """Kill a worker with SIGKILL."""
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "workers", "kills"),
    [
        ("ttft", 2, 1),
        *(pytest.param(each, 4, 12, marks=pytest.mark.full) for each in ("ttft", "least_requests")),
    ],
)
async def test_workers_are_killed_under_load(
    tmp_path: Path, policy: str, workers: int, kills: int
) -> None:
    """Killed workers are replaced and logged; no request is sent twice; load counts return to 0."""
    flags = ("--routing-logic", policy, "--workers", str(workers))

    # One that has just been replaced waits up to half a minute before it is once more.
    # Streams last, so that a worker that is killed has some under way.
    plan = InstancePlan(gap_s=0.05)
    async with fake_instances.run_instance(plan) as a, fake_instances.run_instance(plan) as b:
        admin = fake_instances.find_unused_url()
        port = ("--admin-port", admin.rpartition(":")[2])
        backends = ("--backend", a.url, "--backend", b.url)
        async with run_command(tmp_path, *backends, *port, *flags) as it:
            await wait_for_workers(it, workers)
            statuses = await kill_meanwhile(it, random.Random(policy), workers, kills)
            await wait_for_workers(it, workers, kills)
            assert it.log.read_text().count("was ended by SIGKILL") == kills
            assert set(statuses) <= {200, 0} and statuses[200]
            assert statuses[0], "no killed worker had a request: nothing was tried"
            sent = count_requests(a) + count_requests(b)
            assert set(sent.values()) == {1}, "nothing may be answered twice"
            # Some were lost before they were sent on; no instance got one that no client sent.
            assert statuses[200] <= len(sent) <= statuses[200] + statuses[0]
            # Connections are spread by chance: 16 for each worker miss one of four once in millions.
            answers = 0
            while answers < 16 * workers:
                found = (await list_instances(it, admin)).values()
                load = sum(each["in_flight"] + each["pending"]["requests"] for each in found)
                answers = 0 if load else answers + 1


async def kill_meanwhile(
    it: CommandProcess, chance: random.Random, workers: int, kills: int
) -> Counter[int]:
    """Kill so many workers, one after the other, while clients ask; returns the clients' statuses."""
    statuses: Counter[int] = Counter()
    is_over = asyncio.Event()

    async def ask_forever(client: int) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            statuses[await post_alone(it, f"client-{client}-{number}")] += 1

    asking = [asyncio.create_task(ask_forever(client)) for client in range(FEW_CLIENTS)]
    for restarts in range(1, kills + 1):
        seen = statuses[200]
        while statuses[200] < seen + 10:
            await asyncio.sleep(0.01)
        signal_worker(chance.choice(list_worker_pids(it)))
        await it.wait_for_log("was ended by SIGKILL", restarts)
        await wait_for_workers(it, workers, restarts)
    is_over.set()
    await asyncio.gather(*asking)
    return statuses


def count_requests(instance: FakeInstance) -> Counter[str]:
    """How often the instance received each request ID."""
    return Counter(each.headers[header_names.REQUEST_ID] for each in instance.received)


async def test_workers_end_with_their_supervisor(tmp_path: Path) -> None:
    """When the supervisor is killed, workers finish their streams, end, and free the port."""
    permits = asyncio.Semaphore(0)
    async with run_two_workers(tmp_path, permits) as (one, it):
        pids = list_worker_pids(it)
        stream = asyncio.create_task(post_alone(it))
        while not one.received:
            await asyncio.sleep(0.01)
        it.send_signal(signal.SIGKILL)
        await it.wait_for_log("the supervisor of the workers is gone", 2)
        permits.release()
        permits.release()
        assert await stream == 200
        while any(is_running(pid) for pid in pids):
            await asyncio.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether the process runs; one that nobody reaps is a zombie and does not."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text("ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_used_port(tmp_path: Path) -> None:
    """The supervisor reports a port that is in use, before it starts any worker."""
    with fake_instances.open_listening_socket() as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ["--backend", "http://127.0.0.1:1", "--port", port, "--workers", "2"]
        refused = CliRunner().invoke(command, flags)
    assert refused.exit_code == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in " ".join(refused.output.split())
