# SPDX-License-Identifier: Apache-2.0
"""What clients send of and around a request, over raw sockets: limits, slowness, upgrades, pipelining."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import timeit
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from router.fake_instances import InstancePlan, RunningRouter, run_routed_instances, wait_until
from ttft_otel.http.bounded_connection import MAX_PIPELINED_REQUESTS
from ttft_otel.router.control import uvicorn_server
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.upstream.http_headers import split_headers

CHAT = "/v1/chat/completions"
UPLOAD = "/v1/audio/transcriptions"
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@contextlib.asynccontextmanager
async def run_limited(
    plan: InstancePlan | None = None, keys: Sequence[str] = (), **limits: Any
) -> AsyncIterator[tuple[Any, ...]]:
    """A router with these limits before one instance."""
    async with run_routed_instances([plan], keys=keys, limits=RouterLimits(**limits)) as running:
        yield running


def encode_post(body: bytes = b'{"model": "tiny"}', *lines: str, path: str = CHAT) -> bytes:
    """A POST with these header lines besides the usual ones."""
    head = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *lines]
    if not any(line.startswith("transfer-encoding") for line in lines):
        head.append(f"content-length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


class RawClient:
    """A connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Send `data`; what the router no longer reads is lost."""
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def read_answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers, body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        lines = head.split("\r\n")[1:-2]
        headers = {key.lower(): text for key, text in (line.split(": ", 1) for line in lines)}
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head.split()[1]), headers, body

    async def read_rest(self) -> bytes:
        """What comes until the router ends the connection."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""


@contextlib.asynccontextmanager
async def connect(router: RunningRouter) -> AsyncIterator[RawClient]:
    """A connection to the router, closed at the end."""
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()


async def read_refusals(router: RunningRouter) -> dict[str, float]:
    """Refusals by reason, as /metrics tells them."""
    async with router.client.get(f"{router.url}/metrics") as response:
        text = await response.text()
    found = re.findall(r'ttft_otel_router_refusals_total\{reason="(\w+)"\} (\S+)', text)
    return {reason: float(number) for reason, number in found}


async def check_refused(router: RunningRouter, data: bytes, status: int, reason: str) -> None:
    """`data` is refused in OpenAI's form, the connection ends, and the refusal is counted."""
    before = (await read_refusals(router)).get(reason, 0)
    async with connect(router) as client:
        await client.send(data)
        got, headers, body = await client.read_answer()
        assert (got, headers["connection"]) == (status, "close")
        error = json.loads(body)["error"]
        assert error["code"] == status and error["message"] and error["type"]
        assert await client.read_rest() == b"", "one answer"
    assert (await read_refusals(router))[reason] == before + 1


HEADS = [
    pytest.param(
        encode_post(b"{}", *["x-a: b"] * 300), 431, "headers", id="more headers than allowed"
    ),
    pytest.param(encode_post(b"{}", f"x-a: {'b' * 70_000}"), 431, "headers", id="a long header"),
    pytest.param(
        f"POST {CHAT} HTTP/1.1\r\nx-a: {'b' * 90_000}".encode(), 431, "headers", id="half a header"
    ),
    pytest.param(encode_post(path=f"{CHAT}?{'a' * 8000}"), 414, "target", id="a long target"),
    pytest.param(f"GET /{'a' * 300_000}".encode(), 414, "target", id="half a target"),
    pytest.param(b"GET / HTTP/1.1\r\nho st: a\r\n\r\n", 400, "http", id="no HTTP"),
    pytest.param(b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, "http", id="a tunnel"),
    pytest.param(
        encode_post(b"zz\r\n{}", "transfer-encoding: chunked"), 400, "http", id="a broken chunk"
    ),
]


@pytest.mark.parametrize(("data", "status", "reason"), HEADS)
async def test_heads_beyond_limits(data: bytes, status: int, reason: str) -> None:
    """A head that is too long or malformed is refused, whatever is sent of it."""
    async with run_limited() as (router, one):
        await check_refused(router, data, status, reason)
        assert not one.received
        assert (await router.post_chat())[0] == 200


async def test_a_body_that_is_refused_while_the_client_waits() -> None:
    """After a refusal no `100 Continue` follows, and the router logs no error."""
    async with run_limited() as (router, _):
        lines = ("transfer-encoding: chunked", "expect: 100-continue")
        await check_refused(router, encode_post(b"zz\r\n", *lines), 400, "http")
        assert router.app.endpoint.response_counts == {"disconnected": 1}


