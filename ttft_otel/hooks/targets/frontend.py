# SPDX-License-Identifier: Apache-2.0
"""Targets in the API server: from the ASGI call to the engine and back; hooks/frontend.py hangs in."""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.row import ENGINE, EVERYTHING, SPANS, Place, Target

FRONTEND: Final[tuple[Target, ...]] = (
    Target(
        "frontend.app",
        "api",
        (Place("fastapi.applications", "FastAPI.build_middleware_stack"),),
        "arrival, first chunk, end; trace context; Server-Timing",
        EVERYTHING,
        "--middleware would need a flag; this is outermost in every release",
        "a general plugin can add a middleware",
    ),
    Target(
        "frontend.render",
        "api",
        (
            Place("vllm.renderers.base", "BaseRenderer.render_chat_async"),
            Place("vllm.renderers.base", "BaseRenderer.render_cmpl_async"),
        ),
        "end of receive",
        ("receive", "preprocess"),
        "vLLM's arrival_time starts here, it is not handed out",
        SPANS,
    ),
    Target(
        "frontend.media",
        "api",
        (Place("vllm.multimodal.media.connector", "MediaConnector.load_from_url_async"),),
        "part of preprocess: fetch and decode",
        (),
        "no event tells it",
        SPANS,
        part=True,
    ),
    Target(
        "frontend.tokenize",
        "api",
        (Place("vllm.renderers.base", "BaseRenderer.tokenize_prompts_async"),),
        "part of preprocess: tokenizer",
        (),
        "no event tells it",
        SPANS,
        part=True,
    ),
    Target(
        "frontend.multimodal",
        "api",
        (Place("vllm.renderers.base", "BaseRenderer.process_for_engine_async"),),
        "part of preprocess: multimodal processor",
        (),
        "enable_mm_processor_stats only sums it, per server",
        SPANS,
        reads=("prompt",),
        part=True,
    ),
    Target(
        "frontend.assign",
        "api",
        (Place("vllm.v1.engine.input_processor", "InputProcessor.assign_request_id"),),
        "end of preprocess",
        ("preprocess", "ipc"),
        "the last call before the request leaves for the engine, in all releases",
        SPANS,
        reads=("request",),
    ),
    Target(
        "frontend.register",
        "api",
        (Place("vllm.v1.engine.output_processor", "OutputProcessor.add_request"),),
        "engine request id; trace headers",
        ("ipc", *ENGINE, "egress"),
        "the only place where every engine request (n > 1 too) has its final id",
        "trace headers reach the engine core without --otlp-traces-endpoint",
        reads=("request",),
    ),
    Target(
        "frontend.outputs",
        "api",
        (Place("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs"),),
        "end of output; the engine's marks",
        ("ipc", *ENGINE, "egress"),
        "vLLM's own first-token time is a wall-clock difference",
        SPANS,
        reads=("engine_core_outputs",),
    ),
)
