# SPDX-License-Identifier: Apache-2.0
"""Hooks in the API server: receive, preprocess and its parts, handover to the engine, first output.

wrap.py installs them; asgi.py sees the HTTP side. Marks go to the RequestTrace in the context
variable recorder.current_trace; outputs are processed outside of it and found by engine request id.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from ttft_otel.hooks import target_check, vllm_fields
from ttft_otel.hooks.wrap import Hook, Patcher
from ttft_otel.model.names import header_names
from ttft_otel.tracing import clock, handoff, record_parts, recorder, settings
from ttft_otel.tracing.asgi import TracingMiddleware
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.roles import identity

UNMEASURED: Final = "1"  # our key's value on its way to the engine core, which replaces it


def identify_server(patcher: Patcher, app: Any) -> None:
    """Fill roles.identity from vLLM's configuration in the state of `app`; logs the start line."""
    config = vllm_fields.get_vllm_config(app.state)
    role_setting = settings.get_settings().role
    # The operator's word first: an instance without vLLM's connectors would read as `mono`.
    identity.role = role_setting or (
        vllm_fields.get_instance_role(config) if config is not None else "mono"
    )
    identity.default_role = vllm_fields.get_default_role(config)
    identity.model = vllm_fields.get_model_name(config)
    identity.kv_connector = vllm_fields.get_kv_connector_name(config)
    identity.ec_connector = vllm_fields.get_ec_connector_name(config)
    identity.takes_encodings = vllm_fields.is_ec_consumer(config)
    identity.can_see_outputs = partial(can_see_outputs, patcher)
    handoff.engine_settings.update(vllm_fields.read_engine_settings(config))
    identity.can_see_ends = partial(can_see_ends, patcher)
    target_check.log_start_line(identity.role or "by request")


def can_see_outputs(patcher: Patcher) -> bool:
    """Whether the hooks that notice a request's first output are active."""
    return patcher.is_active("frontend.outputs") and patcher.is_active("frontend.register")


def can_see_ends(patcher: Patcher) -> bool:
    """Whether the hook that notices the end of a generation is active, beside those of the first output."""
    return can_see_outputs(patcher) and patcher.is_active("frontend.end")


async def query_engine(app: Any, trace: RequestTrace, query: str) -> str:
    """Call the utility method `query` of the engine core for each engine request of `trace`.

    Returns the first answer that is not empty; "" without one, or where there is no such channel.
    """
    # AsyncLLM's client to the engine core; an engine in the same process has no such method.
    client = getattr(app.state.engine_client, "engine_core", None)
    call = getattr(client, "call_utility_async", None)
    if call is None:
        return ""
    for engine_id in trace.engine_requests:
        answer = await call(query, engine_id)
        if answer:
            return str(answer)
    return ""


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
    if trace is not None and len(trace.assign_times) < record_parts.MAX_PARTS:
        trace.assign_times[request.request_id] = clock.now_us()
        if not identity.role and not trace.request_role:
            trace.request_role = vllm_fields.get_request_role(request)


