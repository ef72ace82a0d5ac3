# SPDX-License-Identifier: Apache-2.0
"""A refusal costs the router less CPU than the request that it refuses."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from router import raw_http
from router.control.test_client_connection import CHAT, encode_post
from router.raw_http import RouterProcess

pytestmark = pytest.mark.slow

ROUNDS, MAX_ROUNDS = 3, 12
BODY = b'{"model": "tiny", "messages": []}'
LONG_BODY = BODY + b" " * 2_000_000
KEY = "authorization: Bearer k"
MANY = [f"x-{number}: a" for number in range(300)]
LONG_PATH = f"{CHAT}?{'a' * 9000}"
# What the strict router refuses, with which status, and what the generous one serves; per round.
PAIRS = {
    "no key": (encode_post(BODY), 401, encode_post(BODY, KEY), 60),
    "no JSON": (encode_post(b"[" + BODY, KEY), 400, encode_post(BODY, KEY), 60),
    "no such model": (encode_post(b'{"model": "b"}', KEY), 404, encode_post(BODY, KEY), 60),
    "headers": (encode_post(BODY, KEY, *MANY), 431, encode_post(BODY, KEY, *MANY), 60),
    "target": (
        encode_post(BODY, KEY, path=LONG_PATH),
        414,
        encode_post(BODY, KEY, path=LONG_PATH[:8000]),
        60,
    ),
    "body": (encode_post(LONG_BODY, KEY), 413, encode_post(LONG_BODY, KEY), 20),
}


def read_cpu_ns(router: RouterProcess) -> int:
    """CPU time of the router's main thread."""
    return int(Path(f"/proc/{router.pid}/schedstat").read_text().split()[0])


async def measure_cpu_ns(router: RouterProcess, data: bytes, status: int, number: int) -> int:
    """What so many requests cost it, each on a connection of its own."""
    before_ns = read_cpu_ns(router)
    for _ in range(number):
        assert raw_http.parse_status(await raw_http.send_bytes(router.url, data)) == status
    return read_cpu_ns(router) - before_ns


@pytest.mark.full
async def test_a_refusal_is_cheaper() -> None:
    """For each kind of refusal its least CPU time is below that of a request that is served."""
    flags = ("--api-key", "k")
    async with (
        raw_http.run_instance() as one,
        raw_http.run_router_process(
            "--backend", one.url, *flags, "--max-body", "1000000"
        ) as strict,
        raw_http.run_router_process(
            "--backend", one.url, *flags, "--max-headers", "1000"
        ) as generous,
    ):
        await asyncio.sleep(0.5)
        ratios = {}
        for kind, (refused, status, served, number) in PAIRS.items():
            refused_ns, served_ns = [], []
            for done in range(MAX_ROUNDS):
                # A busy machine only adds to either of them.
                if done >= ROUNDS and min(refused_ns) < min(served_ns):
                    break
                refused_ns.append(await measure_cpu_ns(strict, refused, status, number))
                served_ns.append(await measure_cpu_ns(generous, served, 200, number))
            ratios[kind] = min(refused_ns) / min(served_ns)
        sys.stdout.write(f"{ratios}\n")
        assert max(ratios.values()) < 1, ratios
