# SPDX-License-Identifier: Apache-2.0
"""Long work on the event loop in short slices; what applies events and forgets instances uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from time import perf_counter
from typing import Final

from ttft_otel.router.policies.index import Holders

SLICE: Final = 0.001  # seconds on the event loop at a time
CHUNK: Final = 256  # blocks between two looks at the clock


async def sliced(work: Iterator[object]) -> None:
    """Run it to its end; others may run wherever it yields."""
    end = perf_counter() + SLICE
    for _ in work:
        if perf_counter() > end:
            await asyncio.sleep(0)
            end = perf_counter() + SLICE


def sweep(index: Holders, bit: int, blocks: Iterator[int]) -> Iterator[None]:
    """Take a retired cache's bit from the blocks that it had."""
    while chunk := list(islice(blocks, CHUNK)):
        index.sweep(bit, chunk)
        yield
    index.release(bit)
