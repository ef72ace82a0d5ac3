# SPDX-License-Identifier: Apache-2.0
"""How long one turn of an event loop holds it, for the tests of this folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

# Seconds that no turn may exceed: 50 ms are required, on a core of an idle machine; these are slower.
MAX_TURN_S = 0.15


@dataclass
class LoopWatch:
    """longest_s: CPU seconds of the longest turn. Not wall time, which other processes lengthen."""

    longest_s: float = 0.0

    async def watch_turns(self) -> None:
        """Measure every turn, until cancelled."""
        while True:
            start_s = time.thread_time()
            await asyncio.sleep(0.0005)
            self.longest_s = max(self.longest_s, time.thread_time() - start_s)


@asynccontextmanager
async def watch_loop() -> AsyncIterator[LoopWatch]:
    """Watch the running loop, and fail at the end if a turn was too long."""
    watch = LoopWatch()
    task = asyncio.create_task(watch.watch_turns())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert watch.longest_s < MAX_TURN_S
