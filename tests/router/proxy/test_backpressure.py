# SPDX-License-Identifier: Apache-2.0
"""A slow client slows down only its own request; one that disconnects ends its legs at once."""

from __future__ import annotations

import asyncio

from router import raw_http
from ttft_otel.tracing import clock

STREAM_BODY = b'{"model": "tiny", "stream": true, "messages": []}'
MEDIA_BODY = (
    b'{"model": "tiny", "stream": true, "messages": [{"role": "user", "content": ['
    b'{"type": "image_url", "image_url": {"url": "a"}},'
    b'{"type": "image_url", "image_url": {"url": "b"}}]}]}'
)


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


async def test_leaving_ends_every_leg() -> None:
    """100 ms after a client disconnects no leg is open: before the first byte, in a stream, at encoders."""
    async with (
        raw_http.run_instance() as one,
        raw_http.run_router_process("--encoder", one.url, "--backend", one.url) as router,
    ):
        host, port = router.url.removeprefix("http://").split(":")
        for mood, body, legs in (
            ("late", STREAM_BODY, 1),
            ("endless", STREAM_BODY, 1),
            ("late", MEDIA_BODY, 2),
        ):
            one.closed_us.clear()
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(raw_http.encode_request(mood, body, request_id="mine"))
            if mood == "endless":
                await reader.readuntil(raw_http.EVENT_BYTES)
            else:
                await asyncio.sleep(0.3)
            left = clock.now_us()
            writer.transport.abort()
            for _ in range(30):
                await asyncio.sleep(0.05)
                if len(one.closed_us) == legs:
                    break
            assert len(one.closed_us) == legs
            assert all(0 < moment - left < 100_000 for moment in one.closed_us.values())
