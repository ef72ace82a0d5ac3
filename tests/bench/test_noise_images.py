# SPDX-License-Identifier: Apache-2.0
"""The laboratory's pictures, decoded by an independent reader of PNG."""

from __future__ import annotations

import base64
import struct
import zlib

from ttft_otel.bench import request_factory


def test_deterministic() -> None:
    """The same seed and size give the same bytes."""
    assert request_factory.draw_png(7) == request_factory.draw_png(7)


def test_distinct() -> None:
    """Every seed and every size give a picture that no cache confuses with another."""
    pictures = {
        request_factory.draw_png(1),
        request_factory.draw_png(2),
        request_factory.draw_png(1, 56, 56),
        request_factory.draw_png(1, 56, 28),
    }

    assert 4 == len(pictures)


def test_wellformed() -> None:
    """The file says its size and holds as many pixels as it says."""
    data = request_factory.draw_png(3, 20, 10)
    size = struct.unpack(">II", data[16:24])
    start = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[start - 4 : start])
    pixels = zlib.decompress(data[start + 4 : start + 4 + length])

    assert request_factory.PNG_SIGNATURE == data[:8]
    assert (20, 10) == size
    assert 10 * (1 + 3 * 20) == len(pixels)


def test_url() -> None:
    """A data URL carries the whole file."""
    kind, _, body = request_factory.draw_data_url(5).partition(",")

    assert "data:image/png;base64" == kind
    assert request_factory.draw_png(5) == base64.b64decode(body)
