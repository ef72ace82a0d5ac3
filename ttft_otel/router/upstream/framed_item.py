# SPDX-License-Identifier: Apache-2.0
"""The body of an encoder request, for aiohttp: upstream_client.py sends it without joining its parts."""

from __future__ import annotations

from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter


class FramedItem(payload.Payload):
    """`item` between the two parts of `frame`, which the requests for all items of a body share."""

    def __init__(self, item: bytes, frame: tuple[bytes, bytes]) -> None:
        super().__init__(item, content_type="application/json")
        self._parts = (frame[0], item, frame[1])
        self._size = sum(map(len, self._parts))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The whole body as text."""
        return b"".join(self._parts).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the parts one after the other."""
        for part in self._parts:
            await writer.write(part)
