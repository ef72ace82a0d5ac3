# SPDX-License-Identifier: Apache-2.0
"""Targets in the API server, from the ASGI call to the engine and back; for hooks/api_server.py."""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.patch_target import (
    ALL_STAGES,
    ENGINE_STAGES,
    VLLM_EMITS_IT,
    PatchTarget,
    TargetPlace,
)

FRONTEND_TARGETS: Final[tuple[PatchTarget, ...]] = (
    PatchTarget(
        # Starlette builds the stack at the first call, after all add_middleware(): ours is outside.
        name="frontend.app",
        process="api",
        places=(TargetPlace("fastapi.applications", "FastAPI.build_middleware_stack"),),
        marks="arrival, first chunk, end; trace context; Server-Timing",
        lost=ALL_STAGES,
        why="--middleware needs a flag and endpoint plugins (0.29) VLLM_PLUGINS; a patch is always outermost",
        drop_when="a plugin that nobody has to name can add the outermost middleware",
    ),
    PatchTarget(
        # Each sets arrival_time in its first line (renderers/base.py): no rendering is before.
        name="frontend.render",
        process="api",
        places=(
            TargetPlace("vllm.renderers.base", "BaseRenderer.render_chat_async"),
            TargetPlace("vllm.renderers.base", "BaseRenderer.render_cmpl_async"),
        ),
        marks="end of receive",
        lost=("receive", "preprocess"),
        why="vLLM sets arrival_time here and does not hand it out",
        drop_when=VLLM_EMITS_IT,
    ),
    PatchTarget(
        # Once per URL of a message, so that a request has as many parts as it has media.
        name="frontend.media",
        process="api",
        places=(
            TargetPlace("vllm.multimodal.media.connector", "MediaConnector.load_from_url_async"),
        ),
        marks="part of preprocess: fetch and decode",
        why="vLLM has no event for it",
        drop_when=VLLM_EMITS_IT,
    ),
    PatchTarget(
        # The plural method: render_cmpl_async() gathers its prompts through it in one call.
        name="frontend.tokenize",
        process="api",
        places=(TargetPlace("vllm.renderers.base", "BaseRenderer.tokenize_prompts_async"),),
        marks="part of preprocess: tokenizer",
        why="vLLM has no event for it",
        drop_when=VLLM_EMITS_IT,
    ),
    PatchTarget(
        # Called for text as well: the hook reads `prompt` to leave that out.
        name="frontend.multimodal",
        process="api",
        places=(TargetPlace("vllm.renderers.base", "BaseRenderer.process_for_engine_async"),),
        marks="part of preprocess: multimodal processor",
        why="enable_mm_processor_stats only sums it, per server",
        drop_when=VLLM_EMITS_IT,
        reads=("prompt",),
    ),
    PatchTarget(
        # Whoever calls an engine: vLLM's own servers, too, whose HTTP request has a trace already.
        name="frontend.direct",
        process="api",
        places=(
            TargetPlace("vllm.v1.engine.async_llm", "AsyncLLM.add_request"),
            TargetPlace("vllm.v1.engine.llm_engine", "LLMEngine.add_request"),
        ),
        marks="arrival of a request that came without HTTP; its parent",
        why="scripts, gRPC, WebSockets, Dynamo and Ray Serve call the engine without an ASGI application",
        drop_when="vLLM begins a span of its own at the engine",
        reads=("request_id", "params", "arrival_time", "trace_headers"),
    ),
    PatchTarget(
        # Adds 8 random characters to the client's ID; all paths of AsyncLLM call it.
        name="frontend.assign",
        process="api",
        places=(TargetPlace("vllm.v1.engine.input_processor", "InputProcessor.assign_request_id"),),
        marks="end of preprocess; the role that the request's transfer parameters give",
        lost=("preprocess", "ipc"),
        why="the last call before the request leaves for the engine, in all releases",
        drop_when=VLLM_EMITS_IT,
        reads=("request",),
    ),
    PatchTarget(
        # Late enough: before, AsyncLLM.add_request() drops headers if vLLM's tracing is off.
        name="frontend.register",
        process="api",
        places=(TargetPlace("vllm.v1.engine.output_processor", "OutputProcessor.add_request"),),
        marks="engine request id; trace headers",
        lost=("ipc", *ENGINE_STAGES, "egress"),
        why="the only place where every engine request (n > 1 too) has its final id",
        drop_when="trace headers reach the engine core without --otlp-traces-endpoint",
        reads=("request",),
    ),
    PatchTarget(
        # Called for slices of a batch (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE), each with its own times.
        name="frontend.outputs",
        process="api",
        places=(TargetPlace("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs"),),
        marks="end of output; the engine's marks",
        lost=("ipc", *ENGINE_STAGES, "egress"),
        why="vLLM's own first-token time is a wall-clock difference",
        drop_when=VLLM_EMITS_IT,
        reads=("engine_core_outputs",),
    ),
    PatchTarget(
        # Once for each request, whether or not vLLM keeps statistics; not for one that is aborted.
        name="frontend.end",
        process="api",
        places=(
            TargetPlace(
                "vllm.v1.engine.output_processor", "OutputProcessor._update_stats_from_finished"
            ),
        ),
        marks="end of a generation: its tokens, finish reason, time per token",
        why="process_outputs() would have to be asked at each decode step",
        drop_when=VLLM_EMITS_IT,
        reads=("req_state", "finish_reason"),
    ),
    PatchTarget(
        # The middleware sees that an HTTP client has left; of other callers nobody else says it.
        name="frontend.abort",
        process="api",
        places=(TargetPlace("vllm.v1.engine.output_processor", "OutputProcessor.abort_requests"),),
        marks="end of a request that came without HTTP and was aborted",
        why="vLLM reports no end of an aborted request",
        drop_when=VLLM_EMITS_IT,
        reads=("request_ids",),
    ),
)
