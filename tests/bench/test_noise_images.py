# SPDX-License-Identifier: Apache-2.0
"""The laboratory's pictures, decoded by an independent reader of PNG."""

from __future__ import annotations

import base64
import struct
import zlib

from ttft_otel.bench import noise_images


def test_deterministic() -> None:
    """The same seed and size give the same bytes."""
    assert noise_images.draw_png(7) == noise_images.draw_png(7)


def test_distinct() -> None:
    """Every seed and every size give a picture that no cache confuses with another."""
    pictures = {
        noise_images.draw_png(1),
        noise_images.draw_png(2),
        noise_images.draw_png(1, 56, 56),
        noise_images.draw_png(1, 56, 28),
    }

    assert 4 == len(pictures)


def test_wellformed() -> None:
    """The file says its size and holds as many pixels as it says."""
    data = noise_images.draw_png(3, 20, 10)
    size = struct.unpack(">II", data[16:24])
    start = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[start - 4 : start])
    pixels = zlib.decompress(data[start + 4 : start + 4 + length])

    assert noise_images.PNG_SIGNATURE == data[:8]
    assert (20, 10) == size
    assert 10 * (1 + 3 * 20) == len(pixels)


def test_url() -> None:
    """A data URL carries the whole file."""
    kind, _, body = noise_images.draw_data_url(5).partition(",")

    assert "data:image/png;base64" == kind
    assert noise_images.draw_png(5) == base64.b64decode(body)
