# SPDX-License-Identifier: Apache-2.0
"""Where uvicorn writes the answer to one request; the data path pushes the rest of a stream through it.

client_connection.py makes one per request; proxy/client_stream.py finds it in the scope. What arrives
together leaves together: the head waits for the first part of the body, and a part of a stream is one write
within the read that brought it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

from ttft_otel.router.exchange import AnswerReader


class ClientOutput(asyncio.Transport):
    """In place of the transport, of which a request's cycle calls `write`, `close` and `is_closing`.

    It refers neither to the cycle nor to the connection: each request would leave a reference cycle.
    """

    __slots__ = ("_transport", "_flow", "_reader", "_holds_head", "_head", "_is_lost", "_on_lost")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport, self._flow = transport, flow
        self._reader: AnswerReader | None = None
        self._holds_head, self._head = False, b""
        self._is_lost = False
        self._on_lost: Callable[[], None] | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write `data`, or keep it as the head that waits."""
        if self._holds_head:
            # The head comes first; the next write is that of the first part.
            if not self._head:
                self._head = bytes(data)
                return
            # One write, so that a short answer leaves in one packet.
            data = self._head + data
            self._holds_head = False
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection, once what was written is out."""
        # The application ended between head and body: what there is has to leave.
        if self._holds_head:
            self._transport.write(self._head)
            self._holds_head = False
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection is being closed."""
        return self._transport.is_closing()

    def hold_head(self) -> None:
        """Keep what is written next until more is: the caller sends head and body without a pause."""
        self._holds_head = True

    def begin_watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` when the client leaves, or at once if it has left. The body has been read."""
        if self._is_lost:
            on_lost()
            return
        self._on_lost = on_lost
        # A large body has paused it, and who does not read hears of no end.
        self._flow.resume_reading()

    def end_watch(self) -> None:
        """The request is over: nobody has to know."""
        self._on_lost = None

    def report_lost(self) -> None:
        """The client has left."""
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()

    def begin_push(self, reader: AnswerReader) -> None:
        """From now on a slow client pauses `reader`."""
        self._reader = reader
        # A client that was slow before is not reported once more by pause_writing().
        if self._flow.write_paused:
            reader.pause_reading()

    def push_part(self, data: bytes) -> None:
        """Write a part of a body in chunks."""
        # The client has left, of which receive() tells the request's task.
        if not self._transport.is_closing():
            # A chunk of HTTP/1.1: its length in hexadecimal, then the data.
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_push(self) -> None:
        """The rest is sent as messages."""
        self._reader = None

    def pause_reader(self) -> None:
        """The client is slow."""
        if self._reader is not None:
            self._reader.pause_reading()

    def resume_reader(self) -> None:
        """The client has read."""
        if self._reader is not None:
            self._reader.resume_reading()
