# SPDX-License-Identifier: Apache-2.0
"""Long work on the event loop in short slices; what applies events and forgets instances uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import perf_counter
from typing import Final

SLICE: Final = 0.001  # seconds on the event loop at a time


async def sliced(work: Iterator[object]) -> None:
    """Run it to its end; others may run wherever it yields."""
    end = perf_counter() + SLICE
    for _ in work:
        if perf_counter() > end:
            await asyncio.sleep(0)
            end = perf_counter() + SLICE
