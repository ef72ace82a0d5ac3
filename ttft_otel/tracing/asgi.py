# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware around a vLLM server: begins a request's trace at its arrival, and ends it.

HOT. hooks/api_server.py installs it as the outermost one; FirstChunkSender observes the answer for it, and
recorder.py stores the marks of both. What an instance keeps for another one, KV blocks and encodings, ends
after the answer: that span has a record of its own.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final, TypeAlias

from ttft_otel.model import endpoints, stages
from ttft_otel.model.names import header_names, keys
from ttft_otel.tracing import clock, handoff, meter, recorder, roles
from ttft_otel.tracing.engine_queues import EngineCall
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.settings import Settings
from ttft_otel.tracing.trace_ending import EngineQuery, TraceEnding

Message: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Headers: TypeAlias = list[tuple[bytes, bytes]]
App: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# Made once, as they hold nothing of a request.
_GUARD_BEGIN, _GUARD_END = Guard("asgi begin"), Guard("asgi end")
_GUARD_SEND, _GUARD_HAND = Guard("asgi send"), Guard("asgi hand")
_GUARD_ASK = Guard("asgi ask")
MAX_HELD_BYTES: Final = 65536  # bytes of early events held back for a caller that asked
# In an answer of /v1/responses; quotes of texts are escaped.
_BACKGROUND: Final = b'"background":true'


