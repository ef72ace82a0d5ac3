# SPDX-License-Identifier: Apache-2.0
"""`--workers` with KV events as real processes: one keeps the index, all decide on it, also after its death.

Which instance has a prompt is told by events alone: none of these prompts was sent before, so that what
workers remember of their own requests cannot help them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq.asyncio
from router import fake_instances
from router.fake_instances import FakeInstance

from commands.router.test_router_process import CommandProcess, run_command
from commands.router.test_worker_processes import (
    is_running,
    list_instances,
    list_worker_pids,
    read_metrics,
    wait_for_workers,
)
from lab.fake_vllm.kv_publisher import FakePublisher
from lab.fake_vllm.prefix_cache import FakeEngine
from ttft_otel.model.names import metric_names

pytestmark = pytest.mark.slow

BLOCK_TOKENS = 4
PROMPT_BLOCKS = 10
# Rounds of the same work until what workers grow by is not the work's, and what is little then.
MAX_CONTROL_ROUNDS = 10
SETTLED_KB = 500
RESULTS = ("answered", "late", "skipped", "away")


@dataclass
class IndexSite:
    """A router with two workers, two instances that publish KV events, and what is read of them."""

    it: CommandProcess
    admin: str
    instances: list[FakeInstance]
    publishers: list[FakePublisher]
    prompts: int = 0
    sent: int = 0
    expected: dict[str, str] = field(default_factory=dict)  # URL by prompt

    async def publish_prompts(self, count: int) -> list[list[int]]:
        """Have `count` prompts in the caches, by turns, that nobody has sent; returns them once all know."""
        prompts = []
        for _ in range(count):
            self.prompts += 1
            ids = [*range(self.prompts * 1000, self.prompts * 1000 + PROMPT_BLOCKS * BLOCK_TOKENS)]
            # One token more: the engine always computes the last one.
            prompts.append([*ids, 1])
            place = self.prompts % 2
            self.publishers[place].engine.compute_prompt(ids)
            await self.publishers[place].publish_events()
            self.expected[json.dumps(prompts[-1])] = self.instances[place].url
        await self.wait_for_blocks()
        return prompts

    async def wait_for_blocks(self) -> None:
        """Wait until each worker has been told of every block: ten answers reach both of them."""
        answers = 0
        while answers < 10:
            found = await list_instances(self.it, self.admin)
            index = [found[each.url]["index"] for each in self.instances]
            blocks = [len(each.engine.block_copies) for each in self.publishers]
            is_right = [each["source"] for each in index] == ["kv-events"] * 2 and [
                each["blocks"] for each in index
            ] == blocks
            answers = answers + 1 if is_right else 0
            await asyncio.sleep(0.01)

    async def send_prompts(self, prompts: list[list[int]]) -> int:
        """Send each on a connection of its own; returns how many went where they are not cached."""
        before = [len(each.received) for each in self.instances]
        for ids in prompts:
            assert await self.post(ids) == 200
        self.sent += len(prompts)
        wrong = 0
        for instance, begin in zip(self.instances, before, strict=True):
            for request in instance.received[begin:]:
                wrong += self.expected[json.dumps(request.json["prompt"])] != instance.url
        return wrong

    async def post(self, ids: list[int]) -> int:
        """The status of a completion of these token ids."""
        async with aiohttp.ClientSession() as client:
            body = {"model": "tiny", "prompt": ids}
            async with client.post(f"{self.it.router.url}/v1/completions", json=body) as response:
                await response.read()
                return response.status

    async def count_lookups(self) -> dict[str, float]:
        """The lookups of all prompts sent, by result, once all of them are counted.

        A worker writes its numbers once a second. The first prompts may be decided before their reader is up.
        """
        name = f"{metric_names.ROUTER_INDEX_LOOKUPS}_total"
        while True:
            metrics = await read_metrics(self.it)
            lookups = {each: metrics[f'{name}{{result="{each}"}}'] for each in RESULTS}
            failed = f'{metric_names.ROUTER_PROMPTS}_total{{result="failed'
            unread = sum(value for each, value in metrics.items() if each.startswith(failed))
            if sum(lookups.values()) + unread == self.sent:
                return lookups
            await asyncio.sleep(0.05)

    async def read_readiness(self) -> dict[str, Any]:
        """What a worker answers on /readyz, which is to be 200."""
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{self.it.router.url}/readyz") as response:
                assert response.status == 200
                body: dict[str, Any] = await response.json()
                return body

    def find_index_service(self) -> int:
        """The process that listens for lookups, 0 if there is none."""
        lines = Path("/proc/net/unix").read_text("ascii").splitlines()
        inodes = {line.split()[6] for line in lines if line.endswith(self.socket_path)}
        for pid in list_worker_pids(self.it):
            if any(f"socket:[{each}]" in list_files(pid) for each in inodes):
                return pid
        return 0

    @property
    def socket_path(self) -> str:
        """Where the service of this router listens."""
        pid = self.it.process.pid
        links = list_files(pid)
        folder = next(each.rpartition("/")[0] for each in links if each.endswith("/running"))
        return f"{folder}/index.sock"

    async def wait_for_index_service(self, other_than: int = 0) -> int:
        """The service, once there is one, and it is not this one."""
        while (pid := self.find_index_service()) in (0, other_than):
            await asyncio.sleep(0.02)
        return pid


def list_files(pid: int) -> list[str]:
    """What the open files of a process are."""
    links = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(each.readlink()))
        except FileNotFoundError:
            continue  # closed meanwhile
    return links


def read_private_kb(pid: int) -> int:
    """Memory that a process shares with nobody."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


