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
        "frontend.app",
        "api",
        (TargetPlace("fastapi.applications", "FastAPI.build_middleware_stack"),),
        "arrival, first chunk, end; trace context; Server-Timing",
        ALL_STAGES,
        "--middleware needs a flag and endpoint plugins (0.29) VLLM_PLUGINS; a patch is always outermost",
        "a plugin that nobody has to name can add the outermost middleware",
    ),
    PatchTarget(
        # Each sets arrival_time in its first line (renderers/base.py): no rendering is before.
        "frontend.render",
        "api",
        (
            TargetPlace("vllm.renderers.base", "BaseRenderer.render_chat_async"),
            TargetPlace("vllm.renderers.base", "BaseRenderer.render_cmpl_async"),
        ),
        "end of receive",
        ("receive", "preprocess"),
        "vLLM sets arrival_time here and does not hand it out",
        VLLM_EMITS_IT,
    ),
    PatchTarget(
        # Once per URL of a message, so that a request has as many parts as it has media.
        "frontend.media",
        "api",
        (TargetPlace("vllm.multimodal.media.connector", "MediaConnector.load_from_url_async"),),
        "part of preprocess: fetch and decode",
        (),
        "vLLM has no event for it",
        VLLM_EMITS_IT,
        part=True,
    ),
    PatchTarget(
        # The plural method: render_cmpl_async() gathers its prompts through it in one call.
        "frontend.tokenize",
        "api",
        (TargetPlace("vllm.renderers.base", "BaseRenderer.tokenize_prompts_async"),),
        "part of preprocess: tokenizer",
        (),
        "vLLM has no event for it",
        VLLM_EMITS_IT,
        part=True,
    ),
    PatchTarget(
        # Called for text as well: the hook reads `prompt` to leave that out.
        "frontend.multimodal",
        "api",
        (TargetPlace("vllm.renderers.base", "BaseRenderer.process_for_engine_async"),),
        "part of preprocess: multimodal processor",
        (),
        "enable_mm_processor_stats only sums it, per server",
        VLLM_EMITS_IT,
        reads=("prompt",),
        part=True,
    ),
    PatchTarget(
        # Adds 8 random characters to the client's ID; all paths of AsyncLLM call it.
        "frontend.assign",
        "api",
        (TargetPlace("vllm.v1.engine.input_processor", "InputProcessor.assign_request_id"),),
        "end of preprocess; the role that the request's transfer parameters give",
        ("preprocess", "ipc"),
        "the last call before the request leaves for the engine, in all releases",
        VLLM_EMITS_IT,
        reads=("request",),
    ),
    PatchTarget(
        # Late enough: before, AsyncLLM.add_request() drops headers if vLLM's tracing is off.
        "frontend.register",
        "api",
        (TargetPlace("vllm.v1.engine.output_processor", "OutputProcessor.add_request"),),
        "engine request id; trace headers",
        ("ipc", *ENGINE_STAGES, "egress"),
        "the only place where every engine request (n > 1 too) has its final id",
        "trace headers reach the engine core without --otlp-traces-endpoint",
        reads=("request",),
    ),
    PatchTarget(
        # Called for slices of a batch (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE), each with its own times.
        "frontend.outputs",
        "api",
        (TargetPlace("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs"),),
        "end of output; the engine's marks",
        ("ipc", *ENGINE_STAGES, "egress"),
        "vLLM's own first-token time is a wall-clock difference",
        VLLM_EMITS_IT,
        reads=("engine_core_outputs",),
    ),
    PatchTarget(
        # Once for each request, whether or not vLLM keeps statistics; not for one that is aborted.
        "frontend.end",
        "api",
        (
            TargetPlace(
                "vllm.v1.engine.output_processor", "OutputProcessor._update_stats_from_finished"
            ),
        ),
        "end of a generation: its tokens, finish reason, time per token",
        (),
        "process_outputs() would have to be asked at each decode step",
        VLLM_EMITS_IT,
        reads=("req_state", "finish_reason"),
        part=True,
    ),
)
