# SPDX-License-Identifier: Apache-2.0
"""What the router holds: a body until an instance answers, and little of what a client reads slowly."""

from __future__ import annotations

import asyncio
import gc
import io
import json
from collections.abc import Callable
from typing import Any, ClassVar

import aiohttp
import pytest

from router import fake_instances, fake_pair, raw_http
from router.fake_instances import InstancePlan, RunningRouter
from ttft_otel.router.proxy import endpoint
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.types import RoutingRequest
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.tracing import clock

REQUEST_ID = "watched"
CHAT = fake_pair.CHAT_PATH
LONG_GAP_S = 2.0
STREAM_BODY = b'{"model": "tiny", "stream": true, "messages": []}'


class WatchedBytes(bytes):
    """A body that tells when nobody refers to it any more."""

    drop_count: ClassVar[int] = 0

    def __del__(self) -> None:
        type(self).drop_count += 1


@pytest.fixture(autouse=True)
def watch_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the bodies that are gone."""
    read_body = endpoint.read_body

    async def read_watched_body(*args: Any) -> bool:
        is_here, client_body = await read_body(*args), args[3]
        client_body.data = WatchedBytes(client_body.data)
        return is_here

    monkeypatch.setattr(endpoint, "read_body", read_watched_body)
    monkeypatch.setattr(WatchedBytes, "drop_count", 0)


def build_routing_factory(policy: str) -> Callable[[InstancePool], RoutingService]:
    """A routing service with `policy` on every leg; `ttft` keeps account of the requests under way."""
    return lambda pool: RoutingService(pool, policy, others_policy=policy, encoders_policy=policy)


def list_held_requests() -> list[RoutingRequest]:
    """Requests to legs that still have a body, or an item in place of one."""
    return [
        each
        for each in gc.get_objects()
        if type(each) is RoutingRequest
        and each.request_id.startswith(REQUEST_ID)
        and (each.body or each.media_item)
    ]


async def wait_until_dropped(router: RunningRouter) -> None:
    """Until the body is gone. Raises TimeoutError when it stays."""
    budget = router.app.endpoint.body_budget
    async with asyncio.timeout(LONG_GAP_S / 2):
        while not WatchedBytes.drop_count or budget.counted_bytes or list_held_requests():
            await asyncio.sleep(0.01)


async def check_dropped(router: RunningRouter, body: dict[str, Any], mark: bytes) -> None:
    """The body is held until an instance answers, and gone when `mark` of the answer has come."""
    headers = {"Content-Type": "application/json", "X-Request-Id": REQUEST_ID}
    data = io.BytesIO(json.dumps(body).encode())
    async with router.client.post(f"{router.url}{CHAT}", data=data, headers=headers) as response:
        received = b""
        while mark not in received:
            assert response.status == 200 and not response.content.at_eof()
            received += await response.content.readany()
        await wait_until_dropped(router)
        assert not response.content.at_eof(), "the answer goes on"


@pytest.mark.parametrize(("policy", "has_encoder"), [("round_robin", False), ("ttft", True)])
async def test_dropped_by_a_single_leg(policy: str, has_encoder: bool) -> None:
    """The body, and the media that encoders got."""
    async with fake_instances.run_routed_instances(
        [InstancePlan(gap_s=LONG_GAP_S)],
        [InstancePlan({"encoder.compute": 5})] if has_encoder else [],
        routing=build_routing_factory(policy),
    ) as (router, *_):
        await check_dropped(router, fake_instances.build_chat("a", "b"), b'{"n": 1}')


@pytest.mark.parametrize(("policy", "mode"), [("round_robin", "off"), ("ttft", "strip")])
async def test_dropped_by_prefill_and_decode(policy: str, mode: str) -> None:
    """The client's body when D answers, and P's and D's with it."""
    model = fake_pair.PairModel(gap=LONG_GAP_S)
    async with fake_pair.run_disaggregated(
        model, first_token=mode, routing=build_routing_factory(policy)
    ) as (router, *_):
        body = fake_instances.build_chat() | {"max_tokens": 4}
        # D says the second token after its first pause.
        await check_dropped(router, body, b"Hel" if mode == "off" else b"lo")