@asynccontextmanager
async def run_site(folder: Path) -> AsyncIterator[IndexSite]:
    """Two instances with publishers, and a router of two workers by the policy `prefix`."""
    context = zmq.asyncio.Context()
    publishers = []
    for name in ("a", "b"):
        (folder / name).mkdir()
        publishers.append(FakePublisher(folder / name, FakeEngine(BLOCK_TOKENS)))
        publishers[-1].bind_sockets(context)
    try:
        async with fake_instances.run_instance() as a, fake_instances.run_instance() as b:
            admin = fake_instances.find_unused_url()
            flags = ["--workers", "2", "--admin-port", admin.rpartition(":")[2]]
            flags += ["--routing-logic", "prefix", "--prefix-index", "kv-events"]
            for instance, publisher in zip((a, b), publishers, strict=True):
                endpoints = f"{publisher.events_endpoint},{publisher.replay_endpoint}"
                flags += ["--backend", instance.url]
                flags += ["--kv-events-endpoint", f"{instance.url}={endpoints}"]
            async with run_command(folder, *flags) as it:
                await wait_for_workers(it, 2)
                yield IndexSite(it, admin, [a, b], publishers)
    finally:
        for publisher in publishers:
            await publisher.close()
        context.destroy(linger=0)


@dataclass
class MemoryRound:
    """Prompts that the router decided on, and what each of its processes grew by meanwhile."""

    wrong: int
    answered: float
    grown_kb: dict[int, int]


async def measure_round(site: IndexSite, pids: list[int], blocks: int = 0) -> MemoryRound:
    """Have 40 prompts published and sent, after so many blocks that no prompt has."""
    before_kb = {pid: read_private_kb(pid) for pid in pids}
    answered_before = (await site.count_lookups())["answered"]
    if blocks:
        many = [*range(10**6, 10**6 + BLOCK_TOKENS * blocks)]
        site.publishers[0].engine.compute_prompt(many)
        await site.publishers[0].publish_events()
    wrong = await site.send_prompts(await site.publish_prompts(40))
    answered = (await site.count_lookups())["answered"] - answered_before
    return MemoryRound(
        wrong, answered, {pid: read_private_kb(pid) - kb for pid, kb in before_kb.items()}
    )


async def test_workers_decide_on_one_index(tmp_path: Path) -> None:
    """Both send prompts where events say they are; one process has subscribed, and it has the memory."""
    async with run_site(tmp_path) as site:
        await site.publish_prompts(1)
        service = await site.wait_for_index_service()
        workers = [pid for pid in list_worker_pids(site.it) if pid != service]
        assert len(workers) == 2
        # Serving alone makes a worker grow: it imports, and writes to pages that it had shared with its
        # parent. The control is the same round without the blocks, once that is over.
        for _ in range(MAX_CONTROL_ROUNDS):
            control = await measure_round(site, [service, *workers])
            if max(control.grown_kb[pid] for pid in workers) < SETTLED_KB:
                break

        measured = await measure_round(site, [service, *workers], blocks=60_000)

        for each in (control, measured):
            # A busy machine may make some late: those were decided by chance, the others never wrong.
            assert each.wrong <= 40 - each.answered
        assert control.answered + measured.answered > 20
        assert [each.replay_starts for each in site.publishers] == [[0], [0]], "one subscription"
        by_blocks_kb = {
            pid: kb - max(0, control.grown_kb[pid]) for pid, kb in measured.grown_kb.items()
        }
        assert by_blocks_kb[service] > 4000
        assert all(by_blocks_kb[pid] < by_blocks_kb[service] / 2 for pid in workers), by_blocks_kb

        site.it.send_signal(signal.SIGTERM)
        assert await site.it.process.wait() == 0
        assert not any(is_running(pid) for pid in (service, *workers))


