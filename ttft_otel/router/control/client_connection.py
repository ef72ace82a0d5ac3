# SPDX-License-Identifier: Apache-2.0
"""A client's connection: the bounded one of http/, with the router's deadlines and refusals.

uvicorn's server makes one per connection (uvicorn_server.py); the application gets the requests. The data
path pushes the rest of a stream through ClientOutput, which proxy/client_stream.py finds in the scope.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from operator import methodcaller
from typing import Any, Final, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from ttft_otel.http.bounded_connection import BODY, REQUEST, BoundedConnection
from ttft_otel.http.head_checks import CallerRules, HeadLimits, HeadRefused
from ttft_otel.router import lost_hosts
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy.client_stream import OUTPUT_EXTENSION
from ttft_otel.router.proxy.error_responses import render_error
from ttft_otel.router.time_limits import DeadlineQueue
from ttft_otel.router.upstream.instance_answer import InstanceAnswer

IDLE_S: Final = 5.0  # seconds for which a connection stays open after an answer, as uvicorn's do
MAX_LINGER_S: Final = 30.0  # seconds for which bytes after a refusal are read and thrown away
# By status of a refused head: the reason that is counted, and the type of error in the answer.
_REFUSALS: Final = {
    400: ("http", "BadRequestError"),
    403: ("origin", "PermissionDeniedError"),
    414: ("target", "BadRequestError"),
    421: ("host", "BadRequestError"),
    429: ("pipelining", "RateLimitError"),
    431: ("headers", "BadRequestError"),
}


class ClientConnections:
    """What all connections of clients share: limits, deadlines and counts of refusals.

    Args:
        limits: Of one connection.
        refusal_counts: Refusals by reason.
        max_connections: Beyond it connections are refused, and beyond some more closed without an answer.
        callers: Which Host and which web pages are answered.
    """

    def __init__(
        self,
        limits: RouterLimits,
        refusal_counts: Counter[str],
        max_connections: int,
        callers: CallerRules,
    ) -> None:
        self.callers = callers
        self.head_limits = HeadLimits(
            limits.max_target, limits.max_headers, limits.max_header_bytes
        )
        self.refusal_counts = refusal_counts
        self.max_connections = max_connections
        # Some sockets more, so that the first ones beyond the limit can be answered why.
        self.max_open_sockets = max_connections + max(1, max_connections // 8)
        self.awaited_heads: DeadlineQueue[ClientConnection] = DeadlineQueue(limits.head_timeout)
        # What waits to be read by a client would hold its request, and its instance's, without end.
        self.unread: DeadlineQueue[ClientConnection] = DeadlineQueue(
            limits.send_timeout, methodcaller("end_unread")
        )
        # Time for a client to read its refusal while it still sends a body.
        self.lingering: DeadlineQueue[ClientConnection] = DeadlineQueue(MAX_LINGER_S)
        self.idle_clients: DeadlineQueue[ClientConnection] = DeadlineQueue(
            IDLE_S,
            methodcaller("timeout_keep_alive_handler"),  # uvicorn's, of HttpToolsProtocol
        )

    def forget(self, connection: ClientConnection) -> None:
        for queue in (self.awaited_heads, self.lingering, self.idle_clients, self.unread):
            queue.forget(connection)


class ClientOutput(asyncio.Transport):
    """In place of the transport, of which a request's cycle calls `write`, `close` and `is_closing`.

    It refers neither to the cycle nor to the connection: each request would leave a reference cycle.
    """

    __slots__ = (
        "_transport",
        "_flow",
        "_reader",
        "_waits_with_head",
        "_head",
        "_is_lost",
        "_on_lost",
    )

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self._reader: InstanceAnswer | None = None
        self._waits_with_head = False
        self._head = b""
        self._is_lost = False
        self._on_lost: Callable[[], None] | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write `data`, or keep it as the head that waits."""
        if self._waits_with_head:
            # The head comes first; the next write is that of the first part.
            if not self._head:
                self._head = bytes(data)
                return
            # One write, so that a short answer leaves in one packet.
            data = self._head + data
            self._waits_with_head = False
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection, once what was written is out."""
        # The application ended between head and body: what there is has to leave.
        if self._waits_with_head:
            self._transport.write(self._head)
            self._waits_with_head = False
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def delay_head(self) -> None:
        """Keep what is written next until more is: the caller sends head and body without a pause."""
        self._waits_with_head = True

    def begin_watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` when the client leaves, or at once if it has left. The body has been read."""
        if self._is_lost:
            on_lost()
            return
        self._on_lost = on_lost
        # A large body has paused it, and who does not read hears of no end.
        self._flow.resume_reading()

    def end_watch(self) -> None:
        self._on_lost = None

    def report_lost(self) -> None:
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()

    def begin_push(self, reader: InstanceAnswer) -> None:
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
        self._reader = None

    def pause_reader(self) -> None:
        if self._reader is not None:
            self._reader.pause_reading()

    def resume_reader(self) -> None:
        if self._reader is not None:
            self._reader.resume_reading()


