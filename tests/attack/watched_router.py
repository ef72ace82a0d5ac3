# SPDX-License-Identifier: Apache-2.0
"""The router in a thread whose event loop is watched: how long one request can hold it up for all others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from router import fake_instances
from router.fake_instances import RunningRouter


class StallWatch:
    """longest_s: the longest time between two turns of the watch, in CPU seconds of the loop's thread.

    CPU seconds, because the wall's also count what other processes of a busy machine take.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch_turns(self) -> None:
        """Measure until cancelled."""
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(0.0005)
            now_s = time.thread_time()
            self.longest_s = max(self.longest_s, now_s - before_s)
            before_s = now_s

    def take_longest_s(self) -> float:
        """The longest time since the last call."""
        longest_s, self.longest_s = self.longest_s, 0.0
        return longest_s


@contextlib.asynccontextmanager
async def run_watched_router(
    instance_url: str, **options: Any
) -> AsyncIterator[tuple[RunningRouter, StallWatch]]:
    """A router before one instance, in a thread of its own; options as of fake_instances.run_router."""
    watch = StallWatch()
    own_loop = asyncio.get_running_loop()
    started: asyncio.Future[RunningRouter] = own_loop.create_future()
    ended = threading.Event()

    async def serve_until_ended() -> None:
        async with fake_instances.run_router([instance_url], traced=True, **options) as router:
            task = asyncio.create_task(watch.watch_turns())
            own_loop.call_soon_threadsafe(started.set_result, router)
            while not ended.is_set():
                await asyncio.sleep(0.02)
            task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve_until_ended()))
    thread.start()
    try:
        yield await asyncio.wait_for(started, 30), watch
    finally:
        ended.set()
        await asyncio.to_thread(thread.join)
