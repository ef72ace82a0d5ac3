# SPDX-License-Identifier: Apache-2.0
"""Run long work on the event loop in short slices; used to apply KV events and to free memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import perf_counter
from typing import Final

# Seconds of work before other tasks run: the delay that a request may see.
SLICE_S: Final = 0.001


async def run_sliced(steps: Iterator[object]) -> None:
    """Exhaust `steps`, letting other tasks run after each SLICE_S."""
    end = perf_counter() + SLICE_S
    for _ in steps:
        if perf_counter() > end:
            # One turn of the event loop, without a timer.
            await asyncio.sleep(0)
            end = perf_counter() + SLICE_S