def register_request(processor: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before OutputProcessor.add_request(): put our key into vLLM's own trace headers."""
    trace = recorder.current_trace.get()
    if trace is None or trace.end or getattr(request, "sampling_params", None) is None:
        # Not traced, answered already (a `background` response goes on in a task with the context of
        # its HTTP request), or a pooling request.
        return
    # Here, because AsyncLLM.add_request() drops headers without --otlp-traces-endpoint.
    request.trace_headers = {
        header_names.TRACEPARENT: trace.context.format_traceparent(),
        header_names.CARRIER_KEY: UNMEASURED,
    }
    if trace.context.tracestate:
        request.trace_headers[header_names.TRACESTATE] = trace.context.tracestate
    # Cut to 256 characters: the client chooses it, and it goes on spans.
    trace.request_id = (
        trace.request_id or str(getattr(request, "external_req_id", None) or "")[:256]
    )
    trace.is_beam_search = trace.is_beam_search or vllm_fields.is_beam(request)
    recorder.register_engine_request(trace, request.request_id)


def stamp_outputs_received(*args: Any, **kwargs: Any) -> int:
    """Before process_outputs(): the API server has received a batch of outputs."""
    return clock.now_us()


def record_outputs(
    start: int | None, result: Any, processor: Any, engine_core_outputs: Any, *args: Any, **kw: Any
) -> None:
    """After process_outputs(): tokens are detokenized and in the requests' queues."""
    now = clock.now_us()  # the batch is processed in one go, so its requests share both times
    # Most batches are decode steps: one dictionary lookup for each output is all they pay.
    for output in engine_core_outputs:
        if output.request_id in recorder.awaiting_traces:
            marks = (output.trace_headers or {}).get(header_names.CARRIER_KEY, "")
            # Our own value came back: the engine core has no hooks, and measured nothing.
            if marks == UNMEASURED:
                marks = ""
                recorder.note_unmeasured()
            if vllm_fields.lacks_first_token(output):
                recorder.fail_engine_request(output.request_id, marks)
            else:
                recorder.record_first_output(output.request_id, marks, start or now, now)


def record_end(
    _: None, result: Any, processor: Any, req_state: Any, finish_reason: Any, *args: Any, **kw: Any
) -> None:
    """After _update_stats_from_finished(), which vLLM calls once for each request that has ended."""
    engine_id = req_state.request_id
    # Only for ours: counting tokens is not free for each of vLLM's detokenizers.
    if engine_id in recorder.unended_requests:
        tokens = vllm_fields.count_output_tokens(req_state)
        recorder.record_end(engine_id, str(finish_reason), tokens)


def stamp_part_start(*args: Any, **kwargs: Any) -> int:
    """Before a part of preprocess: the time, 0 when the request is not traced."""
    return clock.now_us() if recorder.current_trace.get() is not None else 0


def _make_part_hook(name: str) -> Any:
    def record_part(start: int | None, *args: Any, **kwargs: Any) -> None:
        trace = recorder.current_trace.get()
        if trace is not None and start and len(trace.parts) < record_parts.MAX_PARTS:
            trace.parts.append((name, start, clock.now_us()))

    return record_part


def stamp_multimodal_start(renderer: Any, prompt: Any, *args: Any, **kwargs: Any) -> int:
    """Before process_for_engine_async(): a part only when `prompt` has multimodal data."""
    if isinstance(prompt, dict) and "multi_modal_data" not in prompt:
        return 0
    return stamp_part_start()


def build_middleware(patcher: Patcher, stack: Any) -> Any:
    """Put our middleware around `stack`, the app's complete middleware stack."""
    # vLLM's facts come as functions, because asgi.py must not know vLLM.
    return TracingMiddleware(
        stack, settings.get_settings(), partial(identify_server, patcher), query_engine
    )


def build_hooks(patcher: Patcher) -> dict[str, Hook]:
    """Hooks of the API server; `patcher` knows which of them are installed."""
    return {
        "frontend.app": Hook(replace=partial(build_middleware, patcher)),
        "frontend.render": Hook(before=stamp_render),
        "frontend.media": Hook(before=stamp_part_start, after=_make_part_hook("media")),
        "frontend.tokenize": Hook(before=stamp_part_start, after=_make_part_hook("tokenize")),
        "frontend.multimodal": Hook(
            before=stamp_multimodal_start, after=_make_part_hook("multimodal")
        ),
        "frontend.assign": Hook(after=stamp_assigned),
        "frontend.register": Hook(before=register_request),
        "frontend.outputs": Hook(
            before=stamp_outputs_received, after=record_outputs, ready=recorder.awaiting_traces
        ),
        "frontend.end": Hook(after=record_end, ready=recorder.unended_requests),
    }
