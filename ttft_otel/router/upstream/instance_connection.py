# SPDX-License-Identifier: Apache-2.0
"""A connection to an instance that carries one request at a time, and its answer, which legs read.

connection_pool.py keeps it in between. httptools parses what comes; aiohttp opened it, and its exceptions say
what went wrong, as for all other requests of the router. An answer is read by one task at a time, or pushed:
then each part goes on as it comes, without waking anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp
import httptools
import msgspec
from aiohttp.connector import Connection

from ttft_otel.router.time_limits import DeadlineQueue
from ttft_otel.router.types import HeaderList

MAX_UNREAD_BYTES: Final = 131_072  # kept for a slow reader; beyond it the instance is not read
MAX_ANSWER_HEADERS: Final = 128
# Heads before the answer's own, 100 Continue or 103 Early Hints, and the bytes of all their headers.
MAX_INTERIM_HEADS: Final = 16
MAX_INTERIM_BYTES: Final = 65_536
# Written in one turn of the event loop: all of 60 MB at once holds it for 100 ms while the instance reads.
PIECE_BYTES: Final = 1 << 20
# What TLS 1.3 looks like where a certificate of ours is missing: the handshake is over by then.
CLOSED_TLS: Final = "it closed the TLS connection: does it ask for a certificate (--upstream-cert)?"
_SWITCHING_PROTOCOLS: Final = 101
_BODILESS_STATUSES: Final = (204, 304)
_MAX_STATUS: Final = 599


class InstanceAnswer(msgspec.Struct, eq=False):
    """Head and body of an answer; bodies pass as they came, content encodings included.

    status: 0 until the head is here. raw_headers: lower-case names. is_complete: its end was received.
    """

    _source: InstanceConnection
    status: int = 0
    raw_headers: HeaderList = []
    is_complete: bool = False
    _error: BaseException | None = None
    _parts: list[bytes] = []
    _unread_bytes: int = 0
    _is_paused: bool = False
    _waiter: asyncio.Future[None] | None = None
    _sink: Callable[[bytes], None] | None = None
    _timer: asyncio.TimerHandle | None = None

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


class InstanceConnection(asyncio.Protocol):
    """Takes over the transport of `lease`, which stays acquired until the connection is closed.

    request: for errors. max_header_bytes: of one header. keep: called with the connection when its answer
    is complete and another request may use it. watched: has it while it is open.
    """

    def __init__(
        self,
        lease: Connection,
        request: aiohttp.ClientRequest,
        max_header_bytes: int,
        keep: Callable[[InstanceConnection], None],
        watched: DeadlineQueue[InstanceConnection],
    ) -> None:
        assert lease.protocol is not None and lease.transport is not None
        self._lease = lease
        self._request = request
        self._keep = keep
        # aiohttp's close waits until it knows that the connection is lost
        self._opener = lease.protocol
        self.transport: asyncio.Transport = lease.transport
        self._max_header_bytes = max_header_bytes
        self._answer: InstanceAnswer | None = None
        self._headers: HeaderList = []
        self._idle_bytes = 0  # received since the last header or part of a body
        self._interim_heads = 0  # of this answer
        self._interim_bytes = 0
        self._is_complete = self._keeps_alive = False
        self._is_sending = self._is_full = self._is_paused = False
        self._reads = self._reads_before = 0  # until now, and at the last check_progress()
        self._watched = watched
        watched.watch(self)
        self._sender: asyncio.Future[None] | None = None  # waits until more can be written
        # The parser finds its callbacks when it is made: a part of the body costs a call of C.
        self._body_parts: list[bytes] = []
        self.on_body = self._body_parts.append
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        # From here on aiohttp's protocol hears nothing of this connection.
        self.transport.set_protocol(self)

    @property
    def is_open(self) -> bool:
        return self._parser is not None and not self.transport.is_closing()

    def send_request(self, parts: Sequence[bytes]) -> InstanceAnswer:
        """Send head and body in `parts`; the answer is filled as it comes."""
        answer = self._answer = InstanceAnswer(self)
        self._headers = []
        self._is_complete = False
        self._idle_bytes = 0
        self._interim_heads = 0
        self._interim_bytes = 0
        # In one call, so that a head and a small body can leave in one segment.
        self.transport.writelines(parts)
        return answer

    async def send_large_body(self, answer: InstanceAnswer, parts: Sequence[bytes]) -> None:
        """Send `parts` behind the head that `send_request` sent, with turns for others in between.

        Ends early when the answer does: an instance may refuse a body before it has read all of it.
        """
        self._is_sending = True
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(part), PIECE_BYTES):
                self.transport.write(view[start : start + PIECE_BYTES])
                # A turn for other requests, for this one's answer and for pause_writing().
                await asyncio.sleep(0)
                if self._is_full and self._answer is answer:
                    self._sender = asyncio.get_running_loop().create_future()
                    await self._sender
                # The answer is complete or has failed: nobody wants the rest of the body.
                if self._answer is not answer:
                    return
        self._is_sending = False

    def pause_writing(self) -> None:
        """The instance does not read as fast as it is sent to."""
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake_sender()

    def _wake_sender(self) -> None:
        if self._sender is not None and not self._sender.done():
            self._sender.set_result(None)

    def pause_reading(self) -> None:
        self._is_paused = True
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def close(self) -> None:
        """Close it; an answer that is still awaited ends here."""
        # Without a failure: who closes has given the answer up, and nobody waits for it.
        self._answer = None
        self._wake_sender()
        self._parser = None  # which refers to this object
        self._watched.forget(self)
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # it may be that nobody reads the rest of the request
        else:
            self.transport.close()
        self._lease.close()

    def check_progress(self) -> None:
        """Fail an answer of which nothing came since the last call, though it has begun and its client reads.

        Called once in --idle-timeout while it is open, so that parts and answers cost no timer.
        """
        is_silent, self._reads_before = self._reads == self._reads_before, self._reads
        answer = self._answer
        if is_silent and not self._is_paused and answer is not None and answer.status:
            answer.fail(aiohttp.ClientPayloadError("nothing came of it for --idle-timeout"))
            self.close()
        elif self._parser is not None:
            self._watched.watch(self)

    # Events of the socket.

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        parser = self._parser
        if answer is None or parser is None:
            self.close()  # nobody asked
            return
        self._reads += 1
        self._idle_bytes += len(data)
        had_head = bool(answer.status)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            # What one of the callbacks below raised is the context of the parser's error.
            self._end_unreadable(answer, had_head, error.__context__ or error)
            return
        parts = self._body_parts
        if parts:
            self._idle_bytes = 0
            part = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            answer.add_part(part, self._is_complete)
        if self._is_complete:
            self._answer = None
            answer.complete()
            # The unsent rest of a refused body would be taken for the next request.
            if (
                self._keeps_alive
                and not self._is_sending
                and not self.transport.get_write_buffer_size()
            ):
                self._keep(self)
            else:
                self.close()
        # The parser holds an unfinished header: without a bound it could grow for ever.
        elif self._idle_bytes > self._max_header_bytes:
            self._end_unreadable(answer, bool(answer.status), ValueError("a header is too long"))
        elif not answer.is_pushed:
            answer.wake_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the answer, unless its end is the connection's."""
        answer, self._answer = self._answer, None
        self._wake_sender()
        self._parser = None
        self._watched.forget(self)
        self._opener.connection_lost(exc)
        self._lease.close()
        if answer is None:
            return
        # Before a head: on a connection that was used before, failures.py may take this for a race.
        if not answer.status:
            answer.fail(
                aiohttp.ClientOSError(*exc.args)
                if isinstance(exc, OSError)
                else aiohttp.ServerDisconnectedError(CLOSED_TLS if self._request.is_ssl() else None)
            )
        # A body without a length ends with the connection (HTTP/1.0), but never with a reset.
        elif exc is None and _ends_with_connection(answer):
            answer.complete()
        else:
            answer.fail(aiohttp.ClientPayloadError(f"The answer is not complete: {exc!r}"))

    def _end_unreadable(self, answer: InstanceAnswer, had_head: bool, cause: BaseException) -> None:
        """End the connection: what came is no answer, or more than one, as `cause` says.

        A head that came together with it is not trusted either: what is behind an answer shows that its
        length is wrong.
        """
        self.close()
        reason = str(cause)
        error: aiohttp.ClientError
        # A payload error counts against the instance, the other one does not (failures.py).
        if had_head or isinstance(cause, aiohttp.ClientPayloadError):
            error = aiohttp.ClientPayloadError(reason)
        else:
            error = aiohttp.ClientResponseError(
                self._request.request_info, (), status=400, message=reason
            )
        answer.fail(error, not had_head)

    # Events of the parser; exceptions end the parsing.

    def on_message_begin(self) -> None:
        # Nobody asked for it: the first one's length was wrong, or a second one was smuggled in.
        if self._is_complete:
            raise ValueError("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is complete, or a trailer, which is dropped."""
        self._idle_bytes = 0
        headers = self._headers
        if len(headers) >= MAX_ANSWER_HEADERS:
            raise ValueError("too many headers")
        if len(name) + len(value) > self._max_header_bytes:
            raise ValueError("a header is too long")
        headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete; that of an interim answer is dropped."""
        assert self._parser is not None and self._answer is not None
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        if 200 <= status <= _MAX_STATUS:
            if status in _BODILESS_STATUSES and any(
                name == b"content-length" and value.strip(b" 0") for name, value in headers
            ):
                raise aiohttp.ClientPayloadError(f"a length with status {status}")
            self._answer.begin(status, headers)
            self._keeps_alive = self._parser.should_keep_alive()
        else:
            self._take_interim_head(status, headers)

    def _take_interim_head(self, status: int, headers: HeaderList) -> None:
        """Count the head of an interim answer. Raises ClientPayloadError for too many, and for other heads.

        No client can provoke these, so that they count against the instance.
        """
        if not 100 <= status < 200 or status == _SWITCHING_PROTOCOLS:
            raise aiohttp.ClientPayloadError(f"status {status}")
        self._interim_heads += 1
        self._interim_bytes += sum(len(name) + len(value) for name, value in headers)
        if self._interim_heads > MAX_INTERIM_HEADS or self._interim_bytes > MAX_INTERIM_BYTES:
            raise aiohttp.ClientPayloadError("too many interim answers")

    def on_message_complete(self) -> None:
        self._is_complete = self._answer is not None and bool(self._answer.status)


def _ends_with_connection(answer: InstanceAnswer) -> bool:
    """Whether the head names no length, so that the body is all that came."""
    if answer.status in _BODILESS_STATUSES:
        return False
    encodings = ",".join(answer.list_values(b"transfer-encoding")).lower()
    if encodings:
        return encodings.rpartition(",")[2].strip() != "chunked"
    return not answer.list_values(b"content-length")
