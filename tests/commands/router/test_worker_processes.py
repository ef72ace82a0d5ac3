# SPDX-License-Identifier: Apache-2.0
"""`--workers` and replicas as processes: all see one router, also while some are killed or stopped."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq.asyncio
from click.testing import CliRunner
from router import fake_instances
from router.fake_instances import STREAM_EVENTS, FakeInstance, InstancePlan
from router.shared_state.test_store_link import run_store

from commands.router import test_router_command
from commands.router.test_router_command import CommandProcess, run_command
from lab.fake_vllm.kv_publisher import FakePublisher
from lab.fake_vllm.prefix_cache import FakeEngine
from ttft_otel.commands.router.command import command
from ttft_otel.model.names import env_names, header_names, metric_names
from ttft_otel.router.workers import messages

FEW_CLIENTS = 4


async def read_metrics(it: CommandProcess) -> dict[str, float]:
    """The samples of /metrics."""
    lines = (await it.ask("/metrics"))[1].decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def wait_for_workers(it: CommandProcess, count: int, restarts: int = 0) -> None:
    """Wait until so many serve, and so many were replaced."""
    await wait_for_metric(it, metric_names.ROUTER_WORKERS, count)
    if restarts:
        await wait_for_metric(it, f"{metric_names.ROUTER_WORKER_RESTARTS}_total", restarts)


async def wait_for_metric(it: CommandProcess, name: str, value: float) -> None:
    """Wait until /metrics shows this value: a worker writes its own once a second."""
    while (await read_metrics(it)).get(name) != value:
        await asyncio.sleep(0.1)


async def post_alone(it: CommandProcess, request_id: str = "") -> int:
    """The status of a request on a connection of its own, 0 when it was cut."""
    headers = {header_names.REQUEST_ID: request_id} if request_id else {}
    status, said = await it.ask("/v1/chat/completions", fake_instances.build_chat(), **headers)
    return status if said == b"".join(STREAM_EVENTS) else 0


@pytest.mark.slow
async def test_one_router(tmp_path: Path) -> None:
    """Reports and metrics are those of all workers; SIGHUP reloads and SIGTERM drains all of them.

    Their open streams are completed.
    """
    file = tmp_path / "router.yaml"
    plan = InstancePlan(permits=asyncio.Semaphore(1000))
    async with fake_instances.run_instance(plan) as a, fake_instances.run_instance() as b:
        file.write_text(f"backend: [{a.url}]\n")
        flags = ("--config", str(file), "--workers", "3", "--reports", "100")
        # Without an endpoint that answers: reports are kept all the same.
        traced = {env_names.TTFT_OTEL: "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
        async with run_command(tmp_path, *flags, **traced) as it:
            await wait_for_workers(it, 3)
            assert len(it.list_workers()) == 3
            ids = [f"request-{number}" for number in range(12)]
            assert [await post_alone(it, each) for each in ids] == [200] * 12
            for each in ids:
                assert await it.get_status(f"/ttft_report/{each}") == 200, each
            assert await it.get_status("/ttft_report/nobody") == 404
            await wait_for_metric(it, f'{metric_names.ROUTER_REQUESTS}_total{{result="2xx"}}', 12)

            file.write_text(f"backend: [{b.url}]\n")
            it.send_signal(signal.SIGHUP)
            await it.wait_for_log(f"added {b.url}; removed {a.url}", 3)
            assert [await post_alone(it) for _ in range(6)] == [200] * 6
            assert (len(a.received), len(b.received)) == (12, 6)
            await wait_for_metric(it, f'{metric_names.ROUTER_RELOADS}_total{{result="ok"}}', 1)

            held = asyncio.Semaphore(0)
            b.plan = InstancePlan(permits=held)
            streams = [asyncio.create_task(post_alone(it)) for _ in range(FEW_CLIENTS)]
            while len(b.received) < 6 + FEW_CLIENTS:
                await asyncio.sleep(0.01)
            it.send_signal(signal.SIGTERM)
            await it.wait_for_log("shutting down", 3)
            for _ in range(2 * FEW_CLIENTS):
                held.release()
            assert await asyncio.gather(*streams) == [200] * FEW_CLIENTS
            assert await it.process.wait() == 0


async def give(it: CommandProcess, action: str, instance: FakeInstance) -> None:
    """Give an order to any of its workers."""
    order = {"action": action, "leg": "mono", "url": instance.url}
    assert (await it.ask(f"{it.admin}/instances", order))[0] == 200


async def test_orders_reach_all_and_nobody_is_orphaned(tmp_path: Path) -> None:
    """An instance added through one worker is known to all, and to the successor of a killed worker.

    When the supervisor is killed, workers finish their streams, end, and free the port.
    """
    permits = asyncio.Semaphore(0)
    async with (
        fake_instances.run_instance() as a,
        fake_instances.run_instance(InstancePlan(permits=permits)) as b,
        run_command(tmp_path, "--backend", a.url, "--workers", "2") as it,
    ):
        await wait_for_workers(it, 2)
        await give(it, "add", b)
        await give(it, "drain", a)
        expected = {a.url: "draining", b.url: "healthy"}
        for restarts in (0, 1, 2):
            await wait_for_workers(it, 2, restarts)
            await it.wait_for_all(2, lambda found: map_states(found) == expected)
            pids = it.list_workers()
            if restarts < 2:
                os.kill(pids[0], signal.SIGKILL)
                while pids[0] in it.list_workers() or len(it.list_workers()) < 2:
                    await asyncio.sleep(0.02)
        stream = asyncio.create_task(post_alone(it))
        while not b.received:
            await asyncio.sleep(0.01)
        it.send_signal(signal.SIGKILL)
        await it.wait_for_log("the supervisor of the workers is gone", 2)
        permits.release()
        permits.release()
        assert await stream == 200
        while any(is_running(pid) for pid in pids):
            await asyncio.sleep(0.05)


def map_states(found: dict[str, Any]) -> dict[str, str]:
    """The state of each instance by its URL."""
    return {url: each["state"] for url, each in found.items()}


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
        backends = ("--backend", a.url, "--backend", b.url)
        async with run_command(tmp_path, *backends, *flags) as it:
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
            await it.wait_for_all(workers, lambda found: not any(map(read_load, found.values())))


def read_load(instance: dict[str, Any]) -> int:
    """Requests that are under way at an instance, as the admin port shows it."""
    load: int = instance["in_flight"] + instance["pending"]["requests"]
    return load


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
        os.kill(chance.choice(it.list_workers()), signal.SIGKILL)
        await it.wait_for_log("was ended by SIGKILL", restarts)
        await wait_for_workers(it, workers, restarts)
    is_over.set()
    await asyncio.gather(*asking)
    return statuses


def count_requests(instance: FakeInstance) -> Counter[str]:
    """How often the instance received each request ID."""
    return Counter(each.headers[header_names.REQUEST_ID] for each in instance.received)


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


BLOCK_TOKENS = 4
PROMPT_TOKENS = 10 * BLOCK_TOKENS
PROMPT_COUNT = 20
MAX_ROUNDS = 40


@pytest.mark.full
async def test_every_worker_knows_what_is_cached(tmp_path: Path) -> None:
    """Both send each prompt, on a connection of its own, where the events say that it is."""
    context = zmq.asyncio.Context()
    publishers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        publishers.append(FakePublisher(tmp_path / name, FakeEngine(BLOCK_TOKENS)))
        publishers[-1].bind_sockets(context)
    flags = ["--workers", "2", "--routing-logic", "prefix", "--prefix-index", "kv-events"]
    try:
        async with fake_instances.run_instance() as a, fake_instances.run_instance() as b:
            for instance, publisher in zip((a, b), publishers, strict=True):
                endpoints = f"{publisher.events_endpoint},{publisher.replay_endpoint}"
                flags += ["--backend", instance.url]
                flags += ["--kv-events-endpoint", f"{instance.url}={endpoints}"]
            async with run_command(tmp_path, *flags) as it:
                await wait_for_workers(it, 2)
                for number in range(PROMPT_COUNT):
                    ids = [*range(number * 1000, number * 1000 + PROMPT_TOKENS)]
                    publishers[number % 2].engine.compute_prompt(ids)
                    await publishers[number % 2].publish_events()
                blocks = PROMPT_COUNT // 2 * PROMPT_TOKENS // BLOCK_TOKENS
                await it.wait_for_all(
                    2,
                    lambda found: {each["index"]["blocks"] for each in found.values()} == {blocks},
                )
                # The first ones may be decided before the workers' readers of prompts have started.
                for _ in range(MAX_ROUNDS):
                    for instance in (a, b):
                        instance.received.clear()
                    for number in range(PROMPT_COUNT):
                        # One token more: the engine always computes the last one.
                        ids = [*range(number * 1000, number * 1000 + PROMPT_TOKENS), 1]
                        body = {"model": "tiny", "prompt": ids}
                        assert (await it.ask("/v1/completions", body))[0] == 200
                    sent = [{each.json["prompt"][0] // 1000 for each in x.received} for x in (a, b)]
                    if sent == [{*range(place, PROMPT_COUNT, 2)} for place in (0, 1)]:
                        return
                    await asyncio.sleep(0.5)
                raise AssertionError(sent)
    finally:
        for publisher in publishers:
            await publisher.close()
        context.destroy(linger=0)


# Questions before an order, so that it has to wait, and after it: each live worker keeps 256 messages for the
# frozen one, and has some 500.
QUESTIONS = (300, 1500)
ORDERS = 320
# Bytes that the kernel keeps for a process that reads nothing, not thousands of datagrams as else.
KERNEL_BYTES = 16 << 10
ORDERS_IN_KERNEL = 60  # more than that
AGREE_WITHIN_S = 20


async def ask_often(it: CommandProcess, count: int) -> None:
    """Ask for reports that nobody has; connections that the frozen worker was given answer nothing."""
    asked = (it.ask(f"/ttft_report/unknown-{number}") for number in range(count))
    await asyncio.wait([asyncio.create_task(each) for each in asked], timeout=3)


@asynccontextmanager
async def connect(
    it: CommandProcess,
) -> AsyncIterator[Callable[[str, FakeInstance], Awaitable[None]]]:
    """A function that gives orders, on a connection of a worker that answers."""
    instances = f"{it.admin}/instances"
    while True:
        connector = aiohttp.TCPConnector(limit=1)
        timeout = aiohttp.ClientTimeout(2)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            try:
                async with client.get(instances) as response:
                    await response.read()
            except asyncio.TimeoutError:
                continue

            async def give_there(action: str, instance: FakeInstance) -> None:
                order = {"action": action, "leg": "mono", "url": instance.url}
                async with client.post(instances, json=order) as response:
                    assert response.status == 200, await response.text()

            yield give_there
            return


@pytest.mark.full
@pytest.mark.parametrize("kind", ["questions", "orders"])
async def test_orders_reach_a_frozen_worker(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when questions, or more orders than are kept, pushed out what it missed: all agree at last."""
    change = f"import {messages.__name__} as it; it.MAX_QUEUED_BYTES"
    code = f"{change} = {KERNEL_BYTES}\n{test_router_command.COMMAND_CODE}"
    monkeypatch.setattr(test_router_command, "COMMAND_CODE", code)
    async with fake_instances.run_instance() as a, fake_instances.run_instance() as b:
        flags = ("--backend", a.url, "--backend", b.url, "--workers", "3")
        async with run_command(tmp_path, *flags) as it:
            await wait_for_workers(it, 3)
            frozen = it.list_workers()[0]
            os.kill(frozen, signal.SIGSTOP)
            async with connect(it) as give_there:
                if kind == "questions":
                    await ask_often(it, QUESTIONS[0])
                    await give_there("drain", b)
                    await ask_often(it, QUESTIONS[1])
                else:
                    for number in range(ORDERS):
                        # It has to wait, but it is among the first that do.
                        if number == ORDERS_IN_KERNEL:
                            await give_there("drain", b)
                        await give_there("drain" if number % 2 == 0 else "add", a)
            os.kill(frozen, signal.SIGCONT)
            lost = f"{metric_names.ROUTER_WORKER_MESSAGES_LOST}_total"
            while not (await read_metrics(it)).get(lost):
                await asyncio.sleep(0.1)  # there was too much
            expected = {a.url: "healthy", b.url: "draining"}
            agreeing = it.wait_for_all(3, lambda found: map_states(found) == expected)
            await asyncio.wait_for(agreeing, AGREE_WITHIN_S)


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

        async def start(name: str) -> CommandProcess:
            (tmp_path / name).mkdir()
            run = run_command(tmp_path / name, "--backend", a.url, "--backend", b.url, *flags)
            it = await stack.enter_async_context(run)
            if workers == "2":
                await wait_for_workers(it, 2)
            await wait_for_metric(it, metric_names.ROUTER_REPLICAS, 1)
            return it

        replicas = await asyncio.gather(start("one"), start("other"))
        streams = []
        for count in range(1, STREAMS + 1):
            streams.append(asyncio.create_task(post_alone(replicas[count % 2])))
            await asyncio.gather(*(wait_for_load(each, count) for each in replicas))
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
