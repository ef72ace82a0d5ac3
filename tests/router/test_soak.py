# SPDX-License-Identifier: Apache-2.0
"""Whatever becomes of its requests, nothing of them stays with the router."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import pytest

from router import fakes, rough
from ttft_otel.router.path import Attempt
from ttft_otel.router.report import Exchange, Reports

KEPT = 200
PATIENCE = 60.0  # seconds for one answer, where vLLM servers of other tests take both cores
NEVER = 1 << 30  # failures in a row that take an instance out: every request shall meet one
STREAM = b'{"model": "tiny", "stream": true, "messages": []}'
IMAGES = (
    b'{"model": "tiny", "stream": true, "messages": [{"role": "user", "content": ['
    b'{"type": "image_url", "image_url": {"url": "a"}},'
    b'{"type": "image_url", "image_url": {"url": "b"}}]}]}'
)
# What is sent, after how many bytes the client leaves (None: it stays), and what it may get; 0: nothing.
ENDS = {
    "plain": (rough.request(), None, {200}),
    "stream": (rough.request(body=STREAM), None, {200}),
    "images": (rough.request(body=IMAGES), None, {200}),
    "an error": (rough.request("error"), None, {500}),
    "busy": (rough.request("busy", IMAGES), None, {503}),
    "cut": (rough.request("cut"), None, {502}),
    "torn": (rough.request("torn", STREAM), None, {200, 502}),
    "no JSON": (rough.request(body=b"{"), None, {200, 400}),
    "not found": (b"GET /nowhere HTTP/1.1\r\nHost: router\r\n\r\n", None, {404}),
    "left at once": (rough.request("late", STREAM), 0, {0}),
    "left within the body": (rough.request(body=b" " * 5000)[:-2500], 0, {0}),
    "left encoders": (rough.request("late", IMAGES), 0, {0}),
    "left within the stream": (rough.request("endless", STREAM), 150, {200, 502}),
    "left a flood": (rough.request("flood", STREAM), 200_000, {200, 502}),
}


async def soak(url: str, number: int, at_once: int = 24) -> Counter[str]:
    """So many requests of all kinds, mixed; how many of each were sent."""
    chance = random.Random(11)
    left = iter([chance.choice(list(ENDS)) for _ in range(number)])
    sent: Counter[str] = Counter()

    async def work() -> None:
        for kind in left:
            data, most, wanted = ENDS[kind]
            if most == 0:
                await leave(url, data)
            else:
                got = rough.status(await rough.ask(url, data, most, PATIENCE))
                assert got in wanted, f"{kind}: {got}"
            sent[kind] += 1

    await asyncio.gather(*(work() for _ in range(at_once)))
    return sent


async def leave(url: str, data: bytes) -> None:
    """Send it and go away while the router waits."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await asyncio.sleep(0.02)
    writer.transport.abort()


def test_nothing_stays_behind() -> None:
    """After 200 requests of all kinds: no task, no object of a request, no connection in use."""

    async def scenario() -> None:
        reports = Reports(KEPT)
        async with (
            rough.instance() as one,
            fakes.router([one.url], [one.url], reports=reports) as router,
        ):
            router.app.forward.legs.fleet.failures = NEVER
            await soak(router.url, 40)
            await asyncio.sleep(0.3)
            before = tasks()
            sent = await soak(router.url, 200)
            assert set(sent) == set(ENDS)
            for _ in range(40):
                await asyncio.sleep(0.1)
                if tasks() <= before and not kept(Exchange, Attempt):
                    break
            assert tasks() <= before
            assert not kept(Exchange, Attempt)
            assert len(reports) <= KEPT
            assert not [each.in_flight for each in router.app.forward.legs.fleet if each.in_flight]
            assert router.app.gate.inside == 0

    fakes.run(scenario)


def tasks() -> int:
    """How many there are; the instance has one for each connection that is kept open."""
    served = rough.Instance.serve.__qualname__
    return sum(served not in repr(task.get_coro()) for task in asyncio.all_tasks())


def kept(*kinds: type) -> list[object]:
    """What is still alive of these kinds."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, kinds)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("legs", "logic"),
    [
        pytest.param(legs, logic, id=f"{topology} {logic}")
        for topology, legs, logics in (
            ("EPD", ("--backend",), ("round_robin", "ttft")),
            ("E+P+D", ("--prefill", "--decode"), ("least_requests", "ttft")),
        )
        for logic in logics
    ],
)
def test_10_000_requests_leave_no_trace(legs: tuple[str, ...], logic: str) -> None:
    """Memory, sockets and counters of the router's process are what they were before them."""

    async def scenario() -> None:
        async with rough.instance() as one:
            flags = ["--reports", str(KEPT), "--breaker-failures", str(NEVER)]
            flags += ["--routing-logic", logic]
            if logic == "ttft":
                flags += ["--encoder-routing-logic", logic]
            flags += [word for leg in ("--encoder", *legs) for word in (leg, one.url)]
            traced = {"TTFT_OTEL": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": one.url}
            async with rough.process(*flags, **traced) as router:
                await soak(router.url, 3000)
                await rest(router)
                memory, files = router.memory(), router.files()
                sent = await soak(router.url, 10_000)
                await rest(router)
                assert sum(sent.values()) == 10_000
                assert router.files() <= files + 3  # probes come and go
                # one kept kilobyte a request would be 10 MB; 4 are what the allocator's mood makes
                assert router.memory() - memory < 8 << 20
                assert set(await router.metrics("ttft_otel_router_in_flight")) == {0.0}
                assert await router.metrics("ttft_otel_router_requests_in_flight") == [0.0]
                books = {"ttft": {0.0}}.get(logic, set())
                assert set(await router.metrics("ttft_otel_router_pending_prefills")) == books
                assert set(await router.metrics("ttft_otel_router_pending_tokens")) == books
                assert not await router.metrics("ttft_otel_hook_errors_total")

    asyncio.run(scenario())


async def rest(router: rough.Process) -> None:
    """Until idle connections to the instances have been closed: after 4 seconds, looked for every 4."""
    await asyncio.sleep(10)