class ClientConnection(BoundedConnection):
    """A connection that is ended when its head, or what it waits for, does not come in time.

    current_cycle: the request that is being answered; later ones wait in `pipeline`.
    refusal: why this connection ends; what arrives after it is thrown away.
    """

    def __init__(self, *args: Any, shared: ClientConnections, **kwargs: Any) -> None:
        super().__init__(*args, head_limits=shared.head_limits, callers=shared.callers, **kwargs)
        self.shared = shared
        self.current_cycle: RequestResponseCycle | None = None
        self.refusal: RequestRejected | None = None
        self._unread_bytes = 0

    # Events of the socket.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request, or refuse the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.shared.max_open_sockets:
            self.shared.refusal_counts["connections"] += 1
            transport.abort()
        elif len(self.connections) > self.shared.max_connections:
            self._refuse(
                RequestRejected(
                    503,
                    "The router has too many connections.",
                    "UnavailableError",
                    retry_after_s=1,
                    reason="connections",
                )
            )
        else:
            lost_hosts.end_with_host(transport.get_extra_info("socket"))
            self.shared.awaited_heads.watch(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered; uvicorn tells the last one that was read."""
        self.shared.forget(self)
        self.pipeline.clear()
        cycle = self.current_cycle
        super().connection_lost(exc)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            cast(ClientOutput, cycle.transport).report_lost()

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        self._unset_keepalive_if_required()
        if self.parse_data(data) and self.current_cycle is None and self.phase != BODY:
            self.shared.awaited_heads.watch(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()
        if self.current_cycle is not None:
            cast(ClientOutput, self.current_cycle.transport).pause_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.shared.unread.forget(self)
        if self.current_cycle is not None:
            cast(ClientOutput, self.current_cycle.transport).resume_reader()

    def close_if_idle(self) -> None:
        """Close the connection unless a request is under way or has begun to arrive."""
        if self.current_cycle is None and self.phase == REQUEST and self.refusal is None:
            self.transport.close()

    def _watch_unread(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        if self._unread_bytes:
            self.shared.unread.watch(self)

    def end_unread(self) -> None:
        """Called when something has waited for the client: the connection ends if it read nothing."""
        if self.transport.get_write_buffer_size() == self._unread_bytes:
            self.shared.refusal_counts["send_timeout"] += 1
            self.transport.abort()
        else:
            self._watch_unread()

    def time_out(self) -> None:
        """Called when no head has come in time, or what follows a refusal has not ended."""
        if self.refusal is not None or self.phase == BODY:
            self.transport.abort()
        elif self.phase == REQUEST:
            self.transport.close()
        else:
            text = "The head of the request did not arrive in time."
            self._refuse(RequestRejected(408, text, reason="head_timeout"))

    # Events of the parser.

    def start_request(self) -> None:
        """The head is complete: the request starts, or waits for those before it."""
        super().start_request()
        # The cycle's task starts later, and finds it in its scope.
        output: Any = ClientOutput(self.transport, self.flow)
        self.cycle.transport = output
        # uvicorn knows its own extensions only. Parts are pushed as chunks, of which HTTP/1.0 knows nothing.
        if self.scope["http_version"] == "1.1":
            self.scope["extensions"] = {OUTPUT_EXTENSION: output}
        self.shared.awaited_heads.forget(self)
        if not self.pipeline:
            self.current_cycle = self.cycle

    def on_message_complete(self) -> None:
        was_in_body = self.phase == BODY
        super().on_message_complete()
        # It was answered before its body was here.
        if was_in_body and self.current_cycle is None:
            self.shared.lingering.forget(self)

    def on_response_complete(self) -> None:
        """A request is answered: the next one of the pipeline starts, or a refusal is sent."""
        if self.pipeline:
            self.current_cycle = self.pipeline[-1][0]
            super().on_response_complete()
            return
        # As uvicorn does it, but for a timer, of which one for each answer costs 2 us.
        self.current_cycle = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._watch_unread()
        self.shared.idle_clients.watch(self)
        if self.refusal is not None:
            self._send_refusal(self.refusal)
        elif self.phase == BODY:
            self.shared.lingering.watch(self)

    def _unset_keepalive_if_required(self) -> None:
        """A request begins, or none will."""
        self.shared.idle_clients.forget(self)

    # Refusals.

    def refuse(self, error: HeadRefused) -> None:
        reason, error_type = _REFUSALS[error.status]
        self._refuse(RequestRejected(error.status, str(error), error_type, reason=reason))

    def _refuse(self, error: RequestRejected) -> None:
        """End the connection with `error`, after the answers to requests before it."""
        cycle = self.cycle
        self.is_refused = True
        self.refusal = error
        self.shared.refusal_counts[error.reason] += 1
        self.shared.awaited_heads.forget(self)
        is_in_body = self.phase == BODY and cycle is not None
        if is_in_body and self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        elif is_in_body and (cycle.response_started or cycle.response_complete):
            # Its answer is out, or on its way: there is no second one.
            cycle.keep_alive = False
            if cycle.response_complete:
                self._begin_linger()
            return
        elif is_in_body:
            self.current_cycle = None
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False  # which uvicorn would write after the refusal
            cycle.message_event.set()
        if self.current_cycle is None:
            self._send_refusal(error)

    def _send_refusal(self, error: RequestRejected) -> None:
        if self.transport.is_closing():
            return
        headers, data = render_error(error)
        lines = [STATUS_LINE[error.status], b"connection: close\r\n"]
        lines += [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join([*lines, b"\r\n", data]))
        self._begin_linger()

    def _begin_linger(self) -> None:
        """Say that no more will come, and read on: closing at once would cost the client the answer."""
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.transport.write_eof()
        self.shared.lingering.watch(self)
