# SPDX-License-Identifier: Apache-2.0
"""A caller who sets `priority` to hold others up: who waits in the router is served, or told soon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from router import fake_instances, scripted_knowledge
from router.fake_instances import InstancePlan, RunningRouter, wait_until
from router.proxy.test_hold_queue import get_queue, teach

from ttft_otel.router.limits import RouterLimits

MALLORY, BOB = "mallory-1", "bob-1"
SHARE = 4  # requests of one key under way
MOST_URGENT = -(2**63)
PREFILL_MS = 50


async def post(router: RunningRouter, key: str, **fields: object) -> int:
    """The status of a completion that the router takes for 20 s of prefill: one at a time is sent."""
    body = {"model": "tiny", "prompt": key, "stream": True, "tokens": 20_000, **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return (await router.post_body("/v1/completions", body, **headers))[0]


@contextlib.asynccontextmanager
async def run_flooded(
    timeout_s: float = 60.0, **options: Any
) -> AsyncIterator[tuple[RunningRouter, fake_instances.FakeInstance]]:
    """A router that holds, and Mallory, who sends urgent requests as fast as the share of one key allows."""
    limits = RouterLimits(max_key_requests=SHARE, first_byte_timeout=timeout_s)
    async with fake_instances.run_routed_instances(
        [InstancePlan({"prefill.compute": PREFILL_MS})],
        routing=scripted_knowledge.build_routing_factory(max_queue_s=0.01),
        keys=[MALLORY, BOB],
        limits=limits,
        **options,
    ) as (router, one):
        teach(router, one.url)

        async def flood() -> None:
            while True:
                await post(router, MALLORY, priority=MOST_URGENT)

        flooding = [asyncio.create_task(flood()) for _ in range(SHARE)]
        try:
            await wait_until(lambda: len(get_queue(router)) == SHARE - 1)
            yield router, one
        finally:
            for task in flooding:
                task.cancel()
            await asyncio.gather(*flooding, return_exceptions=True)
        budget = router.app.endpoint.body_budget
        await wait_until(lambda: not len(get_queue(router)) and not budget.counted_bytes)


async def test_nobody_is_overtaken_by_claim() -> None:
    """However urgent other requests say that they are: of those that come later none goes first."""
    async with run_flooded() as (router, one):
        queue = get_queue(router)
        for _ in range(3):
            bob = asyncio.create_task(post(router, BOB))
            await wait_until(
                lambda bob=bob: (  # type: ignore[misc]
                    bob.done() or any(BOB.encode() in each.request.body for each in queue._held)
                )
            )
            before = len(one.received)
            assert await bob == 200
            # Those that were here before, and one that was on its way.
            senders = [each.json["prompt"] for each in one.received[before:]]
            assert BOB not in senders[SHARE + 1 :]


async def test_trusted_callers_can_overtake() -> None:
    """With --trust-priority Bob waits for as long as Mallory sends, and is told when that is too long."""
    async with run_flooded(1.0, trust_priority=True) as (router, _):
        assert await post(router, BOB) == 504
        assert get_queue(router).counts["late"] >= 1


async def test_nobody_is_driven_out_by_claim() -> None:
    """Where --max-held is reached, the urgent ones that come are refused, not those that wait already."""
    async with fake_instances.run_routed_instances(
        [InstancePlan({"prefill.compute": 600_000})],
        routing=scripted_knowledge.build_routing_factory(max_queue_s=0.01),
        limits=RouterLimits(max_held=2),
    ) as (router, one):
        teach(router, one.url)
        queue = get_queue(router)
        tasks = [asyncio.create_task(post(router, ""))]
        await wait_until(lambda: one.received)
        tasks += [asyncio.create_task(post(router, "")) for _ in range(2)]
        await wait_until(lambda: len(queue) == 2)
        flood = [post(router, "", priority=MOST_URGENT) for _ in range(20)]
        assert await asyncio.wait_for(asyncio.gather(*flood), 60) == [429] * 20
        assert len(queue) == 2 and not any(each.done() for each in tasks)
        for task in tasks:
            task.cancel()
        await wait_until(lambda: not len(queue))
