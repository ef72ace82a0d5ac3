# SPDX-License-Identifier: Apache-2.0
"""Decompress a body within a limit, so that a small one cannot exhaust the memory.

The receiver unpacks exports with it, the router the answers to its own questions.
"""

from __future__ import annotations

import zlib
from typing import Final

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
