# SPDX-License-Identifier: Apache-2.0
"""No client holds the router up for others: by what a request has, by reading nothing, by filling memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router import fake_instances, raw_http
from router.control.test_client_connection import encode_post
from router.fake_instances import InstancePlan, wait_until

from attack.watched_process import INJECTED_STALL_S, WatchedRouter, run_watched_process
from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.router.control.uvicorn_server import DrainingServer, MemoryLimit, ServerPlan
from ttft_otel.router.limits import RouterLimits

MEGA = 1 << 20
CHAT_CONTENT = b'{"model": "tiny", "messages": [{"role": "user", "content": %b}]}'


def fill_field(name: bytes, before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    """A POST whose field `name` is about `size` bytes of `unit` between `before` and `after`."""
    value = before + unit * (size // len(unit)) + after
    return encode_post(b'{"model": "tiny", "max_tokens": 1, "%b": %b}' % (name, value))


def number_keys(size: int, before: bytes = b"") -> bytes:
    """A JSON object of about `size` bytes that begins with `before` and has nothing but many keys."""
    return b"{%b%b}" % (before, b",".join(b'"k%d":1' % each for each in range(size // 11)))


# What HTTP itself is abused for.
HTTP_KINDS: Mapping[str, Callable[[], bytes]] = {
    "many headers": lambda: encode_post(b"{}", *[f"x-{number}: b" for number in range(60_000)]),
    "a long header": lambda: b"POST /v1/completions HTTP/1.1\r\nx: " + b"a" * 22 * MEGA,
    "a header in pieces": lambda: b"POST /v1/completions HTTP/1.1\r\n" + b"x:\r\n" * 500_000,
    "a long target": lambda: b"POST /v1/" + b"a" * 4 * MEGA,
    "a target of dots": lambda: encode_post(path="/v1" + "/.." * 2500),
    "upgrades": lambda: encode_post(b"", "connection: upgrade", "upgrade: h2c") * 4000,
    "pipelined": lambda: encode_post(path="/v1/embeddings") * 4000,
    "trailers": lambda: encode_post(b"0\r\n" + b"a: b\r\n" * 200_000, "transfer-encoding: chunked"),
    "tiny chunks": lambda: encode_post(
        b"1\r\n \r\n" * 300_000 + b"0\r\n\r\n", "transfer-encoding: chunked"
    ),
    "empty lines": lambda: b"\r\n" * 500_000,
}
# What JSON is abused for: sizes of a large body, and those that are just not one yet.
JSON_KINDS: Mapping[str, Callable[[], bytes]] = {
    "a large image": lambda: encode_post(
        CHAT_CONTENT
        % (
            b'[{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}]'
            % (b"A" * 60 * MEGA)
        )
    ),
    "a large text": lambda: fill_field(b"input", b'"', b"word ", b'"', 40 * MEGA),
    "escaped quotes": lambda: fill_field(b"input", b'"', b'\\"', b'"', 24 * MEGA),
    "a long model": lambda: encode_post(b'{"model": "%b"}' % (b"\xc3\xa4" * 12 * MEGA)),
    "numbers": lambda: fill_field(b"input", b"[", b"1,", b"1]", 24 * MEGA),
    "as many numbers as allowed": lambda: fill_field(b"prompt", b"[", b"1,", b"1]", 7 * MEGA),
    "empty texts": lambda: fill_field(b"stop", b"[", b'"",', b'""]', 24 * MEGA),
    "one name again and again": lambda: fill_field(b"input", b"1", b',"":1', b"", 24 * MEGA),
    "many keys": lambda: encode_post(number_keys(24 * MEGA)),
    "many keys to be stripped": lambda: encode_post(
        number_keys(24 * MEGA, b'"kv_transfer_params":1,')
    ),
    "some keys to be stripped": lambda: encode_post(
        number_keys(MEGA // 2, b'"kv_transfer_params":1,')
    ),
    "keys to be stripped inside": lambda: encode_post(
        b'{"vllm_xargs":%b}' % number_keys(MEGA // 2, b'"kv_transfer_params":1,')
    ),
    "empty parts": lambda: encode_post(CHAT_CONTENT % (b"[" + b"{}," * 8 * MEGA + b"{}]")),
    "few empty parts": lambda: encode_post(CHAT_CONTENT % (b"[" + b"{}," * 20_000 + b"{}]")),
    "lists in lists": lambda: encode_post(b'{"model":' + b"[" * 24 * MEGA),
    "NaN at the end": lambda: fill_field(b"input", b"[", b"1,", b"NaN]", 24 * MEGA),
}


MAX_STALL_S = 0.05
MAX_STALL_TO_CONTROL = 5.0
# A large body is copied between kernel, router and kernel, and a core that is shared copies slower.
MAX_STALL_TO_COPY = 5.0
# What a request does to the router it does each time; a busy machine's noise it does not.
MAX_TRIALS = 4
CONTROL_S = 0.3
FIRST_BYTE_S = 4.0  # for what takes long, and for what gets no answer
QUIET_S = 0.2
KINDS = {**HTTP_KINDS, **JSON_KINDS}
# Of each sort the one that costs the router most.
SUITE_KINDS = (
    "many headers",
    "a header in pieces",
    "tiny chunks",
    "pipelined",
    "escaped quotes",
    "as many numbers as allowed",
    "some keys to be stripped",
)
# Of those, the ones in which more of a body is read where there are several legs.
DIVIDED_KINDS = ("many keys to be stripped", "few empty parts")


def send_until_quiet(url: str, data: bytes) -> None:
    """Send `data` and read what comes until the router ends the connection or says nothing more."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock, contextlib.suppress(OSError):
        sock.settimeout(60)
        with contextlib.suppress(ConnectionError):  # it may have answered and closed
            sock.sendall(data)
        sock.settimeout(FIRST_BYTE_S)
        while sock.recv(1 << 16):
            sock.settimeout(QUIET_S)


