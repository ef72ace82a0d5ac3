# SPDX-License-Identifier: Apache-2.0
"""Requests of every kind: no 5xx of the router's own, little is held of them, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import random
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from anyio.from_thread import start_blocking_portal
from attack.test_json_bodies import make_body
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as some

from router import fake_instances, raw_http
from router.control.test_client_connection import CHAT, encode_post
from router.fake_instances import InstancePlan, RunningRouter
from ttft_otel.router.proxy import endpoint
from ttft_otel.router.proxy.exchange_reporter import RecentReports
from ttft_otel.router.routing.routing_service import RoutingService
from ttft_otel.router.timeline import Attempt, Exchange
from ttft_otel.router.types import RoutingRequest
from ttft_otel.router.upstream.instance_pool import InstancePool
from ttft_otel.tracing import clock

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


FLEETS = {
    "mono": ("--backend",),
    "E+PD": ("--encoder", "--backend"),
    "P/D": ("--prefill", "--decode"),
    "E+P+D": ("--encoder", "--prefill", "--decode"),
}
MODES = {"P/D": "off", "E+P+D": "strip"}

USUAL_PATHS = some.sampled_from(
    "/v1/chat/completions /v1/completions /v1/responses /v1/messages /v1/embeddings".split()
)
PATHS = some.sampled_from(
    "/v1/models /v1/ /v1 / * // /health /metrics /openapi.json /ttft_report/x /ttft_report/ "
    "/ttft_report/%00%ff /v1/../metrics /v1/%2e%2e/metrics //v1//chat/completions "
    "/v1/chat/completions/ /v1/chat/completions?a=%zz&b=%00 /v1/chat%2Fcompletions /v1/x#y /v1/é "
    "http://other/v1/completions /v1/\\..\\x /v1/completions;a=1 /v1/%f0%28%8c%bc".split()
) | some.text(max_size=40).map(lambda text: "/v1/" + re.sub(r"[\s\x00-\x1f]", "", text))
METHODS = some.sampled_from("GET HEAD PUT DELETE OPTIONS TRACE CONNECT X".split())

TRACE = "0af7651916cd43dd8448eb211c80319c"
USUAL_VALUES = some.sampled_from(
    [
        *("", "1", "-1", "nan", "x" * 300, "x" * 20_000, "é", ",,,", "a=b; c", "a=1,b=%20", "a\tb"),
        *("application/json", "application/json; charset=utf-7", "text/plain", "gzip", "identity"),
        *("close", "keep-alive", "x-mood, te", "trailers", "Bearer \xff", "k=" + "v" * 600),
        *(f"00-{TRACE}-b7ad6b7169203331-01", f"ff-{TRACE}-b7ad6b7169203331-01", f"00-{TRACE}"),
        *(f"00-{'0' * 32}-{'0' * 16}-00", f"cc-{TRACE}-b7ad6b7169203331-01-more", "00-" + "z" * 52),
    ]
)
VALUES = some.sampled_from(
    ["\x7f", "\x01", "\x00", "chunked", "upgrade", "100-continue", "websocket", "h2c"]
) | some.text(some.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=30)
USUAL_NAMES = some.sampled_from(
    "traceparent tracestate baggage x-request-id x-ttft-timing x-ttft-leg content-encoding connection "
    "te cookie accept-encoding authorization user-agent range if-none-match x-forwarded-for "
    "proxy-connection trailer date server-timing x-odd".split()
)
NAMES = some.sampled_from(["expect", "upgrade", "content-type", "host"]) | some.from_regex(
    r"[!#$%&'*+.^_`|~0-9a-z-]{1,12}", fullmatch=True
).filter(lambda name: name not in ("content-length", "transfer-encoding"))

MESSAGES = some.sampled_from(
    [
        '[{"role": "user", "content": "x"}]',
        '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]',
        '[{"content": [{"type": "image_url", "image_url": null}, {"type": 3, "audio_url": []}, 1]}]',
        '[{"content": [{"type": "video_url", "video_url": {"url": "data:,%ff"}}]}, null, [], "x"]',
        '[{"role": "user", "content": [{"type": "image", "source": {"data": "AA"}}, 1, "x"]}]',
        '[{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}, 1]}]}]',
        '[{"role": "user", "content": [{"type": "input_image", "image_url": "data:,\\ud800"}]}]',
        '[{"type": "function_call_output", "output": [{"type": "input_image", "image_url": "a"}]}]',
    ]
)
# What vLLM's models may take and what they may not (test_json_bodies.py), and what is no JSON at all.
BODIES = some.one_of(
    some.integers(0, 1 << 32).map(lambda number: make_body(random.Random(number))[1]),
    MESSAGES.map(lambda text: b'{"model": "tiny", "messages": %b}' % text.encode()),
    some.binary(max_size=60),
)


@some.composite
def draw_request(draw: some.DrawFn) -> bytes:
    """The bytes of one request: framed as HTTP wants it, and anything else inside."""
    body = draw(BODIES)
    wild = not draw(some.integers(0, 4))
    names, values = (NAMES | USUAL_NAMES, VALUES) if wild else (USUAL_NAMES, USUAL_VALUES)
    headers = draw(some.lists(some.tuples(names, values), max_size=5))
    method = draw(METHODS) if wild and draw(some.booleans()) else "POST"
    path = draw(PATHS if draw(some.integers(0, 4)) == 1 else USUAL_PATHS)
    lines = [f"{method} {path} HTTP/1.1", "host: localhost"]
    if not wild:
        lines.append("content-type: application/json")
    if draw(some.booleans()):
        lines.append("x-mood: echo")
    lines += [f"{name}: {value}" for name, value in headers]
    if draw(some.booleans()):
        lines.append(f"content-length: {len(body)}")
    else:
        lines.append("transfer-encoding: chunked")
        cut = draw(some.integers(0, len(body)))
        body = b"".join(raw_http.encode_chunk(part) for part in (body[:cut], body[cut:]) if part)
        body += b"0\r\n\r\n"
    front = "\r\n".join(lines).encode("utf-8", "surrogatepass")
    return front + b"\r\n\r\n" + body


def send_bytes(url: str, data: bytes) -> bytes:
    """What comes back until the answer is whole, the connection ends or a second passes."""
    host, port = url.removeprefix("http://").split(":")
    response = b""
    with socket.create_connection((host, int(port)), 10) as sock, contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR) if data.startswith(b"CONNECT") else None
        while not raw_http.is_complete(response):
            sock.settimeout(1.0 if response or b"HTTP/1.1" not in data else 10.0)
            piece = sock.recv(65536)
            if not piece:
                break
            response = (response + piece).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            if data.startswith(b"HEAD") and b"\r\n\r\n" in response:
                break
    return response


@contextlib.contextmanager
def run_fleet(
    fleet: str, log: Path, *more_flags: str
) -> Iterator[tuple[str, raw_http.RawInstance]]:
    """A router's process before an instance that answers everything, in a thread's loop."""
    traced = {"TTFT_OTEL": "1"}
    flags = ["--first-token", MODES[fleet], *more_flags] if fleet in MODES else [*more_flags]
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(raw_http.run_instance()) as one,
    ):
        flags += [word for flag in FLEETS[fleet] for word in (flag, one.url)]
        traced["OTEL_EXPORTER_OTLP_ENDPOINT"] = one.url
        process = raw_http.run_router_process(*flags, log=log, **traced)
        with portal.wrap_async_context_manager(process) as router:
            yield router.url, one


def repeatable_examples(number: int, first: int) -> Callable[[Any], Any]:
    """A decorator: `number` examples, the same ones in each run, which begin with the seed `first`."""
    bounds = {"max_examples": number, "database": None, "deadline": None}
    own = settings(**bounds, suppress_health_check=list(HealthCheck))
    return lambda check: seed(first)(own(check))


@pytest.mark.parametrize(
    ("fleet", "number"),
    [("E+P+D", 30), *(pytest.param(each, 500, marks=pytest.mark.full) for each in FLEETS)],
)
def test_no_5xx_of_its_own(fleet: str, number: int, tmp_path: Path) -> None:
    """Random paths, headers and bodies: the instance never fails, so nothing may be a 5xx."""
    log = tmp_path / "stderr"

    with run_fleet(fleet, log) as (url, one):

        @repeatable_examples(number, list(FLEETS).index(fleet))
        @given(draw_request())
        def check_response(data: bytes) -> None:
            got = send_bytes(url, data)
            assert raw_http.parse_status(got) < 500, got[:500]
            assert got, "no answer"

        check_response()
        assert raw_http.parse_status(send_bytes(url, raw_http.encode_request())) == 200
        assert one.mood_counts.total() > number // 10  # what is no JSON is refused on the way
        text = send_bytes(url, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n").decode()
    assert "ttft_otel_hook_errors_total{" not in text
    assert "Traceback" not in log.read_text()


REQUEST_ID = "watched"
LONG_GAP_S = 2.0


class WatchedBytes(bytes):
    """A body that tells when nobody refers to it any more."""

    drop_count: ClassVar[int] = 0

    def __del__(self) -> None:
        type(self).drop_count += 1


@pytest.fixture
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


@pytest.mark.usefixtures("watch_bodies")
@pytest.mark.parametrize(("policy", "has_encoder"), [("round_robin", False), ("ttft", True)])
async def test_dropped_by_a_single_leg(policy: str, has_encoder: bool) -> None:
    """The body, and the media that encoders got."""
    async with fake_instances.run_routed_instances(
        [InstancePlan(gap_s=LONG_GAP_S)],
        [InstancePlan({"encoder.compute": 5})] if has_encoder else [],
        routing=build_routing_factory(policy),
    ) as (router, *_):
        await check_dropped(router, fake_instances.build_chat("a", "b"), b'{"n": 1}')


@pytest.mark.usefixtures("watch_bodies")
@pytest.mark.parametrize(("policy", "mode"), [("round_robin", "off"), ("ttft", "strip")])
async def test_dropped_by_prefill_and_decode(policy: str, mode: str) -> None:
    """The client's body when D answers, and P's and D's with it."""
    model = fake_instances.PairModel(gap=LONG_GAP_S)
    async with fake_instances.run_disaggregated(
        model, first_token=mode, routing=build_routing_factory(policy)
    ) as (router, *_):
        body = fake_instances.build_chat() | {"max_tokens": 4}
        # D says the second token after its first pause.
        await check_dropped(router, body, b"Hel" if mode == "off" else b"lo")


@pytest.mark.usefixtures("watch_bodies")
async def test_dropped_by_the_thread_that_parses_heavy_bodies() -> None:
    """Its last call must not keep the body that it was for."""
    model = fake_instances.PairModel(gap=LONG_GAP_S)
    async with fake_instances.run_disaggregated(model, first_token="strip") as (router, *_):
        heavy = {"max_tokens": 4, "lists": [[]] * 30_000}
        await check_dropped(router, fake_instances.build_chat() | heavy, b"lo")
        assert router.app.endpoint.body_parser._thread._threads, "it was heavy enough"


@pytest.mark.usefixtures("watch_bodies")
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


@pytest.mark.usefixtures("watch_bodies")
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
