# SPDX-License-Identifier: Apache-2.0
"""Hostile requests leave nothing behind in the router's process: no memory, no socket, no request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest
from router import raw_http
from router.control.test_client_connection import CHAT, encode_post

pytestmark = pytest.mark.slow

MAX_GROWTH_BYTES = 10 << 20
WARM_UP = 1000  # requests after which caches and allocator have what they will keep
AT_ONCE = 24
SETTLE_S = 60  # one file for each hundredth request would stay for ever
KINDS = (
    encode_post(b'{"model": "made-up"}'),
    encode_post(b"{" * 1000),
    encode_post(b"{}", *["x-a: b"] * 300),
    encode_post(b"{}", *[f"x-{number}: b" for number in range(200)]),
    encode_post(b"{}", f"x-request-id: {'a' * 250}"),
    encode_post(path=f"{CHAT}?{'a' * 9000}"),
    encode_post(path="/v1/../x"),
    encode_post(b"zz\r\n", "transfer-encoding: chunked", "expect: 100-continue"),
    encode_post(b"0\r\n" + b"a: b\r\n" * 100 + b"\r\n", "transfer-encoding: chunked"),
    encode_post(b"{}", "connection: upgrade", "upgrade: h2c"),
    encode_post(b" " * 200_000)[:-100_000],
    f"POST {CHAT} HTTP/1.1\r\nx-half: {'a' * 60_000}".encode(),
    b"\x16\x03\x01\x02\x00" * 20,
)


async def attack(router: raw_http.RouterProcess, number: int, chance: random.Random) -> None:
    """So many requests, each on a connection of its own, most of which wait for an answer."""
    kinds = iter(chance.choices(KINDS, k=number))

    async def send_remaining() -> None:
        for data in kinds:
            with contextlib.suppress(asyncio.TimeoutError, OSError):
                max_bytes = 0 if chance.random() < 0.2 else None
                await raw_http.send_bytes(router.url, data, max_bytes, timeout_s=1.0)

    await asyncio.gather(*(send_remaining() for _ in range(AT_ONCE)))


async def wait_for_files(router: raw_http.RouterProcess, most: int) -> None:
    """Wait until so many files are open at most: idle connections to instances stay for some seconds."""
    deadline_s = time.monotonic() + SETTLE_S
    while (open_files := router.count_open_files()) > most:
        assert time.monotonic() < deadline_s, f"{open_files} open files, {most} before"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(2000, id="some"),
        pytest.param(20_000, id="20000", marks=(pytest.mark.full, pytest.mark.timeout(3600))),
    ],
)
async def test_nothing_stays(number: int) -> None:
    """Memory within 10 MB after so many hostile requests, no socket and no request left."""
    flags = ("--head-timeout", "0.3", "--body-timeout", "0.3", "--reports", "100")
    chance = random.Random(5)
    async with (
        raw_http.run_instance() as one,
        raw_http.run_router_process("--backend", one.url, *flags) as router,
    ):
        await attack(router, WARM_UP, chance)
        await asyncio.sleep(1)
        files, before_bytes = router.count_open_files(), router.measure_memory_bytes()
        await attack(router, number, chance)
        await asyncio.sleep(1)
        assert router.measure_memory_bytes() - before_bytes < MAX_GROWTH_BYTES
        await wait_for_files(router, files + 2)
        assert await router.read_metric("ttft_otel_router_requests_in_flight") == [0]
        assert sum(await router.read_metric("ttft_otel_router_refusals_total")) > number / 4
        assert (
            raw_http.parse_status(await raw_http.send_bytes(router.url, raw_http.encode_request()))
            == 200
        )
