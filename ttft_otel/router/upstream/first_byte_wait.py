# SPDX-License-Identifier: Apache-2.0
"""Waits for the first byte of an attempt's answer, which --first-byte-timeout may end.

A backend's answer begins with the first chunk of its body, because a server that hangs may have sent the
headers; of a call whose whole answer the next leg needs, all of it has to come in time. The pool's
deadline queue calls `Attempt.time_out`, which cancels the waiting task: a timer for each attempt would
cost some percent of the router's time per request.
"""

from __future__ import annotations

import asyncio

from ttft_otel.router.errors import FirstByteTimeout
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.upstream.instance_answer import InstanceAnswer

TIMED_OUT_MESSAGE = "it did not begin to answer in time"


class FirstByteWait:
    """Context manager that raises FirstByteTimeout once the time of `attempt` is over."""

    __slots__ = ("_attempt", "_task")

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def __enter__(self) -> None:
        # The time may have ended between two waits, when there was nobody to cancel.
        if self._attempt.is_overdue:
            raise FirstByteTimeout(TIMED_OUT_MESSAGE)
        self._task = asyncio.current_task()
        self._attempt.begin_wait(self._task)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._attempt.end_wait()
        # If the client left as well, its cancellation has to go on.
        if kind is asyncio.CancelledError and self._attempt.is_overdue and self._is_own_cancel():
            raise FirstByteTimeout(TIMED_OUT_MESSAGE) from error

    def _is_own_cancel(self) -> bool:
        """Take back the cancellation by `time_out`; False if the task was cancelled by others, too.

        Python 3.10 does not count cancellations.
        """
        # Since Python 3.11 a task counts its cancellations; uncancel() returns how many are left.
        uncancel = getattr(self._task, "uncancel", None)
        return uncancel is None or not uncancel()


async def read_first_chunk(response: InstanceAnswer, attempt: Attempt) -> bytes:
    """The first chunk of the body, b"" if it is empty. Raises FirstByteTimeout."""
    first_chunk = response.read_nowait()  # mostly it came with the headers
    # An answer that is here cannot be late, so the common case registers no wait.
    if not first_chunk and not response.at_eof():
        with FirstByteWait(attempt):
            first_chunk = await response.readany()
    attempt.record_first_byte()
    return first_chunk
