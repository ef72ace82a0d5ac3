# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests to instances, for aiohttp: upstream_client.py sends them in pieces, never joined.

A write of everything at once keeps the kernel busy for as long as the instance reads as fast: 60 MB
held the event loop for 100 ms.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter

PIECE_BYTES: Final = 1 << 20  # written in one turn of the event loop


class PiecewiseBody(payload.Payload):
    """`parts`, one after the other; `content_type` is for a request that has no such header."""

    def __init__(self, *parts: bytes, content_type: str = "application/octet-stream") -> None:
        super().__init__(parts, content_type=content_type)
        self._parts = parts
        self._size = sum(map(len, parts))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The whole body as text."""
        return b"".join(self._parts).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the parts, with a turn for others after each piece of a large one."""
        for part in self._parts:
            if len(part) <= PIECE_BYTES:
                await writer.write(part)
                continue
            view = memoryview(part)
            for start in range(0, len(part), PIECE_BYTES):
                await writer.write(view[start : start + PIECE_BYTES])
                await asyncio.sleep(0)


class FramedItem(PiecewiseBody):
    """`item` between the two parts of `frame`, which the requests for all items of a body share."""

    def __init__(self, item: bytes, frame: tuple[bytes, bytes]) -> None:
        super().__init__(frame[0], item, frame[1], content_type="application/json")


def build_payload(body: bytes) -> bytes | PiecewiseBody:
    """What aiohttp sends best: a small `body` in one write with the head, a large one in pieces."""
    return body if len(body) <= PIECE_BYTES else PiecewiseBody(body)
