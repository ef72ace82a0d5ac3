# SPDX-License-Identifier: Apache-2.0
"""A slow client slows down only its own request."""

from __future__ import annotations

import asyncio

from router import raw_http
from ttft_otel.tracing import clock

STREAM_BODY = b'{"model": "tiny", "stream": true, "messages": []}'


async def test_a_slow_client_slows_its_leg() -> None:
    """Twenty clients that read nothing of endless streams: the router reads and keeps little of each."""
    async with (
        raw_http.run_instance() as one,
        raw_http.run_router_process("--backend", one.url) as router,
    ):
        await raw_http.send_bytes(router.url, raw_http.encode_request())
        before = router.measure_memory_bytes()
        host, port = router.url.removeprefix("http://").split(":")
        stalled = [await asyncio.open_connection(host, int(port), limit=1) for _ in range(20)]
        for _, writer in stalled:
            writer.write(raw_http.encode_request("flood", STREAM_BODY))
        written = await wait_until_written(one)
        # Sockets hold some megabytes on each of the two ways; an instance could give gigabytes.
        assert 0 < written < 20 * (16 << 20)
        # read and not yet taken, taken and not yet sent, being sent: 256 KiB or a little more each
        assert router.measure_memory_bytes() - before < 20 * (3 << 20)

        began = clock.now_us()
        assert (
            raw_http.parse_status(await raw_http.send_bytes(router.url, raw_http.encode_request()))
            == 200
        )
        assert clock.now_us() - began < 1_000_000

        reader, _ = stalled[0]
        got = 0
        while got < 40 << 20:  # more than was on its way: the leg goes on when the client does
            got += len(await reader.read(1 << 20))
        assert one.flood_bytes > written
        for _, writer in stalled:
            writer.transport.abort()
        for _ in range(50):
            if not (open_ := await router.read_metric("ttft_otel_router_requests_in_flight"))[0]:
                break
            await asyncio.sleep(0.1)
        assert open_ == [0.0]


async def wait_until_written(raw_instance: raw_http.RawInstance) -> int:
    """The bytes written so far, once no more are taken."""
    before = -1
    while before != raw_instance.flood_bytes:
        before = raw_instance.flood_bytes
        await asyncio.sleep(0.7)
    return before
