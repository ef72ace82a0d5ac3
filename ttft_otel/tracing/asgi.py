# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware around a vLLM server: begins a request's trace at its arrival, and ends it.

HOT. hooks/api_server.py installs it as the outermost one, and ends traces of requests that came without
HTTP as it does. FirstChunkSender observes the answer, recorder.py stores the marks of both. A trace ends
with its breakdown where the first token came, with what the engine core knows where not. What an instance
keeps for another one, KV blocks and encodings, ends after the answer: that span has a record of its own.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any, Final, TypeAlias

from ttft_otel.model import endpoints, stages
from ttft_otel.model.names import header_names, keys, span_names
from ttft_otel.model.record import Attributes, Piece
from ttft_otel.tracing import carrier, clock, handoff, meter, recorder
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.request_trace import RequestTrace, identity, resolve_role
from ttft_otel.tracing.settings import Settings

EngineQuery: TypeAlias = Callable[[Any, RequestTrace, str], Awaitable[str]]
Message: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Headers: TypeAlias = list[tuple[bytes, bytes]]
App: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_ENGINE_QUERIES: Final = 256  # concurrent queries about aborted requests
ENGINE_QUERY_TIMEOUT_S: Final = 5.0
MAX_KEPT_SPAN_TASKS: Final = 1024  # concurrent queries that wait until kept data is freed
# Made once, as they hold nothing of a request.
_GUARD_BEGIN, _GUARD_END = Guard("asgi begin"), Guard("asgi end")
_GUARD_SEND, _GUARD_HAND = Guard("asgi send"), Guard("asgi hand")
_GUARD_ASK = Guard("asgi ask")
MAX_HELD_BYTES: Final = 65536  # bytes of early events held back for a caller that asked
# In an answer of /v1/responses; quotes of texts are escaped.
_BACKGROUND: Final = b'"background":true'

# Seconds before each further query about an encoder that still runs.
PENDING_PAUSES_S: Final = (0.05, 0.2, 1.0, 5.0)


class TraceEnding:
    """Ends traces; keeps the tasks that ask the engine core about some of them.

    query_engine: called with what end_trace() got as `engine`, the trace and the query.
    """

    def __init__(self, query_engine: EngineQuery) -> None:
        self.query_engine = query_engine
        self.abort_tasks: set[asyncio.Task[None]] = set()
        self.kept_span_tasks: set[asyncio.Task[None]] = set()

    def end_trace(self, engine: Any, trace: RequestTrace, error: str) -> None:
        """Send what is left of `trace`, whose request has ended now.

        engine: handed on to query_engine, None where nobody can be asked. error: why it ended early, "" where
        it did not.
        """
        trace.end = clock.now_us()
        recorder.forget_trace(trace)
        is_used = trace.engine_requests or trace.role == stages.RENDER
        if not is_used and trace.path not in endpoints.OPERATION_BY_PATH:
            return  # an endpoint that does not generate, such as /tokenize
        # Its engine core is alive, and may know how far the request got.
        is_ended_by_engine = trace.error == keys.ERROR_ENGINE
        # Starlette ends a stream whose client has left as if it were complete.
        is_stream = trace.streamed and trace.breakdown is not None
        if not error and is_stream and trace.is_unended and identity.can_see_ends():
            error = keys.ERROR_INCOMPLETE
        # One that ends after all was generated has lost nothing.
        if trace.status >= 500 or (error and (trace.breakdown is None or trace.is_unended)):
            trace.error = str(trace.status) if trace.status >= 400 else error
        if trace.is_background and not error:  # it has no TTFT
            recorder.send_known_halves(trace, handoff.get_sender(), server=True)
            return
        # A first token was computed, but no chunk was sent: the TTFT ends with `output`.
        if trace.breakdown is None and trace.has_first_token:
            recorder.close_ttft(trace, 0)
        if trace.breakdown is not None:
            recorder.send_known_halves(trace, handoff.get_sender(), server=True)
            for query in list_queries(trace) if engine is not None else ():
                if len(self.kept_span_tasks) < MAX_KEPT_SPAN_TASKS:
                    self._start_task(
                        self._send_kept_span(engine, trace, query), self.kept_span_tasks
                    )
                else:
                    meter.count_dropped("kept")
            return
        trace.error = (
            str(trace.status)
            if trace.status >= 400
            else error or trace.error or keys.ERROR_CANCELLED
        )
        # The request reached the engine and was aborted there: only the engine core knows how far it
        # got. Beyond the bound the record is sent without that.
        if (
            engine is not None
            and trace.engine_requests
            and (trace.status < 400 or is_ended_by_engine)
            and not any(each.marks for each in trace.engine_requests.values())
            and len(self.abort_tasks) < MAX_ENGINE_QUERIES
        ):
            self._start_task(self._send_aborted(engine, trace), self.abort_tasks)
            return
        recorder.fail_trace(trace, trace.end)
        recorder.send_known_halves(trace, handoff.get_sender(), server=True)

    def _start_task(
        self, coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]
    ) -> None:
        task = asyncio.ensure_future(coroutine)
        # The set keeps a reference, because the event loop holds tasks only weakly; its size is the
        # bound.
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _send_kept_span(self, engine: Any, trace: RequestTrace, query: str) -> None:
        """Wait until the data kept for another instance is freed, then send a span of its own."""
        with Guard("asgi kept"):
            answer = await self.query_engine(engine, trace, query)
            for pause_s in PENDING_PAUSES_S:
                if answer != carrier.PENDING_ANSWER:
                    break
                await asyncio.sleep(pause_s)
                answer = await self.query_engine(engine, trace, query)
            if not send_kept_span(trace, query, answer, handoff.get_sender()):
                meter.count_dropped("kept")

    async def _send_aborted(self, engine: Any, trace: RequestTrace) -> None:
        """Ask the engine core in which stage an aborted request was, then send its record."""
        marks = ""
        with Guard("asgi ask"):
            try:
                marks = await asyncio.wait_for(
                    self.query_engine(engine, trace, carrier.ABORTED_QUERY), ENGINE_QUERY_TIMEOUT_S
                )
            except asyncio.TimeoutError:
                marks = ""
        with _GUARD_END:
            recorder.fail_trace(trace, trace.end, marks)
            recorder.send_known_halves(trace, handoff.get_sender(), server=True)


