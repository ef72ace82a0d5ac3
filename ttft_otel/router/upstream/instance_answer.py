# SPDX-License-Identifier: Apache-2.0
"""One instance's answer to one request: instance_connection.py fills it, the legs of a request read it.

It is read by one task at a time, or pushed: then each part goes on as it comes, without waking anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from ttft_otel.router.errors import FirstByteTimeout
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import HeaderList

MAX_UNREAD_BYTES: Final = 131_072  # kept for a slow reader; beyond it the instance is not read


class AnswerSource(Protocol):
    """The connection that an answer comes from; instance_connection.py."""

    def pause_reading(self) -> None:
        """Read nothing until `resume_reading`."""

    def resume_reading(self) -> None:
        """Read on."""

    def close(self) -> None:
        """Close the connection: the rest of its answer is not wanted."""


class InstanceAnswer:
    """Head and body of an answer; bodies pass as they came, content encodings included.

    status: 0 until the head is here. raw_headers: lower-case names. is_complete: its end was received.
    """

    __slots__ = (
        "status",
        "raw_headers",
        "is_complete",
        "_source",
        "_error",
        "_parts",
        "_unread_bytes",
        "_is_paused",
        "_waiter",
        "_sink",
        "_timer",
    )

    def __init__(self, source: AnswerSource) -> None:
        self.status = 0
        self.raw_headers: HeaderList = []
        self.is_complete = False
        self._source = source
        self._error: BaseException | None = None
        self._parts: list[bytes] = []
        self._unread_bytes = 0
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # What the head says.

    def list_values(self, name: bytes) -> list[str]:
        """The values of each header `name` (lower case), in order."""
        # Escapes keep what is no UTF-8, as header values may be any bytes.
        return [
            value.decode("utf-8", "surrogateescape")
            for key, value in self.raw_headers
            if key == name
        ]

    @property
    def content_type(self) -> str:
        """The media type without parameters, in lower case; "" if there is none."""
        return ",".join(self.list_values(b"content-type")).partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int:
        # Only a hint, by which a long answer is refused early: the parser counts what comes.
        (text, *_) = [*self.list_values(b"content-length"), ""]
        return int(text) if text.isdecimal() else 0

    # Called by the connection.

    def begin(self, status: int, raw_headers: HeaderList) -> None:
        """The head is here."""
        self.status = status
        self.raw_headers = raw_headers

    def add_part(self, data: bytes, is_last: bool = False) -> None:
        """More of the body is here; `is_last`: and its end."""
        # The last part is for push_to(), which returns it, so that it leaves with the end.
        if self._sink is not None and not is_last:
            self._sink(data)
            return
        self._parts.append(data)
        self._unread_bytes += len(data)
        # TCP does the rest: the instance cannot send once the buffers between are full.
        if self._unread_bytes > MAX_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            self._source.pause_reading()

    def complete(self) -> None:
        """Nothing more will come, and nothing is missing."""
        self.is_complete = True
        # --total-timeout must not fail an answer that only waits to be read.
        self._stop_timer()
        self.wake_reader()

    def fail(self, error: BaseException, drops_head: bool = False) -> None:
        """Nothing more will come: readers get `error`, after what came before it.

        drops_head: also who waits for the head, although it was read.
        """
        # The first failure tells most: the loss of the connection follows from it.
        if not self.is_complete and self._error is None:
            self._error = error
            if drops_head:
                self.status = 0
            self._stop_timer()
            self.wake_reader()

    def limit_time(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self._time_out)

    def _time_out(self) -> None:
        self.fail(asyncio.TimeoutError())
        # A body that the instance does not read is still being sent: only closing ends that.
        self._source.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake_reader(self) -> None:
        """Something has come."""
        waiter, self._waiter = self._waiter, None
        # It may have been cancelled in this turn of the loop; setting its result would raise.
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def is_pushed(self) -> bool:
        """Whether parts go on as they come, so that only the end has to wake the reader."""
        return self._sink is not None

    # Called by the reader. They raise what the answer failed with: of UPSTREAM_ERRORS.

    async def wait_head(self) -> None:
        while not self.status:
            await self._wait()

    def at_eof(self) -> bool:
        return self.is_complete and not self._parts

    def read_nowait(self) -> bytes:
        """What has come of the body and was not read; b"" for nothing."""
        parts = self._parts
        if not parts:
            # After all parts that came before the failure, which are good.
            self._raise_failure()
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._unread_bytes = 0
        if self._is_paused:
            self._is_paused = False
            self._source.resume_reading()
        return data

    async def readany(self) -> bytes:
        """The next of the body, at least a byte; b"" at its end."""
        while not self._parts and not self.is_complete:
            await self._wait()
        return self.read_nowait()

    async def read(self) -> bytes:
        parts = []
        while part := await self.readany():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def push_to(self, sink: Callable[[bytes], None]) -> bytes:
        """Give `sink` each part as it comes, within the read that brings it.

        Returns what came with the end, so that it can leave with the end.
        """
        # What came before there was a sink goes first.
        unread = b"" if self.is_complete else self.read_nowait()
        if unread:
            sink(unread)
        self._sink = sink
        try:
            while not self.is_complete:
                await self._wait()
        finally:
            # Also after a failure: nothing may be written to the client behind its reader's back.
            self._sink = None
        return self.read_nowait()

    def pause_reading(self) -> None:
        """Read no more from the instance for now, because the client of a pushed answer is slow."""
        self._source.pause_reading()

    def resume_reading(self) -> None:
        self._source.resume_reading()

    def close(self) -> None:
        self._stop_timer()
        # The connection of a complete answer is back in the pool, and may carry another request.
        if not self.is_complete:
            self._source.close()

    async def _wait(self) -> None:
        self._raise_failure()
        # One reader at a time: a second one would replace this future, and the first wait for ever.
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error


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
