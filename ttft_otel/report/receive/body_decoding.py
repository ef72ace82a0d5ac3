# SPDX-License-Identifier: Apache-2.0
"""Decompress a request body within a limit, so that a small upload cannot exhaust the memory."""

from __future__ import annotations

import zlib
from typing import Final

# Of one export, compressed or not: gRPC's own default. The SDK's largest have 1 MB.
MAX_BODY_BYTES: Final = 4 << 20
MAX_GZIP_MEMBERS: Final = 64  # each of them copies the rest of the body
# zlib's wbits: 15 is the largest window; 16 more selects gzip's header.
_BITS: Final = {"gzip": 31, "deflate": 15}


class BodyTooLargeError(Exception):
    """A body with more bytes than the limit."""


class BodyEncodingError(Exception):
    """A body that does not match its Content-Encoding, or an encoding that is not supported."""


def unpack_body(data: bytes, encoding: str, limit: int = MAX_BODY_BYTES) -> bytes:
    """Decompress a body. Raises BodyTooLargeError or BodyEncodingError.

    encoding: Content-Encoding; "" and "identity" are uncompressed. limit: bytes of the result.
    """
    coding = encoding.strip().lower()
    if coding in ("", "identity"):
        if len(data) > limit:
            raise BodyTooLargeError(f"more than {limit} bytes")
        return data
    # OTLP names gzip only; deflate costs nothing more.
    if coding not in _BITS:
        raise BodyEncodingError(
            f"Content-Encoding {coding!r} is not supported; use gzip, deflate or none"
        )
    plain = bytearray()
    members = 0
    while data:  # a gzip body may consist of several members
        members += 1
        if members > MAX_GZIP_MEMBERS:
            raise BodyEncodingError(f"{coding} has more than {MAX_GZIP_MEMBERS} members")
        stream = zlib.decompressobj(_BITS[coding])
        try:
            # One byte more than allowed tells that there is more, without unpacking it.
            plain += stream.decompress(data, limit + 1 - len(plain))
        except zlib.error as error:
            raise BodyEncodingError(f"not {coding}: {error}") from error
        if len(plain) > limit:
            raise BodyTooLargeError(f"more than {limit} bytes when unpacked")
        # Cut off in transit: half of a batch must not be confirmed as all of it.
        if not stream.eof:
            raise BodyEncodingError(f"{coding} ends too early")
        data = stream.unused_data
    return bytes(plain)
