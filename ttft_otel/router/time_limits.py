# SPDX-License-Identifier: Apache-2.0
"""Wait for something for a limited time; every room of the router that waits in a loop uses it.

Not asyncio.wait_for: in Python 3.10 and 3.11 it swallows a cancellation that comes as the awaited thing
ends, and a loop that should have been cancelled goes on for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")


async def wait_at_most(awaitable: Awaitable[Result], timeout_s: float) -> Result:
    """The result of `awaitable`. Raises asyncio.TimeoutError after `timeout_s` seconds, and cancels it."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            task.cancel()
            # Waited for: whatever it holds is free again when the caller goes on.
            await asyncio.wait({task})
    except asyncio.CancelledError:
        # Not waited for: the caller's own cancellation must not be delayed by what it waited for.
        task.cancel()
        raise
    # It may have ended just as the time was over: then its result counts.
    if task.cancelled():
        raise asyncio.TimeoutError
    return task.result()
