# SPDX-License-Identifier: Apache-2.0
"""The requests' pictures, decoded by an independent reader of PNG, and the times at which they are sent."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ttft_otel.bench.load_plan import LoadPlan
from ttft_otel.bench.request_factory import (
    PNG_SIGNATURE,
    BenchRequest,
    draw_data_url,
    draw_png,
)


def test_seeds_and_sizes() -> None:
    """The same seed and size give the same bytes; others a picture that no cache confuses with another."""
    pictures = {draw_png(1), draw_png(2), draw_png(1, 56, 56), draw_png(1, 56, 28), draw_png(1)}

    assert len(pictures) == 4


def test_wellformed() -> None:
    """The file says its size and holds as many pixels as it says; a data URL carries the whole of it."""
    data = draw_png(3, 20, 10)
    start = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[start - 4 : start])
    pixels = zlib.decompress(data[start + 4 : start + 4 + length])

    assert data[:8] == PNG_SIGNATURE
    assert struct.unpack(">II", data[16:24]) == (20, 10)
    assert len(pixels) == 10 * (1 + 3 * 20)
    kind, _, body = draw_data_url(5).partition(",")
    assert (kind, base64.b64decode(body)) == ("data:image/png;base64", draw_png(5))


@pytest.mark.parametrize(
    ("arrivals", "variation"), [("constant", 0), ("poisson", 1), ("bursts", 2)]
)
def test_arrivals(arrivals: str, variation: float) -> None:
    """Every process keeps the rate; their gaps vary by nothing, by their mean, and by twice of it."""
    plan = LoadPlan(request_count=20_000, rate=50.0, arrivals=arrivals)
    loads: list[Any] = []
    requests = [BenchRequest("", b"")] * 20_000

    async def take_arrivals(_: Any, arrivals: Any) -> None:
        loads.extend(arrivals)

    with mock.patch("ttft_otel.bench.load_plan.run_open_loop", take_arrivals):
        asyncio.run(plan.send_load(mock.Mock(), 1, requests))
    gaps_s = np.diff([offset_s for offset_s, _ in loads])

    assert gaps_s.mean() == pytest.approx(0.02, rel=0.05)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(variation, rel=0.05, abs=1e-6)
