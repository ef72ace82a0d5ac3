# SPDX-License-Identifier: Apache-2.0
"""Request bodies that arrive slowly, or are too many together, over raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from router.control.test_client_connection import (
    RawClient,
    connect,
    encode_post,
    read_refusals,
    run_limited,
)
from router.fake_instances import InstancePlan, RunningRouter, wait_until

KILO = 1024


async def wait_for_bytes(router: RunningRouter, number: int) -> None:
    """Wait until the router holds so many bytes of bodies."""
    await wait_until(lambda: router.app.endpoint.body_budget.counted_bytes == number)


@contextlib.asynccontextmanager
async def send_half_body(router: RunningRouter, number: int) -> AsyncIterator[RawClient]:
    """A client that has sent so many bytes of a body, and has one more to send."""
    async with connect(router) as client:
        await client.send(encode_post(b" " * (number + 1))[:-1])
        yield client


async def test_slow_bodies() -> None:
    """A body that does not arrive within the limit gets 408, and its memory is released."""
    async with run_limited(body_timeout=0.3) as (router, one):
        async with send_half_body(router, 5000) as slow:
            started_s = time.monotonic()
            status, _, body = await slow.read_answer()
            assert status == 408 and json.loads(body)["error"]["code"] == 408
            assert time.monotonic() - started_s < 4
        async with connect(router) as trickling:
            await trickling.send(encode_post(b"", "transfer-encoding: chunked"))
            for _ in range(8):
                await asyncio.sleep(0.05)
                await trickling.send(b"1\r\n \r\n")
            assert (await trickling.read_answer())[0] == 408
        await wait_for_bytes(router, 0)
        assert (await read_refusals(router))["body_timeout"] == 2
        assert not one.received


async def test_long_answers_are_no_slow_bodies() -> None:
    """The time limit for bodies ends with the body; a long answer is not cut by it."""
    plan = InstancePlan(stages_ms={"prefill.compute": 500})
    async with run_limited(plan, body_timeout=0.2) as (router, _):
        assert (await router.post_chat())[0] == 200


async def test_bodies_together() -> None:
    """When the budget is full, the request with the largest unfinished body is refused; others pass."""
    plan = InstancePlan(stages_ms={"prefill.compute": 600})
    async with (
        run_limited(plan, max_bodies=100 * KILO) as (router, one),
        contextlib.AsyncExitStack() as clients,
    ):
        whole = await clients.enter_async_context(connect(router))
        await whole.send(encode_post(b'{"model": "tiny"%b}' % (b" " * 50 * KILO)))
        await wait_until(lambda: one.received)
        held = router.app.endpoint.body_budget.counted_bytes
        assert held > 50 * KILO, "held until an instance answers"
        small = await clients.enter_async_context(send_half_body(router, 10 * KILO))
        await wait_for_bytes(router, held + 10 * KILO)
        large = await clients.enter_async_context(send_half_body(router, 30 * KILO))
        await wait_for_bytes(router, held + 40 * KILO)

        honest = b"{%b}" % (b" " * 20 * KILO)
        assert (await router.post_body("/v1/embeddings", honest))[0] == 200
        status, headers, body = await large.read_answer()
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["type"] == "UnavailableError"
        await small.send(b" ")
        assert (await small.read_answer())[0] == 400, "not refused: it is no JSON"
        assert (await whole.read_answer())[0] == 200
        assert (await read_refusals(router))["bodies"] == 1
        await wait_for_bytes(router, 0)


async def test_whole_bodies_fill_the_budget() -> None:
    """When bodies of requests that nobody answers yet fill the budget, the next body is refused."""
    plan = InstancePlan(stages_ms={"prefill.compute": 500})
    async with run_limited(plan, max_bodies=64 * KILO) as (router, one):
        long = b'{"model": "tiny"%b}' % (b" " * 60 * KILO)
        first = asyncio.create_task(router.post_body("/v1/chat/completions", long))
        await wait_until(lambda: one.received)
        assert (await router.post_body("/v1/chat/completions", long))[0] == 503
        assert (await first)[0] == 200
        assert (await router.post_body("/v1/chat/completions", long))[0] == 200


async def test_answered_before_the_body_ended(monkeypatch: Any) -> None:
    """The rest of a refused body is read for a while, so that the client sees the answer; then no more."""
    from ttft_otel.router.control import client_connection

    monkeypatch.setattr(client_connection, "MAX_LINGER_S", 0.4)

    async with run_limited(max_body=1000) as (router, _):
        async with connect(router) as polite:
            await polite.send(encode_post(b" " * 3_000_000))
            assert (await polite.read_answer())[0] == 413
            await polite.send(encode_post())
            assert (await polite.read_answer())[0] == 200, "the same connection"
        async with send_half_body(router, 3000) as endless:
            assert (await endless.read_answer())[0] == 413
            started_s = time.monotonic()
            assert await endless.read_rest() == b""
            assert time.monotonic() - started_s < 4
