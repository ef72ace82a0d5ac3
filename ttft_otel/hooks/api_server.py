# SPDX-License-Identifier: Apache-2.0
"""Hooks in the API server: receive, preprocess and its parts, handover to the engine, first output.

wrap.py installs them; asgi.py sees the HTTP side, DirectCallTracer what has none. Marks go to the
RequestTrace in the context variable recorder.current_trace; outputs are processed outside of it and found by
engine request id.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any, Final

from ttft_otel.hooks import target_check, vllm_fields
from ttft_otel.hooks.wrap import Patcher
from ttft_otel.model import endpoints
from ttft_otel.model.names import header_names, keys
from ttft_otel.tracing import (
    carrier,
    clock,
    context,
    guard,
    handoff,
    meter,
    recorder,
    request_trace,
    settings,
)
from ttft_otel.tracing.asgi import Headers, TraceEnding, TracingMiddleware
from ttft_otel.tracing.guard import Hook
from ttft_otel.tracing.meter import EngineCall
from ttft_otel.tracing.request_trace import EngineRequest, RequestTrace, identity

# Shared by all requests: vLLM only reads them.
_UNTRACED_HEADERS: Final = {header_names.CARRIER_KEY: carrier.UNTRACED}
# With both a request's first output is noticed.
_OUTPUT_TARGETS: Final = ("frontend.outputs", "frontend.register")
MAX_ARRIVAL_AGE_S: Final = 3600.0  # a caller's arrival time that is older is not believed
MAX_QUEUED_INPUTS: Final = 256  # of one session


def identify_server(patcher: Patcher, config: Any) -> None:
    """Fill roles.identity from vLLM's configuration, None where it is not known; logs the start line."""
    for name, value in vllm_fields.read_identity(config).items():
        setattr(identity, name, value)
    # The operator's word first: an instance without vLLM's connectors would read as `mono`.
    identity.role = settings.get_settings().role or identity.role
    identity.is_known = config is not None
    identity.can_see_outputs = lambda: all(map(patcher.is_active, _OUTPUT_TARGETS))
    handoff.engine_settings.update(vllm_fields.read_engine_settings(config))
    identity.can_see_ends = lambda: identity.can_see_outputs() and patcher.is_active("frontend.end")
    target_check.log_start_line(identity.role or "by request")


async def query_engine(owner: Any, trace: RequestTrace, query: str) -> str:
    """Call the utility method `query` of the engine core for each engine request of `trace`.

    owner: vLLM's app, or its AsyncLLM. Returns the first answer that is not empty; "" without one, or where
    there is no such channel.
    """
    engine = owner.state.engine_client if hasattr(owner, "state") else owner
    # AsyncLLM's client to the engine core; an engine in the same process has no such method.
    client = getattr(engine, "engine_core", None)
    call = getattr(client, "call_utility_async", None)
    if call is None:
        return ""
    for engine_id in trace.engine_requests:
        answer = await call(query, engine_id)
        if answer:
            return str(answer)
    return ""


def list_engine_calls(app: Any) -> list[EngineCall]:
    """The call of carrier.WAITING_QUERY for each engine core of vLLM's `app`; [] where none can be asked."""
    client = getattr(getattr(app.state, "engine_client", None), "engine_core", None)
    # The public method asks all of them, and tells what the first one says.
    call = getattr(client, "_call_utility_async", None)
    if call is None:
        return []
    return [
        partial(call, carrier.WAITING_QUERY, engine=engine)
        for engine in getattr(client, "core_engines", ())
    ]


async def show_waiting(request: Any) -> Any:
    """Answer GET endpoints.WAITING_PATH: a JSON object for each engine core that has answered."""
    from starlette.responses import JSONResponse

    await meter.latest.ask(list_engine_calls(request.app))
    return JSONResponse(meter.latest.describe())


def stamp_render(*args: Any, **kwargs: Any) -> None:
    """Before the renderer: the body is read, parsed and valid. The first call of a request counts."""
    trace = recorder.current_trace.get()
    # vLLM may render several prompts of one body; only the first has the body's reading before it.
    if trace is not None and not trace.render:
        trace.render = clock.now_us()


