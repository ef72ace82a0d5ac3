# SPDX-License-Identifier: Apache-2.0
"""Two routers that share nothing, as replicas behind a Service: a session has one instance in both."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from router import fake_instances
from router.fake_instances import FakeInstance

from commands.router.test_router_process import CommandProcess, run_command
from ttft_otel.model.names import metric_names

SESSION_HEADER = "x-session"
SESSIONS = tuple(f"session-{number}" for number in range(24))


async def ask(it: CommandProcess, session: str) -> None:
    """One request of a session, through one replica."""
    body = {"model": "tiny", "stream": True, "messages": []}
    async with aiohttp.ClientSession() as client:
        url = f"{it.router.url}/v1/chat/completions"
        async with client.post(url, json=body, headers={SESSION_HEADER: session}) as response:
            assert response.status == 200, await response.text()
            await response.read()


async def wait_for_state(it: CommandProcess, url: str, state: str) -> None:
    """Wait until a replica has the instance in this state."""
    wanted = re.compile(
        rf'^{metric_names.ROUTER_INSTANCE}{{instance="{re.escape(url)}",.*state="{state}"}} 1', re.M
    )
    async with aiohttp.ClientSession() as client:
        while True:
            async with client.get(f"{it.router.url}/metrics") as response:
                if wanted.search(await response.text()):
                    return
            await asyncio.sleep(0.1)


async def place_sessions(
    replicas: list[CommandProcess], instances: list[FakeInstance], turn: int
) -> dict[str, str]:
    """Where each session is: every request of it, through both replicas, has gone there."""
    places: dict[str, str] = {}
    for number, session in enumerate(SESSIONS):
        # Each in its turn the first to see a session: what it learnt must not matter.
        for it in replicas[:: 1 if (number + turn) % 2 else -1]:
            before = {each.url: len(each.received) for each in instances}
            await ask(it, session)
            served = [each.url for each in instances if len(each.received) > before[each.url]]
            assert len(served) == 1
            assert places.setdefault(session, served[0]) == served[0], session
    return places


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["session", "kvaware"])
async def test_sessions_stay(tmp_path: Path, policy: str) -> None:
    """Also while an instance is away only its own sessions move, in both alike; then they are back."""
    async with AsyncExitStack() as stack:
        instances = [
            await stack.enter_async_context(fake_instances.run_instance()) for _ in range(4)
        ]
        replicas = []
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            # In another order: which instance is listed first must not matter.
            listed = instances if number else instances[::-1]
            backends = [word for each in listed for word in ("--backend", each.url)]
            flags = ("--routing-logic", policy, "--session-key", SESSION_HEADER, *backends)
            health = ("--health-interval", "0.2")
            replicas.append(await stack.enter_async_context(run_command(folder, *flags, *health)))
        first = await place_sessions(replicas, instances, 0)
        counts = Counter(first.values())
        assert len(counts) > 1, "nothing is shown by one instance"

        gone = next(each for each in instances if each.url in counts)
        gone.plan.health_status = 503
        for it in replicas:
            await wait_for_state(it, gone.url, "failed")
        without = await place_sessions(replicas, instances, 1)
        moved = {session for session in SESSIONS if without[session] != first[session]}
        assert moved == {session for session in SESSIONS if first[session] == gone.url}
        assert gone.url not in without.values()

        gone.plan.health_status = 200
        for it in replicas:
            await wait_for_state(it, gone.url, "healthy")
        assert await place_sessions(replicas, instances, 2) == first
