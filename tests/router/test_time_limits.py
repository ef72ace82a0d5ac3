# SPDX-License-Identifier: Apache-2.0
"""Waiting for a limited time, when the end, the limit and a cancellation fall together."""

from __future__ import annotations

import asyncio

import pytest

from ttft_otel.router.time_limits import wait_at_most


def test_result() -> None:
    """What is awaited in time gives its result or its error."""

    async def give(value: int) -> int:
        if not value:
            raise ValueError("nothing")
        return value

    async def run_scenario() -> None:
        assert await wait_at_most(give(7), 10) == 7
        with pytest.raises(ValueError, match="nothing"):
            await wait_at_most(give(0), 10)

    asyncio.run(run_scenario())


def test_limit() -> None:
    """At the limit what is awaited is cancelled, and has ended when the error comes."""
    ended = []

    async def wait_long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def run_scenario() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await wait_at_most(wait_long(), 0.01)
        assert ended == [True]

    asyncio.run(run_scenario())


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