async def test_dropped_by_the_thread_that_parses_heavy_bodies() -> None:
    """Its last call must not keep the body that it was for."""
    model = fake_pair.PairModel(gap=LONG_GAP_S)
    async with fake_pair.run_disaggregated(model, first_token="strip") as (router, *_):
        heavy = {"max_tokens": 4, "lists": [[]] * 30_000}
        await check_dropped(router, fake_instances.build_chat() | heavy, b"lo")
        assert router.app.endpoint.body_parser._thread._threads, "it was heavy enough"


async def test_held_while_nobody_answers() -> None:
    """Another instance may still have to get it; the watching of these tests sees that."""
    plan = InstancePlan({"prefill.compute": 500})
    async with fake_instances.run_routed_instances(
        [plan], routing=build_routing_factory("ttft")
    ) as (router, one):
        body = json.dumps(fake_instances.build_chat()).encode()
        asking = asyncio.create_task(router.post_body(CHAT, body, **{"X-Request-Id": REQUEST_ID}))
        await fake_instances.wait_until(lambda: one.received)
        assert router.app.endpoint.body_budget.counted_bytes == len(body)
        assert list_held_requests() and not WatchedBytes.drop_count
        assert (await asking)[0] == 200
        await wait_until_dropped(router)


async def test_dropped_when_the_client_leaves() -> None:
    """A client that leaves before the answer takes its body along."""
    plan = InstancePlan({"prefill.compute": 5000})
    async with fake_instances.run_routed_instances([plan]) as (router, _):
        with pytest.raises(TimeoutError):
            async with router.client.post(
                f"{router.url}{CHAT}",
                json=fake_instances.build_chat(),
                headers={"X-Request-Id": REQUEST_ID},
                timeout=aiohttp.ClientTimeout(total=0.2),
            ):
                pass
        await wait_until_dropped(router)


async def test_a_slow_client_slows_its_leg() -> None:
    """Eight clients that read nothing of endless streams: the router reads and keeps little of each."""
    async with (
        raw_http.run_instance() as one,
        raw_http.run_router_process("--backend", one.url) as router,
    ):
        await raw_http.send_bytes(router.url, raw_http.encode_request())
        before = router.measure_memory_bytes()
        host, port = router.url.removeprefix("http://").split(":")
        stalled = [await asyncio.open_connection(host, int(port), limit=1) for _ in range(8)]
        for _, writer in stalled:
            writer.write(raw_http.encode_request("flood", STREAM_BODY))
        written = await wait_until_written(one)
        # Sockets hold some megabytes on each of the two ways; an instance could give gigabytes.
        assert 0 < written < 8 * (16 << 20)
        # read and not yet taken, taken and not yet sent, being sent: 256 KiB or a little more each
        assert router.measure_memory_bytes() - before < 8 * (3 << 20)

        began = clock.now_us()
        answer = await raw_http.send_bytes(router.url, raw_http.encode_request())
        assert raw_http.parse_status(answer) == 200
        assert clock.now_us() - began < 1_000_000

        reader, _ = stalled[0]
        got = 0
        while got < 24 << 20:  # more than was on its way: the leg goes on when the client does
            got += len(await reader.read(1 << 20))
        assert one.flood_bytes > written
        for _, writer in stalled:
            writer.transport.abort()
        in_flight = "ttft_otel_router_requests_in_flight"
        async with asyncio.timeout(10):
            while await router.read_metric(in_flight) != [0.0]:
                await asyncio.sleep(0.1)


async def wait_until_written(raw_instance: raw_http.RawInstance) -> int:
    """The bytes written so far, once no more are taken."""
    before = -1
    while before != raw_instance.flood_bytes:
        before = raw_instance.flood_bytes
        await asyncio.sleep(0.7)
    return before