def list_queries(trace: RequestTrace) -> list[str]:
    """The utility calls to make after the response of `trace`: one for each kind of data it keeps.

    Encodings are fetched only after an encoder's answer; a router's leg header may say that this
    request was not an encoder's.
    """
    kept_bits = trace.timeline.read_details().kept if trace.timeline is not None else 0
    # Metrics count nothing of what comes after the answer.
    if not kept_bits or not trace.context.sampled:
        return []
    if trace.leg not in ("", "encode"):  # "": without our router it may be an encoder's request
        kept_bits &= ~carrier.KEPT_ITEMS_BIT
    return [query for query, (bit, *_) in KEPT_QUERIES.items() if kept_bits & bit]


def send_kept_span(
    trace: RequestTrace, query: str, answer: str, sender: handoff.RecordSender
) -> bool:
    """Send the span described by the engine core's `answer`; False when it describes none.

    query: the utility call that was answered, one of KEPT_QUERIES.
    """
    _, kind, name, list_attributes = KEPT_QUERIES[query]
    kept = carrier.decode_answer(kind, answer)
    if kept is None:
        return False
    piece = _make_piece(trace, name, kept.since, kept.until, list_attributes(kept))
    if piece is not None:
        recorder.send_record(trace, sender, late=(piece,))
    return piece is not None


def _list_block_attributes(kept: carrier.KeptBlocks) -> Attributes:
    attributes: Attributes = {keys.KV_TOKENS: kept.tokens, keys.KV_BLOCKS: kept.blocks}
    if identity.kv_connector:
        attributes[keys.KV_CONNECTOR] = identity.kv_connector
    if kept.expired:
        attributes[keys.ERROR_TYPE] = "expired"
    return attributes


def _list_item_attributes(kept: carrier.KeptItems) -> Attributes:
    attributes: Attributes = {keys.EC_ITEMS: kept.items, keys.EC_BYTES: kept.bytes}
    if identity.ec_connector:
        attributes[keys.EC_CONNECTOR] = identity.ec_connector
    if kept.ready_at:
        attributes[keys.EC_READY_US] = max(0, kept.ready_at - kept.since)
    # An error: the encodings were made and nobody fetched them.
    if kept.end_reason:
        attributes[keys.ERROR_TYPE] = kept.end_reason
    return attributes


def _make_piece(
    trace: RequestTrace, name: str, since: int, until: int, attributes: Attributes
) -> Piece | None:
    """The piece of a time in the engine core; None when it cannot be placed on our clock."""
    # Both marks are the engine core's; the offset was found with the request's own marks.
    start = since - trace.clock_offset - trace.arrive
    end = until - trace.clock_offset - trace.arrive
    known_end = clock.now_us() - trace.arrive  # the engine core has reported it, so it is over
    # Outside of what can be, beyond the clock's error: a wrong span is worse than none.
    if not -trace.clock_error <= start <= end <= known_end + trace.clock_error:
        return None
    return Piece("late", name, max(0, start), min(end, known_end), attributes)


# By the utility call, one for each kind, as each is answered when its own data are gone: the bit of
# EngineDetails.kept, the type of the answer, the name of the span, and what makes its attributes.
KEPT_QUERIES: Final[dict[str, tuple[int, Any, str, Callable[[Any], Attributes]]]] = {
    carrier.KEPT_BLOCKS_QUERY: (
        carrier.KEPT_BLOCKS_BIT,
        carrier.KeptBlocks,
        span_names.KV_KEPT,
        _list_block_attributes,
    ),
    carrier.KEPT_ITEMS_QUERY: (
        carrier.KEPT_ITEMS_BIT,
        carrier.KeptItems,
        span_names.EC_KEPT,
        _list_item_attributes,
    ),
    carrier.ENCODER_QUERY: (
        carrier.ENCODER_RUN_BIT,
        carrier.EncoderRun,
        span_names.ENCODER_RUN,
        lambda run: {},
    ),
}


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
        list_engine_calls: Callable[[Any], Sequence[meter.EngineCall]] = lambda _: (),
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
            and identity.can_see_outputs()
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
        egress = trace.streamed or resolve_role(trace) in stages.INTERMEDIATE_ROLES
        unseen = egress and trace.status < 400 and not identity.can_see_outputs()
        if (
            trace.is_answered
            and trace.engine_requests
            and trace.first_output is None
            and identity.can_see_outputs()
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
