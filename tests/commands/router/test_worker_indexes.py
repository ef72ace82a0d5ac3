# SPDX-License-Identifier: Apache-2.0
"""`--workers` with KV events as real processes: each worker follows the events, and decides on them.

Which instance has a prompt is told by events alone: none of these prompts was sent before, so that what
workers remember of their own requests cannot help them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
import zmq.asyncio
from router import fake_instances

from commands.router.test_router_process import run_command
from commands.router.test_worker_processes import list_instances, wait_for_workers
from lab.fake_vllm.kv_publisher import FakePublisher
from lab.fake_vllm.prefix_cache import FakeEngine

pytestmark = pytest.mark.full

BLOCK_TOKENS = 4
PROMPT_TOKENS = 10 * BLOCK_TOKENS
PROMPT_COUNT = 20
MAX_ROUNDS = 40


async def test_every_worker_knows_what_is_cached(tmp_path: Path) -> None:
    """Both send each prompt, on a connection of its own, where the events say that it is."""
    context = zmq.asyncio.Context()
    publishers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        publishers.append(FakePublisher(tmp_path / name, FakeEngine(BLOCK_TOKENS)))
        publishers[-1].bind_sockets(context)
    admin = fake_instances.find_unused_url()
    flags = ["--workers", "2", "--admin-port", admin.rpartition(":")[2]]
    flags += ["--routing-logic", "prefix", "--prefix-index", "kv-events"]
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
                answers = 0
                while answers < 10:  # of both workers
                    found = await list_instances(it, admin)
                    blocks = [found[each.url]["index"]["blocks"] for each in (a, b)]
                    is_right = blocks == [PROMPT_COUNT // 2 * PROMPT_TOKENS // BLOCK_TOKENS] * 2
                    answers = answers + 1 if is_right else 0
                    await asyncio.sleep(0.01)
                # The first ones may be decided before the workers' readers of prompts have started.
                for _ in range(MAX_ROUNDS):
                    for instance in (a, b):
                        instance.received.clear()
                    for number in range(PROMPT_COUNT):
                        # One token more: the engine always computes the last one.
                        ids = [*range(number * 1000, number * 1000 + PROMPT_TOKENS), 1]
                        async with aiohttp.ClientSession() as client:
                            body = {"model": "tiny", "prompt": ids}
                            url = f"{it.router.url}/v1/completions"
                            async with client.post(url, json=body) as response:
                                assert response.status == 200
                    sent = [{each.json["prompt"][0] // 1000 for each in x.received} for x in (a, b)]
                    if sent == [{*range(place, PROMPT_COUNT, 2)} for place in (0, 1)]:
                        return
                    await asyncio.sleep(0.5)
                raise AssertionError(sent)
    finally:
        for publisher in publishers:
            await publisher.close()
        context.destroy(linger=0)
