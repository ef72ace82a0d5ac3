# SPDX-License-Identifier: Apache-2.0
"""A slow client slows its leg down, and nobody else; one that leaves ends its legs at once."""

from __future__ import annotations

import asyncio

from router import fakes, rough
from ttft_otel import clock

STREAM = b'{"model": "tiny", "stream": true, "messages": []}'
MEDIA = (
    b'{"model": "tiny", "stream": true, "messages": [{"role": "user", "content": ['
    b'{"type": "image_url", "image_url": {"url": "a"}},'
    b'{"type": "image_url", "image_url": {"url": "b"}}]}]}'
)


def test_a_slow_client_slows_its_leg() -> None:
    """Twenty clients that read nothing of endless streams: little is read ahead, little is kept."""

    async def scenario() -> None:
        async with rough.instance() as one, rough.process("--backend", one.url) as router:
            await rough.ask(router.url, rough.request())
            before = router.memory()
            host, port = router.url.removeprefix("http://").split(":")
            stalled = [await asyncio.open_connection(host, int(port), limit=1) for _ in range(20)]
            for _, writer in stalled:
                writer.write(rough.request("flood", STREAM))
            written = await settled(one)
            # Sockets hold some megabytes on each of the two ways; an instance could give gigabytes.
            assert 0 < written < 20 * (16 << 20)
            # read and not yet taken, taken and not yet sent, being sent: 256 KiB or a little more each
            assert router.memory() - before < 20 * (3 << 20)

            began = clock.now()
            assert rough.status(await rough.ask(router.url, rough.request())) == 200
            assert clock.now() - began < 1_000_000

            reader, _ = stalled[0]
            got = 0
            while got < 40 << 20:  # more than was on its way: the leg goes on when the client does
                got += len(await reader.read(1 << 20))
            assert one.written > written
            for _, writer in stalled:
                writer.transport.abort()
            for _ in range(50):
                if not (open_ := await router.metrics("ttft_otel_router_requests_in_flight"))[0]:
                    break
                await asyncio.sleep(0.1)
            assert open_ == [0.0]

    fakes.run(scenario)


async def settled(one: rough.Instance) -> int:
    """The bytes written so far, once no more are taken."""
    before = -1
    while before != one.written:
        before = one.written
        await asyncio.sleep(0.7)
    return before


def test_leaving_ends_every_leg() -> None:
    """Before the first byte, within a stream and among encoders: 100 ms later no leg is open."""

    async def scenario() -> None:
        async with (
            rough.instance() as one,
            rough.process("--encoder", one.url, "--backend", one.url) as router,
        ):
            host, port = router.url.removeprefix("http://").split(":")
            for mood, body, legs in (
                ("late", STREAM, 1),
                ("endless", STREAM, 1),
                ("late", MEDIA, 2),
            ):
                one.left.clear()
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(rough.request(mood, body, name="mine"))
                if mood == "endless":
                    await reader.readuntil(rough.EVENT)
                else:
                    await asyncio.sleep(0.3)
                left = clock.now()
                writer.transport.abort()
                for _ in range(30):
                    await asyncio.sleep(0.05)
                    if len(one.left) == legs:
                        break
                assert len(one.left) == legs
                assert all(0 < moment - left < 100_000 for moment in one.left.values())

    fakes.run(scenario)