async def test_heads_within_limits() -> None:
    """As many headers as allowed, a target as long as allowed, also in pieces; all reach the instance."""
    async with run_limited(max_headers=20, max_target=100) as (router, one):
        path = f"{CHAT}?{'a' * (99 - len(CHAT))}"
        data = encode_post(b'{"model": "tiny"}', *[f"x-a: {n}" for n in range(17)], path=path)
        async with connect(router) as client:
            for start in range(0, len(data), 50):
                await client.send(data[start : start + 50])
                await asyncio.sleep(0.001)
            assert (await client.read_answer())[0] == 200
        assert one.received[0].path == path
        assert one.received[0].headers["x-a"] == ", ".join(map(str, range(17)))


def test_equal_header_lines_are_joined_once() -> None:
    """Joining 16 times as many lines takes about 16 times as long, not 256 times."""

    def measure_s(count: int) -> float:
        lines = [(b"x-a", b"b" * 40)] * count
        clock = time.process_time  # as others use the processor, too
        return min(timeit.repeat(lambda: split_headers(lines), timer=clock, number=1, repeat=5))

    assert measure_s(32_000) < 64 * measure_s(2_000)


async def test_slow_heads() -> None:
    """A head that stays unfinished gets 408, a connection without a request is closed."""
    async with run_limited(head_timeout=0.3) as (router, _):
        async with connect(router) as silent, connect(router) as slow, connect(router) as blank:
            await slow.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
            await blank.send(b"\r\n")
            started_s = time.monotonic()
            for _ in range(8):
                await asyncio.sleep(0.05)
                await slow.send(b"x: a\r\n")
            assert (await slow.read_answer())[0] == 408
            assert await silent.read_rest() == b""
            assert await blank.read_rest() == b""
            assert time.monotonic() - started_s < 4, "not uvicorn's own five seconds"
        assert (await read_refusals(router))["head_timeout"] == 1


async def test_time_between_requests_is_not_counted() -> None:
    """Idle time between requests and long answers do not count as slow request heads."""
    plan = InstancePlan(stages_ms={"prefill.compute": 400})
    async with run_limited(plan, head_timeout=0.2) as (router, _), connect(router) as client:
        for _ in range(2):
            await client.send(encode_post())
            assert (await client.read_answer())[0] == 200
            await asyncio.sleep(0.4)


