# SPDX-License-Identifier: Apache-2.0
"""Bounds for bodies of HTTP, so that no small one exhausts the memory when it is unpacked, nor all together.

The receiver unpacks exports, the router the answers to its own questions. Both have a budget for the bytes
of all bodies that they hold: what is over it goes at the expense of the largest body that is still
arriving, of equal ones the oldest. Small requests pass while somebody sends large ones and does not finish.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final, Generic, Protocol, TypeVar

MAX_GZIP_MEMBERS: Final = 64  # each of them copies the rest of the body
# zlib's wbits: 15 is the largest window; 16 more selects gzip's header.
_BITS: Final = {"gzip": 31, "deflate": 15}


class BodyTooLargeError(Exception):
    """A body with more bytes than the limit."""


def unpack_body(data: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a body. Raises BodyTooLargeError or ValueError.

    encoding: Content-Encoding; "" and "identity" are uncompressed. limit: bytes of the result.
    """
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        if len(data) > limit:
            raise BodyTooLargeError(f"more than {limit} bytes")
        return data
    # OTLP and vLLM use gzip at most; deflate costs nothing more.
    if coding not in _BITS:
        raise ValueError(f"Content-Encoding {coding!r} is not supported; use gzip, deflate or none")
    plain = bytearray()
    members = 0
    while data:  # a gzip body may consist of several members
        members += 1
        if members > MAX_GZIP_MEMBERS:
            raise ValueError(f"{coding} has more than {MAX_GZIP_MEMBERS} members")
        stream = zlib.decompressobj(_BITS[coding])
        try:
            # One byte more than allowed tells that there is more, without unpacking it.
            plain += stream.decompress(data, limit + 1 - len(plain))
        except zlib.error as error:
            raise ValueError(f"not {coding}: {error}") from error
        if len(plain) > limit:
            raise BodyTooLargeError(f"more than {limit} bytes when unpacked")
        # Cut off in transit: half of a batch must not be confirmed as all of it.
        if not stream.eof:
            raise ValueError(f"{coding} ends too early")
        data = stream.unused_data
    return bytes(plain)


class SizedBody(Protocol):
    """A body of which `counted_bytes` are counted."""

    counted_bytes: int


BodyType = TypeVar("BodyType", bound=SizedBody)


class ByteBudget(Generic[BodyType]):
    """The bytes of all bodies, `counted_bytes`; used on one event loop.

    arriving: those that can give way, the oldest first; their owner adds and removes them.
    """

    def __init__(self, max_bytes: int, arriving: Iterable[BodyType]) -> None:
        self.max_bytes = max_bytes
        self.counted_bytes = 0
        self._arriving = arriving

    def add_bytes(self, body: BodyType, number: int) -> list[BodyType]:
        """Count bytes of `body`, which is arriving; the bodies that give way for them, itself perhaps.

        Their bytes are released; their owner ends them.
        """
        body.counted_bytes += number
        self.counted_bytes += number
        losers: list[BodyType] = []
        # Ends with `body` itself at the latest, which is one of the arriving ones.
        while self.counted_bytes > self.max_bytes and body not in losers:
            # the first of equal ones
            largest = max(self._arriving, key=lambda each: each.counted_bytes)
            self.release(largest)
            losers.append(largest)
        return losers

    def release(self, body: BodyType) -> None:
        """The bytes of `body` are free again. Idempotent."""
        # By what the body counts, and then 0: a second release takes nothing away.
        self.counted_bytes -= body.counted_bytes
        body.counted_bytes = 0
