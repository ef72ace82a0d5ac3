# SPDX-License-Identifier: Apache-2.0
"""API server: receive, preprocess and its parts, leaving for the engine, first output back.

wrap.py hangs these in; asgi.py sees the HTTP side; marks go to the Trip that the request's context
carries (recorder.current), and by engine request id where that context does not reach.
"""

from __future__ import annotations

from typing import Any, Final

from ttft_otel import clock, names, recorder, settings
from ttft_otel.asgi import Middleware
from ttft_otel.hooks import fields, ledger, wrap
from ttft_otel.trip import Trip


def know(app: Any) -> None:
    """Learn who this server is from the app's state; says so in one log line."""
    config = fields.config(app.state)
    recorder.identity.role = fields.role(config) if config is not None else "mono"
    recorder.identity.model = fields.model(config)
    recorder.identity.connector = fields.connector(config)
    recorder.identity.sees = seeing
    ledger.announce(recorder.identity.role)


def seeing() -> bool:
    """Whether a request's first output will be noticed."""
    return wrap.active("frontend.outputs") and wrap.active("frontend.register")


async def ask(app: Any, trip: Trip, question: str) -> str:
    """The engine core's answer about a trip's requests over vLLM's utility channel."""
    client = getattr(app.state.engine_client, "engine_core", None)
    call = getattr(client, "call_utility_async", None)
    if call is None:
        return ""
    for engine_id in trip.engines:
        answer = await call(question, engine_id)
        if answer:
            return str(answer)
    return ""


def rendering(*args: Any, **kwargs: Any) -> None:
    """Before the renderer: the body is read, parsed and valid."""
    trip = recorder.current.get()
    if trip is not None and not trip.render:
        trip.render = clock.now()


def assigned(_: None, result: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """After assign_request_id(): preprocessing is over."""
    trip = recorder.current.get()
    if trip is not None and len(trip.assigned) < recorder.PARTS_LIMIT:
        trip.assigned[request.request_id] = clock.now()


def registering(processor: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before OutputProcessor.add_request(): put our key into vLLM's own trace headers."""
    trip = recorder.current.get()
    if trip is None or getattr(request, "sampling_params", None) is None:
        return
    request.trace_headers = {names.TRACEPARENT: trip.context.parent(), names.CARRIER: "1"}
    if trip.context.state:
        request.trace_headers[names.TRACESTATE] = trip.context.state
    trip.request_id = trip.request_id or str(getattr(request, "external_req_id", None) or "")[:256]
    recorder.register(trip, request.request_id)


def receiving(*args: Any, **kwargs: Any) -> int:
    """Before process_outputs()."""
    return clock.now()


def received(
    start: int | None, result: Any, processor: Any, engine_core_outputs: Any, *args: Any, **kw: Any
) -> None:
    """After it: tokens are detokenized and in the requests' queues."""
    now = clock.now()
    for output in engine_core_outputs:
        if output.request_id in recorder.awaiting:
            headers = output.trace_headers or {}
            recorder.arrived(output.request_id, headers.get(names.CARRIER, ""), start or now, now)


def starting(*args: Any, **kwargs: Any) -> int:
    """Before a part of preprocess, when this request is traced."""
    return clock.now() if recorder.current.get() is not None else 0


def _part(name: str) -> Any:
    def ended(start: int | None, *args: Any, **kwargs: Any) -> None:
        trip = recorder.current.get()
        if trip is not None and start and len(trip.parts) < recorder.PARTS_LIMIT:
            trip.parts.append((name, start, clock.now()))

    return ended


def processing(renderer: Any, prompt: Any, *args: Any, **kwargs: Any) -> int:
    """Before process_for_engine_async(): a part only where there is something multimodal."""
    if isinstance(prompt, dict) and "multi_modal_data" not in prompt:
        return 0
    return starting()


def build(stack: Any) -> Any:
    """Put our middleware outermost, around whatever stack the app has built."""
    return Middleware(stack, settings.current(), know, ask)


HOOKS: Final = {
    "frontend.app": wrap.Hook(replace=build),
    "frontend.render": wrap.Hook(before=rendering),
    "frontend.media": wrap.Hook(before=starting, after=_part("media")),
    "frontend.tokenize": wrap.Hook(before=starting, after=_part("tokenize")),
    "frontend.multimodal": wrap.Hook(before=processing, after=_part("multimodal")),
    "frontend.assign": wrap.Hook(after=assigned),
    "frontend.register": wrap.Hook(before=registering),
    "frontend.outputs": wrap.Hook(before=receiving, after=received, ready=recorder.awaiting),
}