async def test_connections_that_are_silent_after_an_answer_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not before some seconds, and a long answer is no idle time; also where none of a refused body comes."""
    monkeypatch.setattr(uvicorn_server, "IDLE_S", 0.4)

    async def check_closed(client: RawClient, least_s: float) -> None:
        since_s = time.monotonic()
        assert await client.read_rest() == b""
        assert least_s < time.monotonic() - since_s < 4, "neither five seconds nor a lingering's"

    plan = InstancePlan(stages_ms={"prefill.compute": 600})
    async with run_limited(plan, keys=["k"]) as (router, _):
        async with connect(router) as client:
            for _ in range(2):
                await client.send(encode_post(b'{"model": "tiny"}', "authorization: Bearer k"))
                assert (await client.read_answer())[0] == 200
                await asyncio.sleep(0.2)
            await check_closed(client, 0.1)
        async with connect(router) as refused:
            await refused.send(encode_post(b"", "transfer-encoding: chunked"))
            assert (await refused.read_answer())[0] == 401
            await check_closed(refused, 0.2)


async def test_too_many_connections() -> None:
    """Connections beyond the limit get 503 until others close; those far beyond it get no answer."""
    async with (
        run_limited(max_connections=8) as (router, _),
        contextlib.AsyncExitStack() as all,
    ):
        clients = [await all.enter_async_context(connect(router)) for _ in range(8)]
        ninth = await all.enter_async_context(connect(router))
        status, headers, _ = await ninth.read_answer()
        assert (status, headers["retry-after"]) == (503, "1")
        tenth = await all.enter_async_context(connect(router))
        assert await tenth.read_rest() == b""
        await clients[0].send(encode_post())
        assert (await clients[0].read_answer())[0] == 200
        for client in (*clients[1:], ninth):
            client.writer.close()
        await asyncio.sleep(0.05)
        assert (await router.post_chat())[0] == 200
        assert (await read_refusals(router))["connections"] == 2


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
@pytest.mark.parametrize("split", [False, True])
async def test_upgrade_is_ignored(upgrade: str, split: bool) -> None:
    """After an Upgrade header the body is still read as the body, not as another request."""
    smuggled = encode_post(path="/v1/SMUGGLED")
    lines = [f"upgrade: {upgrade}", "connection: Upgrade, x-hop", "x-hop: no", "x-own: yes"]
    data = encode_post(smuggled, *lines, path=UPLOAD).replace(b"application/json", b"audio/wav", 1)

    async with (
        run_limited() as (router, one),
        connect(router) as client,
    ):
        cut = len(data) - len(smuggled) if split else len(data)
        await client.send(data[:cut])
        await asyncio.sleep(0.05)
        await client.send(data[cut:])
        assert (await client.read_answer())[0] == 200
        await client.send(encode_post())
        assert (await client.read_answer())[0] == 200
        assert [each.path for each in one.received] == [UPLOAD, CHAT]
        assert one.received[0].body == smuggled
        assert one.received[0].headers["x-own"] == "yes"
        assert not {"upgrade", "x-hop"} & {name.lower() for name in one.received[0].headers}


@pytest.mark.parametrize("keys", [[], ["k"]])
async def test_trailers_are_dropped(keys: list[str]) -> None:
    """They become headers neither of this request nor of the next one, and a key in one is none."""
    body = b'11\r\n{"model": "tiny"}\r\n0\r\nx-late: 1\r\nauthorization: Bearer k\r\n\r\n'
    async with run_limited(keys=keys) as (router, one), connect(router) as client:
        for _ in range(1 if keys else 2):
            await client.send(encode_post(body, "transfer-encoding: chunked"))
            assert (await client.read_answer())[0] == (401 if keys else 200)
        names = {name.lower() for each in one.received for name in each.headers}
        assert len(one.received) == (0 if keys else 2)
        assert not {"x-late", "authorization"} & names


async def test_many_trailers() -> None:
    """Trailers count against the limit of headers."""
    async with run_limited(max_headers=50) as (router, _):
        body = b"0\r\n" + b"x: a\r\n" * 60 + b"\r\n"
        data = encode_post(body, "transfer-encoding: chunked")
        await check_refused(router, data, 431, "headers")


async def test_garbage_after_a_request() -> None:
    """Bytes after a request that are no request do not cut its answer, which is sent first and whole."""
    plan = InstancePlan(gap_s=0.1)
    async with run_limited(plan) as (router, _), connect(router) as client:
        stream = b'{"model": "tiny", "stream": true}'
        await client.send(encode_post(stream) + b"\x00garbage\r\n\r\n")
        got = await client.read_rest()
        assert [int(each) for each in STATUS.findall(got)] == [200, 400]
        first, _, second = got.partition(b"HTTP/1.1 400 ")
        assert first.endswith(b"0\r\n\r\n") and b"data: [DONE]" in first
        assert second.count(b"HTTP/1.1") == 0


async def test_garbage_within_a_body_that_was_refused() -> None:
    """A request gets one answer, also if its body turns out malformed after the refusal."""
    async with run_limited(keys=["k"]) as (router, _), connect(router) as client:
        await client.send(encode_post(b"", "transfer-encoding: chunked"))
        assert (await client.read_answer())[0] == 401
        await client.send(b"zz\r\n")
        assert await client.read_rest() == b""


async def test_pipelined_requests_are_bounded() -> None:
    """A bounded number of pipelined requests is answered, in order; then 429 ends the connection."""
    number = MAX_PIPELINED_REQUESTS

    async with run_limited(InstancePlan(stages_ms={})) as (router, one):
        async with connect(router) as client:
            requests = [encode_post(path=f"/v1/embeddings?{index}") for index in range(number + 10)]
            await client.send(b"".join(requests))
            statuses = [int(each) for each in STATUS.findall(await client.read_rest())]
        assert statuses == [*[200] * (number + 1), 429]
        assert [each.path for each in one.received] == [
            f"/v1/embeddings?{index}" for index in range(number + 1)
        ]


async def test_a_client_that_pipelines_and_leaves() -> None:
    """When a pipelining client disconnects, its request in flight is ended as well."""
    plan = InstancePlan(stages_ms={"prefill.compute": 20_000})
    async with run_limited(plan) as (router, one):
        async with connect(router) as client:
            await client.send(encode_post() * 2)
            await wait_until(lambda: one.received)
        await wait_until(lambda: not router.app.admission.requests_under_way)
        assert len(one.received) == 1


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
        connect(router) as whole,
        contextlib.AsyncExitStack() as clients,
    ):
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
        first = asyncio.create_task(router.post_body(CHAT, long))
        await wait_until(lambda: one.received)
        assert (await router.post_body(CHAT, long))[0] == 503
        assert (await first)[0] == 200
        assert (await router.post_body(CHAT, long))[0] == 200


async def test_answered_before_the_body_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a refused body is read for a while, so that the client sees the answer; then no more."""
    monkeypatch.setattr(uvicorn_server, "MAX_LINGER_S", 0.4)

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
