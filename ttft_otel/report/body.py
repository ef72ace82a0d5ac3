# SPDX-License-Identifier: Apache-2.0
"""Unpack a request body within a bound, so that a small upload cannot become a large memory.

receiver.py gives the bytes and their Content-Encoding; otlp.py gets the plain bytes.
"""

from __future__ import annotations

import zlib
from typing import Final

LIMIT: Final = 16 << 20  # bytes of one export, packed or not; the SDK's largest are about 1 MB
_BITS: Final = {"gzip": 31, "deflate": 15}


class Large(Exception):
    """More than LIMIT bytes."""


class Broken(Exception):
    """Bytes that are not what their encoding says, or an encoding that we do not have."""


def unpack(data: bytes, encoding: str, limit: int = LIMIT) -> bytes:
    """Give the plain bytes. Raises Large or Broken."""
    word = encoding.strip().lower()
    if word in ("", "identity"):
        if len(data) > limit:
            raise Large(f"more than {limit} bytes")
        return data
    if word not in _BITS:
        raise Broken(f"Content-Encoding {word!r} is not supported; use gzip, deflate or none")
    out = bytearray()
    while data:  # gzip files may be strung together
        stream = zlib.decompressobj(_BITS[word])
        try:
            out += stream.decompress(data, limit + 1 - len(out))
        except zlib.error as error:
            raise Broken(f"not {word}: {error}") from error
        if len(out) > limit:
            raise Large(f"more than {limit} bytes when unpacked")
        if not stream.eof:
            raise Broken(f"{word} ends too early")
        data = stream.unused_data
    return bytes(out)
