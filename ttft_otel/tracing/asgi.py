# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware around a vLLM server: begins a request's trace at its arrival, and ends it.

hooks/api_server.py installs it as the outermost one; first_chunk.py observes the answer for it, and
recorder.py stores the marks of both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Final, TypeAlias

from ttft_otel.model import endpoints
from ttft_otel.model.names import keys
from ttft_otel.tracing import carrier, clock, handoff, kept_spans, meter, recorder, roles
from ttft_otel.tracing.first_chunk import FirstChunkSender, Message, Send
from ttft_otel.tracing.guard import Guard
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.settings import Settings

Receive: TypeAlias = Callable[[], Awaitable[Message]]
App: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
EngineQuery: TypeAlias = Callable[[Any, RequestTrace, str], Awaitable[str]]

MAX_ENGINE_QUERIES: Final = 256  # concurrent queries about aborted requests
ENGINE_QUERY_TIMEOUT_S: Final = 5.0
MAX_KEPT_SPAN_TASKS: Final = 1024  # concurrent queries that wait until kept data is freed
# Made once, as they hold nothing of a request.
_GUARD_BEGIN, _GUARD_END = Guard("asgi begin"), Guard("asgi end")


class TracingMiddleware:
    """Traces POST requests that reach the engine, and those that fail on the way to it.

    identify_server: called with the app at its start. query_engine: an engine core utility call.
    """

    def __init__(
        self,
        app: App,
        settings: Settings,
        identify_server: Callable[[Any], None],
        query_engine: EngineQuery,
    ) -> None:
        self.app = app
        self.settings = settings
        self.identify_server = identify_server
        self.query_engine = query_engine
        self.abort_tasks: set[asyncio.Task[None]] = set()
        self.kept_span_tasks: set[asyncio.Task[None]] = set()
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
        # Set it also when it is None: on a keep-alive connection a pipelined request can start in the
        # context of the one before it, and would add its marks to that one's trace.
        recorder.current_trace.set(trace)
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
                self._end_trace(scope, trace, error)

    def _publish_counts(self) -> None:
        """Write metrics that other processes show, now and every PUBLISH_PAUSE_S, on the event loop."""
        with Guard("asgi publish"):
            if meter.publish_counts():
                asyncio.get_running_loop().call_later(meter.PUBLISH_PAUSE_S, self._publish_counts)

    def _begin_trace(self, scope: MutableMapping[str, Any]) -> RequestTrace | None:
        trace = recorder.begin_trace(scope["headers"], self.settings)
        if trace is not None:
            trace.method = scope["method"]
            trace.path = scope["path"]
            trace.scheme = scope.get("scheme", "http")
            trace.server = tuple(scope.get("server") or trace.server)
        return trace

    def _end_trace(self, scope: MutableMapping[str, Any], trace: RequestTrace, error: str) -> None:
        trace.end = clock.now_us()
        trace.route = getattr(scope.get("route"), "path", "")
        recorder.forget_trace(trace)
        if not trace.engine_requests and trace.path not in endpoints.OPERATION_BY_PATH:
            return  # an endpoint that does not generate, such as /tokenize
        # Its engine core is alive, and may know how far the request got.
        is_ended_by_engine = trace.error == keys.ERROR_ENGINE
        # Starlette ends a stream whose client has left as if it were complete.
        is_stream = trace.streamed and trace.breakdown is not None
        if not error and is_stream and trace.is_unended and roles.identity.can_see_ends():
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
            for query in kept_spans.list_queries(trace):
                if len(self.kept_span_tasks) < MAX_KEPT_SPAN_TASKS:
                    self._start_task(
                        self._send_kept_span(scope["app"], trace, query), self.kept_span_tasks
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
            trace.engine_requests
            and (trace.status < 400 or is_ended_by_engine)
            and not any(engine.marks for engine in trace.engine_requests.values())
            and len(self.abort_tasks) < MAX_ENGINE_QUERIES
        ):
            self._start_task(self._send_aborted(scope["app"], trace), self.abort_tasks)
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

    async def _send_kept_span(self, app: Any, trace: RequestTrace, query: str) -> None:
        """Wait until the data kept for another instance is freed, then send a span of its own."""
        with Guard("asgi kept"):
            answer = await self.query_engine(app, trace, query)
            for pause_s in kept_spans.PENDING_PAUSES_S:
                if answer != carrier.PENDING_ANSWER:
                    break
                await asyncio.sleep(pause_s)
                answer = await self.query_engine(app, trace, query)
            if not kept_spans.send_kept_span(trace, query, answer, handoff.get_sender()):
                meter.count_dropped("kept")

    async def _send_aborted(self, app: Any, trace: RequestTrace) -> None:
        """Ask the engine core in which stage an aborted request was, then send its record."""
        marks = ""
        with Guard("asgi ask"):
            try:
                marks = await asyncio.wait_for(
                    self.query_engine(app, trace, carrier.ABORTED_QUERY), ENGINE_QUERY_TIMEOUT_S
                )
            except asyncio.TimeoutError:
                marks = ""
        with _GUARD_END:
            recorder.fail_trace(trace, trace.end, marks)
            recorder.send_known_halves(trace, handoff.get_sender(), server=True)