class Sink(SilentHandler):
    """An instance that throws away what it is sent."""

    def do_GET(self) -> None:
        self.send_answer(200, b'{"object": "list", "data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        self.read_body()
        self.send_answer(200, b'{"id": "a", "choices": []}', content_type="application/json")


@pytest.fixture(scope="module")
def instance_url() -> Iterator[str]:
    """Of an instance outside the router's process, whose own work is not to be measured."""
    with HttpServerThread(Sink) as server:
        yield server.url


@pytest.fixture(scope="module")
def router(instance_url: str) -> Iterator[WatchedRouter]:
    """A router before one instance."""
    with run_watched_process(backends=[instance_url]) as process:
        yield process


@pytest.fixture(scope="module")
def divided_router(instance_url: str) -> Iterator[WatchedRouter]:
    """A router with encoders, prefill and decode instances, where more of a body is read."""
    url = instance_url
    options = {"backends": [], "encoders": [url], "prefills": [url], "decodes": [url]}
    with run_watched_process(**options) as process:
        yield process


def find_stall(process: WatchedRouter, data: bytes) -> str:
    """What `data` did to the router each time it was sent; "" if once it did nothing.

    At most 50 ms in one go are nothing, or five times what the router did without it right before, or
    what five copies of the body cost this process right after.
    """
    stalls = []
    for _ in range(MAX_TRIALS):
        process.take_longest_s()
        time.sleep(CONTROL_S)
        control_s = process.take_longest_s()
        send_until_quiet(process.url, data)
        stall_s, copy_s = process.take_longest_s(), measure_copy(data)
        stalls.append((stall_s, control_s, copy_s))
        limits_s = (MAX_STALL_S, MAX_STALL_TO_CONTROL * control_s, MAX_STALL_TO_COPY * copy_s)
        if stall_s < max(limits_s):
            return ""
    return f"seconds of stall, control and a copy: {stalls}"


def measure_copy(data: bytes) -> float:
    """CPU seconds of one copy of `data` in this process."""
    began_s = time.process_time()
    copied = bytes(bytearray(data))
    took_s = time.process_time() - began_s
    assert len(copied) == len(data)
    return took_s / 2


def mark_kinds(kinds: Iterable[str], always: Collection[str]) -> list[Any]:
    """Those of `always`, and the others for --full: they differ in what is repeated."""
    return [pytest.param(kind, marks=() if kind in always else pytest.mark.full) for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("kind", mark_kinds(KINDS, SUITE_KINDS))
def test_a_request_does_not_hold_the_router_up(router: WatchedRouter, kind: str) -> None:
    """No kind of request holds the event loop for long."""
    assert not find_stall(router, KINDS[kind]())


@pytest.mark.slow
@pytest.mark.parametrize("kind", mark_kinds(JSON_KINDS, DIVIDED_KINDS))
def test_json_does_not_hold_up_what_has_legs(divided_router: WatchedRouter, kind: str) -> None:
    """The same for a router with encoders, prefill and decode, which reads more of a body."""
    assert not find_stall(divided_router, JSON_KINDS[kind]())


@pytest.mark.slow
def test_a_stall_is_seen(router: WatchedRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement itself: a stall that is made on purpose is found, with its length."""

    def make_stall(url: str, data: bytes) -> None:
        router.make_stall()

    monkeypatch.setitem(globals(), "send_until_quiet", make_stall)
    monkeypatch.setitem(globals(), "MAX_TRIALS", 1)
    router.take_longest_s()
    router.make_stall()
    assert router.take_longest_s() >= INJECTED_STALL_S
    assert find_stall(router, b"")


STREAM_BODY = b'{"model": "tiny", "stream": true, "messages": []}'
STALLED = 8


@contextlib.asynccontextmanager
async def connect(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that reads nothing by itself but 64 KiB."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_who_never_reads() -> None:
    """Their connections end after --send-timeout; one that reads slowly stays."""
    limits = RouterLimits(send_timeout=1.0)
    async with (
        raw_http.run_instance() as one,
        fake_instances.run_router([one.url], limits=limits) as router,
        contextlib.AsyncExitStack() as stack,
    ):
        admission = router.app.admission
        clients = [await stack.enter_async_context(connect(router.url)) for _ in range(STALLED + 1)]
        for _, writer in clients:
            writer.write(raw_http.encode_request("flood", STREAM_BODY))
        await wait_until(lambda: admission.requests_under_way == STALLED + 1)
        slow_reader, _ = clients[0]
        read_bytes = 0

        async def read_slowly() -> None:
            nonlocal read_bytes
            while data := await slow_reader.read(256 << 10):
                read_bytes += len(data)
                await asyncio.sleep(0.2)

        reading = asyncio.create_task(read_slowly())
        await wait_until(lambda: admission.refusal_counts["send_timeout"] == STALLED)
        await wait_until(lambda: admission.requests_under_way == 1)
        assert not reading.done() and read_bytes > 0
        reading.cancel()
        slow_reader._transport.abort()


@pytest.mark.parametrize("permits", [asyncio.Semaphore(1), None], ids=["stall", "slow"])
async def test_an_instance_that_falls_silent(permits: asyncio.Semaphore | None) -> None:
    """Its stream is cut after --idle-timeout; one that pauses shortly goes on, however long it takes."""
    plan, limits = InstancePlan({}, gap_s=0.4, permits=permits), RouterLimits(idle_timeout=0.6)
    async with fake_instances.run_routed_instances([plan], limits=limits) as (router, _):
        answer = asyncio.wait_for(router.post_chat(), 20)
        if permits is None:
            assert (await answer)[2] == b"".join(fake_instances.STREAM_EVENTS)
        else:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer


async def test_memory_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is nearly used up, new requests are refused until some is free; one alone is served."""
    shares = iter((0.5, 0.91, 0.87, 0.84))
    monkeypatch.setattr(MemoryLimit, "measure_share", lambda _: next(shares))
    held = InstancePlan({"prefill.compute": 20_000})
    async with fake_instances.run_routed_instances([held]) as (router, one):
        plan = ServerPlan("127.0.0.1", 0, 0.0, 0.0, lambda: None)
        server = DrainingServer(router.app, plan)
        server.config.load()
        server._memory.max_bytes = 1 << 30
        admission = router.app.admission
        waiting = asyncio.create_task(router.post_chat())
        await wait_until(lambda: one.received)
        one.plan = InstancePlan({})
        statuses = []
        for _ in range(4):
            await server.on_tick(0)
            statuses.append((await router.post_chat())[0])
        assert statuses == [200, 503, 503, 200]
        assert admission.refusal_counts == {"memory": 2}
        waiting.cancel()
        await wait_until(lambda: not admission.requests_under_way)
        admission.is_memory_short = True
        assert (await router.post_chat())[0] == 200


@pytest.mark.parametrize(
    ("membership", "files", "share"),
    [
        ("0::/a/b", {"a/b/memory.max": "1000", "a/b/memory.current": "950"}, 0.9),
        ("0::/../x", {"memory.max": "1000", "memory.current": "950"}, 0.9),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": "950"}, 0),
        ("9:name=x:/\n4:memory:/a", {"memory/a/memory.limit_in_bytes": "1000"}, 0.75),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": str((1 << 63) - 4096)}, 0),
        ("0::/", {}, 0),
        ("nonsense::", {"memory.max": "x"}, 0),
    ],
)
def test_control_groups(
    membership: str, files: dict[str, str], share: float, tmp_path: Path
) -> None:
    """Both versions are read, and what can be dropped does not count."""
    more = {
        "memory/a/memory.usage_in_bytes": "800",
        "memory/a/memory.stat": "total_inactive_file 50",
    }
    stats = {"a/b/memory.stat": "anon 1\ninactive_file 50\n", "memory.stat": "inactive_file 50"}
    for name, text in {**more, **stats, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    named = tmp_path / "membership"
    named.write_text(f"{membership}\n")
    assert MemoryLimit(tmp_path, named).measure_share() == share