def stamp_assigned(_: None, result: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """After assign_request_id(): end of preprocess; also reads the role from transfer parameters."""
    trace = recorder.current_trace.get()
    # Several prompts in one body are several engine requests; bounded like parts.
    if trace is not None and len(trace.assign_times) < request_trace.MAX_PARTS:
        trace.assign_times[request.request_id] = clock.now_us()
        if not identity.role and not trace.request_role:
            trace.request_role = vllm_fields.get_request_role(request)


def register_request(
    direct: DirectCallTracer, processor: Any, request: Any, *args: Any, **kwargs: Any
) -> None:
    """Before OutputProcessor.add_request(): put our key into vLLM's own trace headers."""
    trace = recorder.current_trace.get()
    is_later = False
    if trace is not None and trace.session is not None:
        state = processor.request_states.get(request.request_id)
        is_later = state is not None
        trace = direct.begin_input(trace, state, request)
    if trace is None or trace.end or getattr(request, "sampling_params", None) is None:
        # Not traced, answered already, or a pooling request. Unmarked, the engine core would trace it.
        headers = request.trace_headers
        request.trace_headers = {**headers, **_UNTRACED_HEADERS} if headers else _UNTRACED_HEADERS
        return
    # Here, because AsyncLLM.add_request() drops headers without --otlp-traces-endpoint.
    request.trace_headers = {
        header_names.TRACEPARENT: trace.context.format_traceparent(),
        header_names.CARRIER_KEY: carrier.LATER_INPUT if is_later else carrier.ASKED,
    }
    if trace.context.tracestate:
        request.trace_headers[header_names.TRACESTATE] = trace.context.tracestate
    # Cut to 256 characters: the client chooses it, and it goes on spans.
    trace.request_id = (
        trace.request_id or str(getattr(request, "external_req_id", None) or "")[:256]
    )
    trace.is_beam_search = trace.is_beam_search or vllm_fields.is_beam(request)
    if trace.is_input and direct.queue_input(trace, request.request_id):
        return
    recorder.register_engine_request(trace, request.request_id)
    if trace.is_direct:
        direct.keep_call(trace, request.request_id)


def stamp_outputs_received(*args: Any, **kwargs: Any) -> int:
    """Before process_outputs(): the API server has received a batch of outputs."""
    return clock.now_us()


def record_outputs(
    direct: DirectCallTracer,
    start: int | None,
    result: Any,
    processor: Any,
    engine_core_outputs: Any,
    *args: Any,
    **kw: Any,
) -> None:
    """After process_outputs(): tokens are detokenized and in the requests' queues."""
    now = clock.now_us()  # the batch is processed in one go, so its requests share both times
    # Most batches are decode steps: one dictionary lookup for each output is all they pay.
    for output in engine_core_outputs:
        if output.request_id in recorder.awaiting_traces:
            if direct.is_of_earlier_input(output):
                continue
            marks = (output.trace_headers or {}).get(header_names.CARRIER_KEY, "")
            # Our own value came back: the engine core has no hooks, and measured nothing.
            if marks == carrier.ASKED:
                marks = ""
                recorder.note_unmeasured()
            if vllm_fields.lacks_first_token(output):
                recorder.fail_engine_request(output.request_id, marks)
            else:
                recorder.record_first_output(output.request_id, marks, start or now, now)
            if direct.calls:
                direct.note_output(output.request_id)


def record_end(
    direct: DirectCallTracer,
    _: None,
    result: Any,
    processor: Any,
    req_state: Any,
    finish_reason: Any,
    *args: Any,
    **kw: Any,
) -> None:
    """After _update_stats_from_finished(), which vLLM calls once for each request that has ended."""
    engine_id = req_state.request_id
    # Only for ours: counting tokens is not free for each of vLLM's detokenizers.
    if engine_id in recorder.unended_requests:
        tokens = vllm_fields.count_output_tokens(req_state)
        recorder.record_end(engine_id, str(finish_reason), tokens)
        if direct.calls:
            direct.note_end(engine_id)


class DirectCallTracer:
    """The requests of AsyncLLM or LLMEngine that no HTTP request of this process has made.

    Scripts make them, gRPC and WebSocket servers, Dynamo's workers and Ray Serve, answers in the background.
    Their trace begins with the call, or when its caller says that the request arrived, under the parent that
    the call's headers or the current OpenTelemetry span name; it ends with the first output. Of a stream of
    inputs, which is one session of the engine core, each has a trace, from when vLLM has taken it.
    """

    def __init__(self, patcher: Patcher) -> None:
        self.patcher = patcher
        #: Engine request ID -> its trace.
        self.calls: dict[str, RequestTrace] = {}
        #: The inputs behind that one of the same session, in their order.
        self.queued: dict[str, deque[RequestTrace]] = {}
        self.ending = TraceEnding(query_engine)
        self._is_identified = False

    def begin_call(
        self,
        engine: Any,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[RequestTrace | None] | None:
        """Before add_request(): begin a trace; returns the context's trace before, or None: nothing begun."""
        before = recorder.current_trace.get()
        if before is None:
            if recorder.is_http_request.get():
                return None  # which is not sampled
        elif not (before.is_direct or _is_in_background(before)):
            return None
        if not self._is_identified:
            self._is_identified = True
            self._identify(engine)
        parents = _list_parent_headers(trace_headers, before)
        if isinstance(prompt, AsyncGenerator):
            # vLLM reads it in a task of its own, which keeps this context.
            unsent = context.start_context("", "", settings.get_settings())
            trace = RequestTrace(clock.now_us(), unsent, False)
            trace.session = (parents, arrival_time is None)
        elif (begun := recorder.begin_trace(parents, settings.get_settings())) is not None:
            trace = begun
        else:
            return None
        trace.is_direct, trace.direct_engine = True, engine
        _set_arrival(trace, arrival_time)
        trace.streamed = getattr(getattr(params, "output_kind", None), "name", "") != "FINAL_ONLY"
        recorder.current_trace.set(trace)
        return (before,)

    def leave_call(
        self, before: tuple[RequestTrace | None], result: Any, *args: Any, **kwargs: Any
    ) -> None:
        """After add_request(): the next call in this context is another request."""
        recorder.current_trace.set(before[0])

    def keep_call(self, trace: RequestTrace, engine_id: str) -> None:
        """Note that the direct request `trace` sends the engine request `engine_id`."""
        if len(self.calls) < recorder.MAX_UNENDED_REQUESTS:
            self.calls[engine_id] = trace
        else:
            meter.count_dropped("direct")

    def begin_input(self, session: RequestTrace, state: Any, request: Any) -> RequestTrace | None:
        """The trace of an input of the stream `session`; None: not traced, or it only says that it has ended.

        state: vLLM's of the session; None where `request` is the first one's.
        """
        parts, session.parts = session.parts, []
        if session.session is None or not request.resumable:
            return None
        parents, begins_with_render = session.session
        trace = recorder.begin_trace(parents, settings.get_settings())
        if trace is None:
            return None
        trace.is_direct, trace.direct_engine = True, session.direct_engine
        trace.is_input, trace.streamed = True, True
        trace.request_role, trace.parts = session.request_role, parts
        trace.assign_times[request.request_id] = trace.arrive
        _set_arrival(trace, request.arrival_time if begins_with_render else None)
        if state is not None and state.input_chunk_queue is not None:
            trace.inputs_before = 1 + len(state.input_chunk_queue)
        return trace

    def queue_input(self, trace: RequestTrace, engine_id: str) -> bool:
        """Whether an earlier input of the session waits for its first output: then this one is behind it."""
        if engine_id not in recorder.awaiting_traces:
            self.queued.pop(engine_id, None)  # behind one that was given up
            return False
        queue = self.queued.setdefault(engine_id, deque())
        if len(queue) < MAX_QUEUED_INPUTS:
            trace.engine_requests[engine_id] = EngineRequest(trace.assign_times[engine_id])
            queue.append(trace)
        else:
            meter.count_dropped("direct")
        return True

    def is_of_earlier_input(self, output: Any) -> bool:
        """Whether an output is of an input before the one of the same session that waits; counts its end."""
        trace = recorder.awaiting_traces[output.request_id]
        is_earlier = trace.inputs_before > 0
        if trace.is_input and output.finish_reason is not None:
            for each in (trace, *self.queued.get(output.request_id, ())):
                each.inputs_before -= 1
        return is_earlier

    def note_output(self, engine_id: str) -> None:
        """After the first output of `engine_id` was recorded, or that there is none."""
        trace = self.calls.get(engine_id)
        if trace is None:
            return
        _run_later(self._send_first, trace)
        if queue := self.queued.get(engine_id):
            self.calls[engine_id] = recorder.awaiting_traces[engine_id] = queue.popleft()
            if not queue:
                del self.queued[engine_id]

    def _send_first(self, trace: RequestTrace) -> None:
        if trace.breakdown is None and trace.has_first_token:
            recorder.close_ttft(trace, 0)
            recorder.send_known_halves(trace, handoff.get_sender(), server=False)
        # The end of a request whose first output is its last is noticed before that output.
        self._end_if_ended(trace)

    def note_end(self, engine_id: str) -> None:
        """After vLLM has ended `engine_id`: the trace ends with the last of its engine requests."""
        trace = self.calls.get(engine_id)
        if trace is not None and not trace.is_unended:
            _run_later(self._end_if_ended, trace)

    def _end_if_ended(self, trace: RequestTrace) -> None:
        if not (trace.end or trace.is_unended) and (trace.breakdown is not None or trace.error):
            self._end(trace, "")

    def record_abort(self, _: None, aborted: Any, *args: Any, **kwargs: Any) -> None:
        """After OutputProcessor.abort_requests(), which returns the engine requests that it has aborted."""
        for engine_id in aborted or ():
            trace = self.calls.get(engine_id)
            if trace is not None:
                for each in (trace, *self.queued.pop(engine_id, ())):
                    self._end(each, keys.ERROR_CANCELLED)

    def _end(self, trace: RequestTrace, error: str) -> None:
        for engine_id in trace.engine_requests:
            if self.calls.get(engine_id) is trace:
                del self.calls[engine_id]
                self.queued.pop(engine_id, None)  # nobody answers what is behind it
        try:
            asyncio.get_running_loop()
        except (
            RuntimeError
        ):  # LLMEngine answers in its caller's thread: nothing can be asked meanwhile
            trace.direct_engine = None
        self.ending.end_trace(trace.direct_engine, trace, error)

    def _identify(self, engine: Any) -> None:
        if not identity.is_known:  # where vLLM's own server runs, its start has done this
            identify_server(self.patcher, getattr(engine, "vllm_config", None))
            meter.register_collector(recorder.awaiting_traces, handoff.get_counts)


def _run_later(action: Callable[[RequestTrace], None], trace: RequestTrace) -> None:
    """Call `action` once whoever waits for an output has got it; at once where no event loop runs."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        action(trace)
        return
    # Outputs are in their queues already: their readers' turn is before ours.
    loop.call_soon(guard.silence_errors("frontend.direct", action), trace)


def _is_in_background(trace: RequestTrace) -> bool:
    """Whether vLLM's task for a `background` response calls, in the context of the HTTP request `trace`."""
    if trace.path != endpoints.RESPONSES_PATH:
        return False
    task = asyncio.current_task()
    coroutine = task.get_coro() if task is not None else None
    return getattr(coroutine, "__name__", "") == "_run_background_request"


def _set_arrival(trace: RequestTrace, arrival_time: float | None) -> None:
    """Begin a direct trace earlier, if its caller's wall clock says so."""
    trace.arrive -= measure_age(arrival_time)
    trace.render = trace.arrive  # no body is received


def measure_age(arrival_time: float | None) -> int:
    """Microseconds since a time of the wall clock; 0 where that is None, in the future, or too long ago."""
    age_s = time.time() - (arrival_time or 0.0)
    return round(age_s * 1e6) if 0 < age_s < MAX_ARRIVAL_AGE_S else 0


def _list_parent_headers(
    headers: Mapping[str, str] | None, before: RequestTrace | None
) -> list[tuple[bytes, bytes]]:
    """The trace context above a direct call, as ASGI has headers.

    headers: what the caller gives to vLLM. before: the HTTP request whose answer goes on in the background.
    """
    found = {name.lower(): str(value) for name, value in (headers or {}).items()}
    if before is not None and not before.is_direct:
        found = {
            header_names.TRACEPARENT: before.context.format_traceparent(),
            header_names.TRACESTATE: before.context.tracestate,
        }
    elif header_names.TRACEPARENT not in found:
        # Whoever has a current span has imported it.
        api = sys.modules.get("opentelemetry.trace")
        span = api.get_current_span().get_span_context() if api is not None else None
        if span is not None and span.is_valid:
            found[header_names.TRACEPARENT] = (
                f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
            )
            found[header_names.TRACESTATE] = span.trace_state.to_header()
    return [
        (name.encode(), found[name].encode("latin-1", "replace"))
        for name in (header_names.TRACEPARENT, header_names.TRACESTATE)
        if found.get(name)
    ]


def stamp_part_start(*args: Any, **kwargs: Any) -> int:
    """Before a part of preprocess: the time, 0 when the request is not traced."""
    return clock.now_us() if recorder.current_trace.get() is not None else 0


def _make_part_hook(name: str) -> Any:
    def record_part(start: int | None, *args: Any, **kwargs: Any) -> None:
        trace = recorder.current_trace.get()
        if trace is not None and start and len(trace.parts) < request_trace.MAX_PARTS:
            trace.parts.append((name, start, clock.now_us()))

    return record_part


def stamp_multimodal_start(renderer: Any, prompt: Any, *args: Any, **kwargs: Any) -> int:
    """Before process_for_engine_async(): a part only when `prompt` has multimodal data."""
    if isinstance(prompt, dict) and "multi_modal_data" not in prompt:
        return 0
    return stamp_part_start()


def build_middleware(patcher: Patcher, _: None, stack: Any, app: Any) -> Any:
    """Put our middleware around `stack`, the complete middleware stack of `app`."""

    # vLLM's facts come as functions, because asgi.py must not know vLLM.
    def wrap_app(inner: Any, read_parent: Callable[[], Headers] | None = None) -> TracingMiddleware:
        return TracingMiddleware(
            inner,
            settings.get_settings(),
            lambda app: identify_server(patcher, vllm_fields.get_vllm_config(app.state)),
            query_engine,
            read_parent,
            list_engine_calls,
        )

    with guard.Guard("frontend.waiting"):
        app.router.add_route(endpoints.WAITING_PATH, show_waiting, include_in_schema=False)

    if "build_middleware_stack" not in vars(app):
        return wrap_app(stack)
    # Somebody has replaced the method of this app alone, as OpenTelemetry's FastAPI instrumentation does,
    # which takes Starlette's own stack apart: ours goes below its outermost part, and below the user's span.
    stack.app = wrap_app(stack.app, partial(_list_parent_headers, None, None))
    return stack


def build_hooks(patcher: Patcher, direct: DirectCallTracer) -> dict[str, Hook]:
    """Hooks of the API server; `patcher` knows which of them are installed."""
    return {
        "frontend.app": Hook(after=partial(build_middleware, patcher), wrap=guard.wrap_result),
        "frontend.render": Hook(before=stamp_render),
        "frontend.media": Hook(before=stamp_part_start, after=_make_part_hook("media")),
        "frontend.tokenize": Hook(before=stamp_part_start, after=_make_part_hook("tokenize")),
        "frontend.multimodal": Hook(
            before=stamp_multimodal_start, after=_make_part_hook("multimodal")
        ),
        "frontend.direct": Hook(before=direct.begin_call, after=direct.leave_call),
        "frontend.assign": Hook(after=stamp_assigned),
        "frontend.register": Hook(before=partial(register_request, direct)),
        "frontend.outputs": Hook(
            before=stamp_outputs_received,
            after=partial(record_outputs, direct),
            ready=recorder.awaiting_traces,
        ),
        "frontend.end": Hook(after=partial(record_end, direct), ready=recorder.unended_requests),
        "frontend.abort": Hook(after=direct.record_abort, ready=direct.calls),
    }
