# SPDX-License-Identifier: Apache-2.0
"""No single request of a client holds the router up for the others, whatever is in it."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest
from router import fake_instances, raw_http
from router.control.test_client_connection import connect, encode_post
from router.fake_instances import STREAM_EVENTS, InstancePlan, RunningRouter

from attack.watched_router import run_watched_router

MAX_STALL_S = 0.05
MAX_STALL_TO_CONTROL = 5.0
MAX_TRIALS = (
    3  # what a request does to the router it does each time; a busy machine's noise it does not
)
HONEST_STREAMS = 8
FIRST_BYTE_S = 4.0  # for what takes long, and for what gets no answer
QUIET_S = 0.3
MEGA = 1 << 20
MARKED_BODY = b'{"model": "tiny", "stream": true, "messages": []}'

HOSTILE = {
    "equal headers": encode_post(b"{}", *["x-a: b"] * 60_000),
    "many headers": encode_post(b"{}", *[f"x-{number}: b" for number in range(60_000)]),
    "as many headers as allowed": encode_post(MARKED_BODY, *["x-a: " + "b" * 200] * 250),
    "a long header": b"POST /v1/completions HTTP/1.1\r\nx: " + b"a" * 22 * MEGA,
    "a header in pieces": b"POST /v1/completions HTTP/1.1\r\n" + b"x:\r\n" * 500_000,
    "a long target": b"POST /v1/" + b"a" * 4 * MEGA,
    "a target of dots": encode_post(path="/v1" + "/.." * 2500),
    "connection words": encode_post(MARKED_BODY, "connection: " + "a," * 30_000),
    "upgrades": encode_post(b"", "connection: upgrade", "upgrade: h2c") * 4000,
    "pipelined": encode_post(path="/v1/embeddings") * 4000,
    "pipelined GETs": b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 20_000,
    "trailers": encode_post(b"0\r\n" + b"a: b\r\n" * 200_000, "transfer-encoding: chunked"),
    "tiny chunks": encode_post(
        b"1\r\n \r\n" * 300_000 + b"0\r\n\r\n", "transfer-encoding: chunked"
    ),
    "empty lines": b"\r\n" * 500_000,
    "tracestate": encode_post(MARKED_BODY, f"tracestate: {'a=b,' * 15_000}"),
    "a large body": encode_post(b'{"model": "tiny", "input": "%b"}' % (b"a" * 8 * MEGA)),
    "a long model": encode_post(b'{"model": "%b"}' % (b"\xc3\xa4" * MEGA)),
}


async def read_until_quiet(router: RunningRouter, data: bytes) -> None:
    """Send `data` and read what comes until the router ends the connection or says nothing more."""
    async with connect(router) as client:
        sending = asyncio.create_task(client.send(data))
        wait_s = FIRST_BYTE_S
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            while await asyncio.wait_for(client.reader.read(1 << 16), wait_s):
                wait_s = QUIET_S
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def stream_honestly(router: RunningRouter, stop: asyncio.Event) -> int:
    """Streams one after another, each whole; how many there were."""
    number = 0
    while not stop.is_set():
        response = await raw_http.send_bytes(
            router.url, raw_http.encode_request(body=MARKED_BODY), timeout_s=60
        )
        body = b"".join(re.findall(rb"\r\n(data: .*?\n\n)\r\n", response, re.DOTALL))
        assert body == b"".join(STREAM_EVENTS)
        number += 1
    return number


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_request_does_not_hold_the_router_up(kind: str) -> None:
    """At most 50 ms of CPU in one go, or five times what honest requests take on this machine."""

    async def run_scenario() -> None:
        plan = InstancePlan(stages_ms={}, gap_s=0.01)
        async with (
            fake_instances.run_instance(plan) as one,
            run_watched_router(one.url) as (router, watch),
        ):
            stop = asyncio.Event()
            honest = [
                asyncio.create_task(stream_honestly(router, stop)) for _ in range(HONEST_STREAMS)
            ]
            await asyncio.sleep(0.3)
            stalls = []
            for _ in range(MAX_TRIALS):
                watch.take_longest_s()
                await asyncio.sleep(0.5)
                control_s = watch.take_longest_s()
                await read_until_quiet(router, HOSTILE[kind])
                stalls.append((watch.take_longest_s(), control_s))
                if stalls[-1][0] < max(MAX_STALL_S, MAX_STALL_TO_CONTROL * control_s):
                    break
            else:
                pytest.fail(f"seconds of stall and control: {stalls}")
            stop.set()
            assert min(await asyncio.gather(*honest)) > 0

    fake_instances.run_with_timeout(run_scenario, 120)
