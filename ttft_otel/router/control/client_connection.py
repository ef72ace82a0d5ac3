# SPDX-License-Identifier: Apache-2.0
"""A client's connection: the bounded one of http/, with the router's deadlines and refusals.

uvicorn's server makes one per connection (uvicorn_server.py); the application gets the requests. The data
path writes through the ClientOutput of proxy/client_stream.py, which it finds in the scope.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from operator import methodcaller
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from ttft_otel.http.bounded_connection import BODY, REQUEST, BoundedConnection
from ttft_otel.http.head_checks import CallerRules, HeadLimits, HeadRefused
from ttft_otel.router import lost_hosts
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy.client_stream import OUTPUT_EXTENSION, ClientOutput, render_error
from ttft_otel.router.time_limits import DeadlineQueue

IDLE_S: Final = 5.0  # seconds for which a connection stays open after an answer, as uvicorn's do
MAX_LINGER_S: Final = 30.0  # seconds for which bytes after a refusal are read and thrown away
# By status of a refused head: the reason that is counted.
_REASONS: Final = {
    400: "http",
    403: "origin",
    414: "target",
    421: "host",
    429: "pipelining",
    431: "headers",
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
            text = "The router has too many connections."
            self._refuse(RequestRejected(503, text, reason="connections"))
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
        # Parts are pushed as chunks, of which HTTP/1.0 knows nothing.
        output: Any = ClientOutput(self.transport, self.flow, self.scope["http_version"] == "1.1")
        self.cycle.transport = output
        # The cycle's task starts later, and finds it there; uvicorn knows its own extensions only.
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
        reason = _REASONS[error.status]
        # A 429 has Retry-After by default: what was pipelined would be refused a second later, too.
        self._refuse(RequestRejected(error.status, str(error), reason, retry_after_s=0))

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
