# SPDX-License-Identifier: Apache-2.0
"""After requests of every kind nothing of them is left in the router: tasks, objects, memory, sockets."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import pytest

from router import fake_instances, raw_http
from router.control.test_client_connection import CHAT, encode_post
from ttft_otel.router.proxy.exchange_reporter import RecentReports
from ttft_otel.router.timeline import Attempt, Exchange

MAX_REPORTS = 200
TIMEOUT_S = 60.0  # seconds for one answer, where vLLM servers of other tests take both cores
NEVER_BYTES = 1 << 30  # failures in a row that take an instance out: every request shall meet one
STREAM_BODY = b'{"model": "tiny", "stream": true, "messages": []}'
IMAGES_BODY = (
    b'{"model": "tiny", "stream": true, "messages": [{"role": "user", "content": ['
    b'{"type": "image_url", "image_url": {"url": "a"}},'
    b'{"type": "image_url", "image_url": {"url": "b"}}]}]}'
)
# What is sent, after how many bytes the client leaves (None: it stays), and what it may get; 0: nothing.
REQUEST_KINDS = {
    "plain": (raw_http.encode_request(), None, {200}),
    "stream": (raw_http.encode_request(body=STREAM_BODY), None, {200}),
    "images": (raw_http.encode_request(body=IMAGES_BODY), None, {200}),
    "an error": (raw_http.encode_request("status 500"), None, {500}),
    "busy": (raw_http.encode_request("status 503", IMAGES_BODY), None, {503}),
    "cut": (raw_http.encode_request("reset before head"), None, {502}),
    "torn": (raw_http.encode_request("half body", STREAM_BODY), None, {200, 502}),
    "no JSON": (raw_http.encode_request(body=b"{"), None, {200, 400}),
    "not found": (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n", None, {404}),
    "left at once": (raw_http.encode_request("hangs", STREAM_BODY), 0, {0}),
    "left within the body": (raw_http.encode_request(body=b" " * 5000)[:-2500], 0, {0}),
    "left encoders": (raw_http.encode_request("hangs", IMAGES_BODY), 0, {0}),
    "left within the stream": (
        raw_http.encode_request("hangs in stream", STREAM_BODY),
        150,
        {200, 502},
    ),
    "left a flood": (raw_http.encode_request("flood", STREAM_BODY), 200_000, {200, 502}),
    "no such model": (raw_http.encode_request(body=b'{"model": "made-up"}'), None, {200, 404}),
    "many headers": (encode_post(b"{}", *["x-a: b"] * 300), None, {431}),
    "a long target": (encode_post(path=f"{CHAT}?{'a' * 9000}"), None, {414}),
    "a path elsewhere": (encode_post(path="/v1/../x"), None, {400}),
    "a broken chunk": (
        encode_post(b"zz\r\n", "transfer-encoding: chunked", "expect: 100-continue"),
        None,
        {400},
    ),
    "trailers": (
        encode_post(b"0\r\n" + b"a: b\r\n" * 100 + b"\r\n", "transfer-encoding: chunked"),
        None,
        {400},
    ),
    "an upgrade": (encode_post(b"{}", "connection: upgrade", "upgrade: h2c"), None, {200}),
    "no HTTP": (b"\x16\x03\x01\x02\x00" * 20, None, {400}),
    "left half a head": (f"POST {CHAT} HTTP/1.1\r\nx-half: {'a' * 60_000}".encode(), 0, {0}),
}


async def send_mixed(url: str, number: int, at_once: int = 24) -> Counter[str]:
    """So many requests of all kinds, mixed; how many of each were sent."""
    chance = random.Random(11)
    left = iter([chance.choice(list(REQUEST_KINDS)) for _ in range(number)])
    sent: Counter[str] = Counter()

    async def send_remaining() -> None:
        for kind in left:
            data, most, wanted = REQUEST_KINDS[kind]
            if most == 0:
                await send_and_leave(url, data)
            else:
                got = raw_http.parse_status(await raw_http.send_bytes(url, data, most, TIMEOUT_S))
                assert got in wanted, f"{kind}: {got}"
            sent[kind] += 1

    await asyncio.gather(*(send_remaining() for _ in range(at_once)))
    return sent


async def send_and_leave(url: str, data: bytes) -> None:
    """Send it and go away while the router waits."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await asyncio.sleep(0.02)
    writer.transport.abort()


@pytest.mark.slow
async def test_nothing_stays_behind() -> None:
    """After 300 requests of all kinds: no task, no object of a request, no connection in use."""
    reports = RecentReports(MAX_REPORTS)
    async with (
        raw_http.run_instance() as one,
        fake_instances.run_router([one.url], [one.url], reports=reports) as router,
    ):
        router.app.endpoint.upstream.pool.max_failures = NEVER_BYTES
        await send_mixed(router.url, 40)
        await asyncio.sleep(0.3)
        before = count_tasks()
        sent = await send_mixed(router.url, 300)
        assert set(sent) == set(REQUEST_KINDS)
        await fake_instances.wait_until(
            lambda: count_tasks() <= before and not list_alive(Exchange, Attempt)
        )
        assert len(reports) <= MAX_REPORTS
        assert not [each.in_flight for each in router.app.endpoint.upstream.pool if each.in_flight]
        assert router.app.admission.requests_under_way == 0


def count_tasks() -> int:
    """How many there are; the instance has one for each connection that is kept open."""
    served = raw_http.RawInstance.handle_connection.__qualname__
    return sum(served not in repr(task.get_coro()) for task in asyncio.all_tasks())


def list_alive(*kinds: type) -> list[object]:
    """What is still alive of these kinds."""
    gc.collect()
    # not isinstance: it asks objects of other libraries for their class, and some of them warn then
    return [each for each in gc.get_objects() if type(each) in kinds]


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
async def test_10_000_requests_leave_no_trace(legs: tuple[str, ...], logic: str) -> None:
    """Memory, sockets and counters of the router's process are what they were before them."""
    async with raw_http.run_instance() as one:
        flags = ["--reports", str(MAX_REPORTS), "--breaker-failures", str(NEVER_BYTES)]
        flags += ["--routing-logic", logic]
        if logic == "ttft":
            flags += ["--encoder-routing-logic", logic]
        flags += [word for leg in ("--encoder", *legs) for word in (leg, one.url)]
        traced = {"TTFT_OTEL": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": one.url}
        async with raw_http.run_router_process(*flags, **traced) as router:
            await send_mixed(router.url, 3000)
            await wait_until_idle(router)
            memory, files = router.measure_memory_bytes(), router.count_open_files()
            sent = await send_mixed(router.url, 10_000)
            await wait_until_idle(router)
            assert sum(sent.values()) == 10_000
            assert router.count_open_files() <= files + 3  # probes come and go
            # one kept kilobyte a request would be 10 MB; 4 are what the allocator's mood makes
            assert router.measure_memory_bytes() - memory < 8 << 20
            assert set(await router.read_metric("ttft_otel_router_in_flight")) == {0.0}
            assert await router.read_metric("ttft_otel_router_requests_in_flight") == [0.0]
            pending = {"ttft": {0.0}}.get(logic, set())
            assert set(await router.read_metric("ttft_otel_router_pending_prefills")) == pending
            assert set(await router.read_metric("ttft_otel_router_pending_tokens")) == pending
            assert not await router.read_metric("ttft_otel_hook_errors_total")


async def wait_until_idle(router: raw_http.RouterProcess) -> None:
    """Until idle connections to the instances have been closed: after 4 seconds, looked for every 4."""
    await asyncio.sleep(10)
