# SPDX-License-Identifier: Apache-2.0
"""Wait for something for a limited time, and end what many wait for; all of the router uses it.

wait_at_most() is not asyncio.wait_for: in Python 3.10 and 3.11 it swallows a cancellation that comes as
the awaited thing ends, and a loop that should have been cancelled goes on for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from operator import methodcaller
from typing import Any, Final, Generic, TypeVar

_EARLY_S: Final = 0.001  # an event loop's timer may fire that much early
# Options of a TCP connection by their name in `socket`; Linux has all of them. A minute in both cases.
TCP_OPTIONS: Final = {
    "TCP_KEEPIDLE": 30,  # seconds without a packet until the first probe
    "TCP_KEEPINTVL": 10,  # seconds until the next one
    "TCP_KEEPCNT": 3,  # probes without an answer that end the connection
    # Milliseconds for which what was sent stays unacknowledged; no probe is sent then.
    "TCP_USER_TIMEOUT": 60_000,
}

WaiterType = TypeVar("WaiterType")


class DeadlineQueue(Generic[WaiterType]):
    """Calls `end`, by default its `time_out()`, with each waiter that was watched for `timeout_s` seconds.

    One timer serves all waiters, because a timer for each would cost every request more than all the
    rest of its bookkeeping.
    """

    def __init__(
        self, timeout_s: float, end: Callable[[Any], None] = methodcaller("time_out")
    ) -> None:
        self.timeout_s = timeout_s
        self._end = end
        # Dicts keep the order of insertion, and all wait equally long: the first one is due first.
        self._watched_since_s: dict[WaiterType, float] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[WaiterType]:
        return iter(self._watched_since_s)

    def watch(self, waiter: WaiterType) -> None:
        """Let the time of `waiter` begin, unless it has begun already."""
        if waiter not in self._watched_since_s:
            self._watched_since_s[waiter] = time.monotonic()
            if self._timer is None:
                self._start_timer(self.timeout_s)

    def forget(self, waiter: WaiterType) -> None:
        """What `waiter` waited for is here; idempotent."""
        self._watched_since_s.pop(waiter, None)

    def _start_timer(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_overdue)

    def _end_overdue(self) -> None:
        self._timer = None
        overdue_since_s = time.monotonic() - self.timeout_s + _EARLY_S
        overdue = []
        for waiter, since_s in self._watched_since_s.items():
            if since_s > overdue_since_s:
                self._start_timer(since_s - overdue_since_s + _EARLY_S)
                break
            overdue.append(waiter)
        for waiter in overdue:
            # Two loops: `end` may watch or forget waiters of this very queue.
            self.forget(waiter)
        for waiter in overdue:
            self._end(waiter)


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


def end_with_host(connection: socket.socket) -> None:
    """End the TCP `connection` when the other host is silent, or takes nothing that is sent, for a minute.

    By TCP keepalive (RFC 1122 4.2.3.6): the other host's kernel answers, however busy a process there is.
    """
    options = [(socket.IPPROTO_TCP, name, value) for name, value in TCP_OPTIONS.items()]
    for level, name, value in [(socket.SOL_SOCKET, "SO_KEEPALIVE", 1), *options]:
        # A system that lacks one or refuses it has times of its own; a request is not refused for that.
        with contextlib.suppress(AttributeError, OSError):
            connection.setsockopt(level, getattr(socket, name), value)