class TracingMiddleware:
    """Traces POST requests that reach the engine, and those that fail on the way to it.

    identify_server: called with the app at its start. query_engine: an engine core utility call.
    read_parent: the trace context of another instrumentation's span around this call, as headers.
    list_engine_calls: called with the app; each engine core's utility call about what waits there.
    """

    def __init__(
        self,
        app: App,
        settings: Settings,
        identify_server: Callable[[Any], None],
        query_engine: EngineQuery,
        read_parent: Callable[[], Headers] | None = None,
        list_engine_calls: Callable[[Any], Sequence[EngineCall]] = lambda _: (),
    ) -> None:
        self.app = app
        self.read_parent = read_parent
        self.list_engine_calls = list_engine_calls
        self.settings = settings
        self.identify_server = identify_server
        self.ending = TraceEnding(query_engine)
        meter.register_collector(recorder.awaiting_traces, handoff.get_counts)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one ASGI scope: an HTTP request, or the lifespan."""
        trace = None
        if scope["type"] == "http" and scope["method"] == "POST":
            with _GUARD_BEGIN:
                trace = self._begin_trace(scope)
        elif scope["type"] == "lifespan":
            with Guard("asgi know"):
                self.identify_server(scope["app"])
            self._publish_counts()
        elif scope["type"] == "http" and scope.get("path", "").endswith(endpoints.METRICS_PATH):
            with _GUARD_ASK:
                calls = self.list_engine_calls(scope["app"])
                await meter.ask_engines(recorder.awaiting_traces, calls)
        # Set it also when it is None: on a keep-alive connection a pipelined request can start in the
        # context of the one before it, and would add its marks to that one's trace.
        recorder.current_trace.set(trace)
        recorder.is_http_request.set(scope["type"] == "http")
        if trace is None:
            await self.app(scope, receive, send)
            return
        error = keys.ERROR_ENGINE
        sender = FirstChunkSender(trace, send)
        try:
            await self.app(scope, receive, sender.send)
            error = ""
        except asyncio.CancelledError:
            error = keys.ERROR_CANCELLED
            raise
        except Exception as failure:
            if type(failure).__name__ == "ClientDisconnect":  # Starlette's, from ASGI 2.4 on
                error = keys.ERROR_CANCELLED
            raise
        finally:
            with _GUARD_END:
                sender.stop_observing()  # also of one without a chunk: it and its `send` know each other
                trace.route = getattr(scope.get("route"), "path", "")
                self.ending.end_trace(scope.get("app"), trace, error)

    def _publish_counts(self) -> None:
        """Write metrics that other processes show, now and every PUBLISH_PAUSE_S, on the event loop."""
        with Guard("asgi publish"):
            if meter.publish_counts():
                asyncio.get_running_loop().call_later(meter.PUBLISH_PAUSE_S, self._publish_counts)

    def _begin_trace(self, scope: MutableMapping[str, Any]) -> RequestTrace | None:
        headers = scope["headers"]
        if self.read_parent is not None and (parent := self.read_parent()):
            # Of two headers the last one counts.
            headers = [*headers, *parent]
        trace = recorder.begin_trace(headers, self.settings)
        if trace is not None:
            trace.method = scope["method"]
            trace.path = scope["path"]
            trace.scheme = scope.get("scheme", "http")
            trace.server = tuple(scope.get("server") or trace.server)
            if trace.path.endswith(endpoints.RENDER_SUFFIX):
                trace.role = stages.RENDER
        return trace


class FirstChunkSender:
    """`send` replaces ASGI's: it observes messages until the first chunk, and then is the server's own."""

    __slots__ = (
        "buffered_bytes",
        "buffered_messages",
        "first_chunk_sent",
        "send",
        "send_downstream",
        "trace",
    )

    def __init__(self, trace: RequestTrace, send_downstream: Send) -> None:
        self.trace = trace
        self.send_downstream = send_downstream
        self.buffered_messages: list[Message] = []
        self.buffered_bytes = 0
        self.first_chunk_sent = False
        # The application keeps this object, whose function is replaced when all has been observed.
        self.send = functools.partial(self._send_message)

    def stop_observing(self) -> None:
        """From now on `send` is the server's: in a long answer each token would pay for a call of ours."""
        # As copies and unpickled ones get theirs; C calls it without a frame of Python.
        self.send.__setstate__((self.send_downstream, (), {}, None))  # type: ignore[attr-defined]

    def _send_message(self, message: Message) -> Awaitable[None]:
        """Forward `message`, or hold it back until the Server-Timing header can be written."""
        # No coroutine of ours around the server's: the head would pay for one.
        if self.first_chunk_sent:
            return self.send_downstream(message)
        wait = False
        with _GUARD_SEND:
            wait = self._observe_message(message)
        if wait or self.buffered_messages or self.first_chunk_sent:
            return self._send_observed(message, wait)
        return self.send_downstream(message)

    async def _send_observed(self, message: Message, wait: bool) -> None:
        """Forward what was held back and `message`, or with `wait` hold it back, too."""
        if wait:
            self.buffered_messages.append(message)
            return
        if self.buffered_messages:
            # Replaced first: if sending one fails, a later call must not send them again.
            buffered = self.buffered_messages
            self.buffered_messages = []
            for early in buffered:
                await self.send_downstream(early)
        await self.send_downstream(message)
        # After the chunk was sent, so that encoding the record does not delay it.
        if self.first_chunk_sent and self.trace.streamed:
            with _GUARD_HAND:
                recorder.send_known_halves(self.trace, handoff.get_sender(), server=False)

    def _observe_message(self, message: Message) -> bool:
        """Note start and first chunk; True when the message has to be held back."""
        trace = self.trace
        if message["type"] == "http.response.start":
            trace.status = message["status"]
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            trace.streamed = trace.status < 400 and kind.startswith(b"text/event-stream")
            return trace.timing_requested and trace.status < 400
        if message["type"] != "http.response.body":
            return False
        body = message.get("body", b"")
        last = not message.get("more_body", False)
        # vLLM answers "null" to a plain request whose client has left.
        if trace.status < 400 and (last if trace.streamed else body not in (b"", b"null")):
            trace.is_answered = True
        if (
            trace.streamed
            and trace.first_output is None
            and not last
            and roles.identity.can_see_outputs()
        ):
            # Keep-alive comments and opening events come before the first token. Beyond MAX_HELD_BYTES
            # they are sent, without the header: the caller should not wait for an unbounded buffer.
            self.buffered_bytes += len(body)
            return bool(self.buffered_messages) and self.buffered_bytes <= MAX_HELD_BYTES
        if not body and not last:
            return bool(self.buffered_messages)
        if trace.streamed and body.startswith(b":") and not last:  # an SSE comment is not a token
            return bool(self.buffered_messages)
        self.first_chunk_sent = True
        trace.is_background = (
            trace.path == endpoints.RESPONSES_PATH and not trace.streamed and _BACKGROUND in body
        )
        if not trace.is_background:
            self._record_first_chunk()
        self.stop_observing()
        return False

    def _record_first_chunk(self) -> None:
        trace = self.trace
        now = clock.now_us()
        # `egress` ends at a stream's first chunk. Encoders and prefill instances answer in one piece,
        # which is their first result; other plain responses carry later tokens, so they end at `output`.
        egress = trace.streamed or roles.resolve_role(trace) in stages.INTERMEDIATE_ROLES
        unseen = egress and trace.status < 400 and not roles.identity.can_see_outputs()
        if (
            trace.is_answered
            and trace.engine_requests
            and trace.first_output is None
            and roles.identity.can_see_outputs()
        ):
            # The application has answered to the end, so the client was there: the engine ended it.
            trace.error = trace.error or keys.ERROR_ENGINE
        is_rendered = trace.role == stages.RENDER and trace.status < 400
        if trace.has_first_token or unseen or is_rendered:
            recorder.close_ttft(trace, now if egress else 0)
        elif not trace.error:
            return
        if (
            self.buffered_messages
        ):  # formatted for whoever waits for it alone: a tenth of our time here
            # Without a token the engine ended it: a router must not take this chunk for one.
            text = recorder.format_timing_header(trace, now) or header_names.TIMING_NO_TOKEN
            own_header = (header_names.SERVER_TIMING.encode(), text.encode())
            headers = [*self.buffered_messages[0].get("headers", ()), own_header]
            self.buffered_messages[0]["headers"] = headers
