# SPDX-License-Identifier: Apache-2.0
"""Waiting for a limited time, when the end, the limit and a cancellation fall together."""

from __future__ import annotations

import asyncio

import pytest

from ttft_otel.router.time_limits import wait_at_most


async def test_result() -> None:
    """What is awaited in time gives its result or its error."""
    assert await wait_at_most(asyncio.sleep(0, 7), 10) == 7
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failed.set_exception(ValueError("nothing"))
    with pytest.raises(ValueError, match="nothing"):
        await wait_at_most(failed, 10)


async def test_limit() -> None:
    """At the limit what is awaited is cancelled, and has ended when the error comes."""
    waiting = asyncio.create_task(asyncio.sleep(60))
    with pytest.raises(asyncio.TimeoutError):
        await wait_at_most(waiting, 0.01)
    assert waiting.cancelled()


async def test_cancellation_at_the_end() -> None:
    """A cancellation in the same turn as the end is not swallowed, as by wait_for of 3.10."""
    end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(wait_at_most(end, 60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    end.set_result(None)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
