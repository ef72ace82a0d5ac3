# SPDX-License-Identifier: Apache-2.0
"""Small PNG images of noise from a seed, as data URLs for the requests of bench and lab."""

from __future__ import annotations

import base64
import random
import struct
import zlib

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def draw_png(seed: int, width: int = 112, height: int = 112) -> bytes:
    """The bytes of a PNG with random pixels; the same arguments give the same bytes.

    width, height: pixels.
    """
    # The size is part of the seed: another size is another picture.
    rng = random.Random(f"{seed}/{width}x{height}")
    # Each row begins with its filter byte; 0 is "no filter".
    rows = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))
    # 8 bits, colour type 2 (RGB); then the only compression and filter there are, not interlaced.
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        PNG_SIGNATURE
        + encode_chunk(b"IHDR", header)
        # Level 1: noise does not become smaller, and higher levels only take longer.
        + encode_chunk(b"IDAT", zlib.compress(rows, 1))
        + encode_chunk(b"IEND", b"")
    )


def encode_chunk(kind: bytes, data: bytes) -> bytes:
    """One PNG chunk: length, `kind`, data, CRC-32."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def draw_data_url(seed: int, width: int = 112, height: int = 112) -> str:
    """draw_png() as a data URL for `image_url` of a chat request, so that no server has to fetch it."""
    return "data:image/png;base64," + base64.b64encode(draw_png(seed, width, height)).decode(
        "ascii"
    )
