# SPDX-License-Identifier: Apache-2.0
"""A client's connection: uvicorn's HTTP protocol, with the router's limits on what precedes a request.

uvicorn's server makes one per connection (uvicorn_server.py); the application gets the requests.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from ttft_otel.router import lost_hosts
from ttft_otel.router.control import front_door as refusals
from ttft_otel.router.control.client_output import ClientOutput
from ttft_otel.router.control.front_door import MAX_PIPELINED_REQUESTS, FrontDoor
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.proxy.client_stream import OUTPUT_EXTENSION
from ttft_otel.router.proxy.error_responses import render_error

MAX_SLICE_BYTES: Final = 16_384  # parsed before the limits are checked
# What the parser expects next. No Enum: several comparisons per request.
_REQUEST, _HEAD, _BODY = range(3)


class ClientConnection(HttpToolsProtocol):
    """uvicorn's protocol, which by itself bounds neither time nor size of a request's head.

    current_cycle: the request that is being answered; later ones wait in `pipeline`.
    refusal: why this connection ends; what arrives after it is thrown away.
    """

    def __init__(self, *args: Any, front_door: FrontDoor, **kwargs: Any) -> None:
        # The parser finds its callbacks when it is made. A body may come in chunks of one byte, and a call
        # of a method for each would hold up everybody.
        self._body_parts: list[bytes] = []
        self.on_body = self._body_parts.append  # type: ignore[assignment,method-assign]
        super().__init__(*args, **kwargs)
        self.front_door = front_door
        self.phase = _REQUEST
        self.current_cycle: RequestResponseCycle | None = None
        self.refusal: RequestRejected | None = None
        self._head_bytes = 0  # of the unfinished head

    # Events of the socket.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request, or refuse the connection if there are too many."""
        super().connection_made(transport)
        door = self.front_door
        if len(self.connections) > door.max_open_sockets:
            door.refusal_counts["connections"] += 1
            transport.abort()
        elif len(self.connections) > door.max_connections:
            self._refuse(refusals.build_connection_error())
        else:
            lost_hosts.end_with_host(transport.get_extra_info("socket"))
            door.awaited_heads.watch(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered; uvicorn tells the last one that was read."""
        self.front_door.forget(self)
        self.pipeline.clear()
        cycle = self.current_cycle
        super().connection_lost(exc)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            cast(ClientOutput, cycle.transport).report_lost()

    def data_received(self, data: bytes) -> None:
        """Parse `data`; requests start as their heads are complete."""
        if self.refusal is not None:
            return
        self._unset_keepalive_if_required()
        if len(data) <= MAX_SLICE_BYTES:
            has_failed = not self._parse_slice(data)
        else:
            view = memoryview(data)
            starts = range(0, len(data), MAX_SLICE_BYTES)
            has_failed = not all(
                self._parse_slice(view[at : at + MAX_SLICE_BYTES]) for at in starts
            )
        if has_failed:
            return
        if self._body_parts:
            self._take_body()
        if self.current_cycle is None and self.phase != _BODY:
            self.front_door.awaited_heads.watch(self)

    def _parse_slice(self, data: bytes | memoryview) -> bool:
        """Parse a part, so short that even one of nothing but headers takes a moment only.

        Returns False if the connection has to end.
        """
        was_in_body = self.phase == _BODY
        try:
            self.parser.feed_data(data)
            if self.phase == _HEAD:
                # A header is in `headers` when it is complete, but its bytes are held before.
                self._head_bytes += 0 if was_in_body else len(data)
                self.front_door.check_head(self.url, len(self.headers), self._head_bytes)
            elif self.phase == _BODY and self.headers:
                self._check_trailers()
        except httptools.HttpParserUpgrade as upgrade:
            return self._parse_without_upgrade(memoryview(data), upgrade)
        except RequestRejected as error:
            self._refuse(error)
            return False
        except httptools.HttpParserError as error:
            self._refuse(refusals.find_cause(error))
            return False
        return True

    def _take_body(self) -> None:
        """Give the application what has arrived of the body."""
        data = b"".join(self._body_parts)
        self._body_parts.clear()
        HttpToolsProtocol.on_body(self, data)

    def _check_trailers(self) -> None:
        """Raise RequestRejected for too many headers behind the body; they are dropped."""
        if len(self.headers) > self.front_door.limits.max_headers:
            raise refusals.build_header_error(self.front_door.limits)

    def pause_writing(self) -> None:
        """The client is slow."""
        super().pause_writing()
        if self.current_cycle is not None:
            cast(ClientOutput, self.current_cycle.transport).pause_reader()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if self.current_cycle is not None:
            cast(ClientOutput, self.current_cycle.transport).resume_reader()

    def close_if_idle(self) -> None:
        """Close the connection unless a request is under way or has begun to arrive."""
        if self.current_cycle is None and self.phase == _REQUEST and self.refusal is None:
            self.transport.close()

    def time_out(self) -> None:
        """Called when no head has come in time, or what follows a refusal has not ended."""
        if self.refusal is not None or self.phase == _BODY:
            self.transport.abort()
        elif self.phase == _REQUEST:
            self.transport.close()
        else:
            self._refuse(refusals.build_slow_head_error())

    # Events of the parser, in the order of a request; exceptions end the parsing.

    def on_message_begin(self) -> None:
        """A request line begins."""
        super().on_message_begin()
        self.phase = _HEAD
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """The head is complete: the request starts, or waits for those before it."""
        if self.parser.should_upgrade():
            return  # _parse_slice() parses it again
        self.front_door.check_head(self.url, len(self.headers), self._head_bytes)
        if self._head_bytes + MAX_SLICE_BYTES > self.front_door.limits.max_header_bytes:
            self.front_door.check_header_bytes(self.headers)
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            raise refusals.build_pipelining_error()
        super().on_headers_complete()
        # the cycle's task starts later, and finds it in its scope
        output: Any = ClientOutput(
            self.transport, self.flow
        )  # uvicorn knows its own extensions only
        self.cycle.transport, self.scope["extensions"] = output, {OUTPUT_EXTENSION: output}
        self.phase = _BODY
        self.headers = []  # the application has the other list: trailers do not get there
        self.front_door.awaited_heads.forget(self)
        if not self.pipeline:
            self.current_cycle = self.cycle

    def on_message_complete(self) -> None:
        """The body is complete."""
        if self.phase != _BODY:
            return  # of a request that wants an upgrade, and is parsed again
        if self.headers:
            self._check_trailers()
        if self._body_parts:
            self._take_body()
        super().on_message_complete()
        self.phase = _REQUEST
        if self.current_cycle is None:  # it was answered before its body was here
            self.front_door.lingering.forget(self)

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
        self.front_door.idle_clients.watch(self)
        if self.refusal is not None:
            self._send_refusal(self.refusal)
        elif self.phase == _BODY:
            self.front_door.lingering.watch(self)

    def _unset_keepalive_if_required(self) -> None:
        """A request begins, or none will."""
        self.front_door.idle_clients.forget(self)

    # Upgrades are ignored, as HTTP allows; httptools would take the body for another protocol.

    def _should_upgrade(self) -> bool:
        """Make uvicorn's methods skip a request that httptools took for an upgrade."""
        return True

    def _parse_without_upgrade(
        self, data: memoryview, upgrade: httptools.HttpParserUpgrade
    ) -> bool:
        """Parse the head again without its upgrade, and what follows it in `data`."""
        try:
            while True:
                if self.parser.get_method() == b"CONNECT":
                    raise RequestRejected(400, "The router is no tunnel.", reason="http")
                data = data[upgrade.args[0] :]
                head = self._render_head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                try:
                    self.parser.feed_data(head)
                    self.parser.feed_data(data)
                except httptools.HttpParserUpgrade as another:
                    upgrade = another
                else:
                    return True
        except RequestRejected as error:
            self._refuse(error)
        except httptools.HttpParserError as error:
            self._refuse(refusals.find_cause(error))
        return False

    def _render_head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in refusals.omit_upgrade(self.headers)]
        return b"\r\n".join([*lines, b"", b""])

    # Refusals.

    def _refuse(self, error: RequestRejected) -> None:
        """End the connection with `error`, after the answers to requests before it."""
        door, cycle = self.front_door, self.cycle
        # Without its frames, which hold this connection: a cycle would stay until a rare collection.
        self.refusal = error.with_traceback(None)
        error.__context__ = None
        door.refusal_counts[error.reason] += 1
        door.awaited_heads.forget(self)
        is_in_body = self.phase == _BODY and cycle is not None
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
        self.front_door.lingering.watch(self)
