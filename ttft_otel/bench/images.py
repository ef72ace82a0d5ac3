# SPDX-License-Identifier: Apache-2.0
"""Draw little PNG pictures from a seed; data.py and the laboratory put them into requests as data URLs."""

from __future__ import annotations

import base64
import random
import struct
import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(seed: int, width: int = 112, height: int = 112) -> bytes:
    """A noise picture: the same seed and size give the same bytes, another seed other ones."""
    noise = random.Random(f"{seed}/{width}x{height}")
    # Each row opens with its filter byte; 0 means the colours stand as they are.
    rows = b"".join(b"\0" + noise.randbytes(3 * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        SIGNATURE
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows, 1))
        + chunk(b"IEND", b"")
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    """One PNG chunk: length, kind, data, checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def data_url(seed: int, width: int = 112, height: int = 112) -> str:
    """The picture as the `image_url` of a chat request, so that no server has to fetch it."""
    return "data:image/png;base64," + base64.b64encode(png(seed, width, height)).decode("ascii")