async def test_the_index_service_dies(tmp_path: Path) -> None:
    """Requests go on by estimates, and /readyz and the log say so; its successor knows the events again."""
    async with run_site(tmp_path) as site:
        prompts = await site.publish_prompts(40)
        service = await site.wait_for_index_service()
        while not (await site.count_lookups())["answered"]:
            await site.send_prompts(prompts[:1])
        assert "prefix_index" not in await site.read_readiness()

        os.kill(service, signal.SIGKILL)

        # It lived for less than ten seconds, so its successor starts after a pause.
        while "prefix_index" not in await site.read_readiness():
            assert site.find_index_service() in (0, service), (
                "nothing was said before it was replaced"
            )
        history = (await list_instances(site.it, site.admin))[site.instances[0].url]["index"]
        assert history["source"] == "history"
        while not (await site.count_lookups())["away"]:
            await site.send_prompts(prompts[:10])
            # It was back too soon; now it will take longer.
            if again := site.find_index_service():
                os.kill(again, signal.SIGKILL)
                service = again
        await site.it.wait_for_log("the process that keeps the index of KV events (")
        assert "was ended by SIGKILL: workers estimate" in site.it.log.read_text()

        assert await site.wait_for_index_service(service) != service
        await site.wait_for_blocks()
        while "prefix_index" in await site.read_readiness():
            await asyncio.sleep(0.05)
        before = await site.count_lookups()
        wrong = await site.send_prompts(prompts[10:])
        answered = (await site.count_lookups())["answered"] - before["answered"]
        assert wrong <= 30 - answered
        assert answered > 10


async def test_the_index_service_is_stuck(tmp_path: Path) -> None:
    """Requests do not wait for it: a few are late, then nobody asks for a while; it is asked again later."""
    async with run_site(tmp_path) as site:
        prompts = await site.publish_prompts(20)
        service = await site.wait_for_index_service()
        os.kill(service, signal.SIGSTOP)
        while not (lookups := await site.count_lookups())["skipped"]:
            await site.send_prompts(prompts)
        assert lookups["late"] and not lookups["answered"] and not lookups["away"]
        await site.it.wait_for_log("does not answer within")

        os.kill(service, signal.SIGCONT)
        while not (await site.count_lookups())["answered"]:
            await site.send_prompts(prompts[:1])


async def test_a_worker_dies(tmp_path: Path) -> None:
    """Its successor asks the same service, whose subscriptions go on."""
    async with run_site(tmp_path) as site:
        await site.publish_prompts(2)
        service = await site.wait_for_index_service()
        for restarts in (1, 2):
            worker = next(pid for pid in list_worker_pids(site.it) if pid != service)
            os.kill(worker, signal.SIGKILL)
            await site.it.wait_for_log("was ended by SIGKILL", restarts)
            await wait_for_workers(site.it, 2, restarts)
        prompts = await site.publish_prompts(40)
        wrong = await site.send_prompts(prompts)

        answered = (await site.count_lookups())["answered"]
        assert wrong <= len(prompts) - answered
        assert answered > 10
        assert site.find_index_service() == service
        assert [each.replay_starts for each in site.publishers] == [[0], [0]]


async def test_the_supervisor_dies(tmp_path: Path) -> None:
    """The service ends after the last worker; nothing is left in the folder."""
    async with run_site(tmp_path) as site:
        await site.publish_prompts(1)
        pids, socket_path = list_worker_pids(site.it), Path(site.socket_path)
        assert len(pids) == 3 and socket_path.exists()
        site.it.send_signal(signal.SIGKILL)
        while any(is_running(pid) for pid in pids):
            await asyncio.sleep(0.05)
        assert not socket_path.parent.exists()
