# SPDX-License-Identifier: Apache-2.0
"""A worker that is stopped, by a debugger or by its own fault, loses no order and does not stay for ever."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from commands.router import test_router_process
from commands.router.test_router_process import CommandProcess, run_command
from commands.router.test_worker_processes import (
    list_instances,
    list_worker_pids,
    read_metrics,
    wait_for_workers,
)
from router import fake_instances
from router.fake_instances import FakeInstance

from ttft_otel.model.names import metric_names
from ttft_otel.router.workers import worker_socket

pytestmark = pytest.mark.slow
# Questions before an order, so that it has to wait, and after it: each live worker keeps 256 messages for the
# frozen one, and has some 500.
QUESTIONS = (300, 1500)
ORDERS = 320
# Bytes that the kernel keeps for a process that reads nothing, not thousands of datagrams as else.
KERNEL_BYTES = 16 << 10
ORDERS_IN_KERNEL = 60  # more than that
AGREE_WITHIN_S = 20


async def ask_for_nothing(it: CommandProcess, number: int) -> None:
    """Ask for a report that nobody has; a connection that the frozen worker was given answers nothing."""
    with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(3)) as client:
            async with client.get(f"{it.router.url}/ttft_report/unknown-{number}") as response:
                await response.read()


async def ask_often(it: CommandProcess, count: int) -> None:
    """Ask so often."""
    await asyncio.gather(*(ask_for_nothing(it, number) for number in range(count)))


@contextlib.asynccontextmanager
async def connect(admin: str) -> AsyncIterator[Callable[[str, FakeInstance], Awaitable[None]]]:
    """A function that gives orders, on a connection of a worker that answers."""
    while True:
        connector = aiohttp.TCPConnector(limit=1)
        timeout = aiohttp.ClientTimeout(2)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            try:
                async with client.get(f"{admin}/instances") as response:
                    await response.read()
            except asyncio.TimeoutError:
                continue

            async def give(action: str, instance: FakeInstance) -> None:
                order = {"action": action, "leg": "mono", "url": instance.url}
                async with client.post(f"{admin}/instances", json=order) as response:
                    assert response.status == 200, await response.text()

            yield give
            return


@pytest.mark.full
@pytest.mark.parametrize("kind", ["questions", "orders"])
async def test_orders_reach_a_frozen_worker(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when questions, or more orders than are kept, pushed out what it missed: all agree at last."""
    change = f"import {worker_socket.__name__} as it; it.MAX_QUEUED_BYTES"
    code = f"{change} = {KERNEL_BYTES}\n{test_router_process.COMMAND_CODE}"
    monkeypatch.setattr(test_router_process, "COMMAND_CODE", code)
    async with fake_instances.run_instance() as a, fake_instances.run_instance() as b:
        admin = fake_instances.find_unused_url()
        flags = ("--backend", a.url, "--backend", b.url, "--workers", "3")
        async with run_command(tmp_path, *flags, "--admin-port", admin.rpartition(":")[2]) as it:
            await wait_for_workers(it, 3)
            frozen = list_worker_pids(it)[0]
            os.kill(frozen, signal.SIGSTOP)
            async with connect(admin) as give:
                if kind == "questions":
                    await ask_often(it, QUESTIONS[0])
                    await give("drain", b)
                    await ask_often(it, QUESTIONS[1])
                else:
                    for number in range(ORDERS):
                        # It has to wait, but it is among the first that do.
                        if number == ORDERS_IN_KERNEL:
                            await give("drain", b)
                        await give("drain" if number % 2 == 0 else "add", a)
            os.kill(frozen, signal.SIGCONT)
            lost = f"{metric_names.ROUTER_WORKER_MESSAGES_LOST}_total"
            while not (await read_metrics(it)).get(lost):
                await asyncio.sleep(0.1)  # there was too much

            async def agree() -> None:
                answers = 0
                while answers < 30:
                    found = await list_instances(it, admin)
                    states = {url: each["state"] for url, each in found.items()}
                    is_right = states == {a.url: "healthy", b.url: "draining"}
                    answers = answers + 1 if is_right else 0
                    await asyncio.sleep(0.02)

            await asyncio.wait_for(agree(), AGREE_WITHIN_S)
