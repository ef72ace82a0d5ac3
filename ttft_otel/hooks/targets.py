# SPDX-License-Identifier: Apache-2.0
"""The ledger of every patched vLLM target, as data: wrap.py installs it, doctor prints it, tests hold it
against the sources of each supported release.

`lost` are the stages that become unattributed (their sum unchanged) when the target is gone; on an
encoder instance `lost_encode` counts instead, where it is given. Checked live: tests/live/test_targets.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

QUEUES: Final = ("encoder.queue", "prefill.queue")
WORKER: Final = ("dispatch", "ec.transfer", "encoder.compute", "prefill.compute", "prefill.stall")
ENGINE: Final = (*QUEUES, *WORKER, "sample", "output")
EVERYTHING: Final = ("receive", "preprocess", "ipc", *ENGINE, "egress")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a target lives: module and dotted name; `since`/`until` bound the releases that have it."""

    module: str
    name: str
    since: str = ""
    until: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """One row: what we hang into, what it tells us, why a patch, and when the row can go."""

    name: str
    process: str
    places: tuple[Place, ...]
    marks: str
    lost: tuple[str, ...]
    why: str
    drop_when: str
    reads: tuple[str, ...] = ()
    lost_encode: tuple[str, ...] | None = None
    runner: str = ""
    part: bool = False  # a detail inside a stage: without it nothing becomes unattributed


_SPANS: Final = "vLLM emits this time per request itself"
_V1: Final = "vllm.v1.worker.gpu_model_runner"
_V2: Final = "vllm.v1.worker.gpu.model_runner"

TARGETS: Final[tuple[Target, ...]] = (
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
        _SPANS,
    ),
    Target(
        "frontend.media",
        "api",
        (Place("vllm.multimodal.media.connector", "MediaConnector.load_from_url_async"),),
        "part of preprocess: fetch and decode",
        (),
        "no event tells it",
        _SPANS,
        part=True,
    ),
    Target(
        "frontend.tokenize",
        "api",
        (Place("vllm.renderers.base", "BaseRenderer.tokenize_prompts_async"),),
        "part of preprocess: tokenizer",
        (),
        "no event tells it",
        _SPANS,
        part=True,
    ),
    Target(
        "frontend.multimodal",
        "api",
        (Place("vllm.renderers.base", "BaseRenderer.process_for_engine_async"),),
        "part of preprocess: multimodal processor",
        (),
        "enable_mm_processor_stats only sums it, per server",
        _SPANS,
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
        _SPANS,
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
        _SPANS,
        reads=("engine_core_outputs",),
    ),
    Target(
        "engine.input",
        "core",
        (Place("vllm.v1.engine.core", "EngineCore.preprocess_add_request"),),
        "end of ipc",
        ("ipc", *QUEUES),
        "QUEUED is stamped later, after the wait for the running step",
        "a QUEUED event at the input thread",
        reads=("request",),
    ),
    Target(
        "scheduler.schedule",
        "core",
        (Place("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),),
        "end of the queue; which steps the worker measures",
        ("ipc", *ENGINE),
        "a custom scheduler_cls would exclude the operator's own",
        "scheduled events carry the step and its encoder inputs",
    ),
    Target(
        "scheduler.update",
        "core",
        (Place("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),),
        "joins the worker's marks; sends them along",
        ("ipc", *ENGINE),
        "the only place that has one step's input and output together",
        "EngineCoreOutput has a field for timings",
        reads=("scheduler_output", "model_runner_output"),
    ),
    Target(
        "scheduler.free",
        "core",
        (Place("vllm.v1.core.sched.scheduler", "Scheduler._free_request"),),
        "where an aborted request was",
        (),
        "every end of a request passes here",
        "vLLM reports aborted requests",
        reads=("request",),
        part=True,
    ),
    Target(
        "worker.execute",
        "worker",
        (
            Place(_V1, "GPUModelRunner.execute_model"),
            Place(_V2, "GPUModelRunner.execute_model"),
            Place(
                "vllm.v1.worker.mm_encoder_model_runner",
                "MMEncoderModelRunner.execute_model",
                since="0.29",
            ),
        ),
        "opens the step's record",
        (*WORKER, "sample", "output"),
        "runner internals have no events",
        _SPANS,
        reads=("scheduler_output",),
    ),
    Target(
        "worker.encoder",
        "worker",
        (
            Place(_V1, "GPUModelRunner._execute_mm_encoder"),
            Place("vllm.v1.worker.gpu.mm.encoder_runner", "EncoderRunner.execute_mm_encoder"),
        ),
        "encoder.compute",
        ("dispatch", "encoder.compute"),
        "vLLM's own encoder timing synchronizes the device",
        _SPANS,
        lost_encode=("dispatch", "encoder.compute", "output"),
    ),
    Target(
        "worker.forward",
        "worker",
        (
            Place(_V1, "GPUModelRunner._model_forward"),
            Place("vllm.v1.worker.gpu.async_utils", "StepTimingCollector.forward_start", "0.29"),
            Place("vllm.v1.worker.gpu.kv_connector", "KVConnector.pre_forward", until="0.29"),
            Place("vllm.v1.worker.gpu.kv_connector", "ActiveKVConnector.pre_forward", until="0.29"),
        ),
        "prefill.compute",
        ("dispatch", "prefill.compute", "prefill.stall", "sample"),
        "no event tells when the forward ran",
        _SPANS,
    ),
    Target(
        "worker.sample",
        "worker",
        (Place(_V1, "GPUModelRunner._sample"), Place(_V2, "GPUModelRunner.sample")),
        "end of sample",
        ("sample", "output"),
        "no event tells when the sampler ended",
        _SPANS,
    ),
    Target(
        "worker.tokens",
        "worker",
        (Place(_V1, "GPUModelRunner.sample_tokens"), Place(_V2, "GPUModelRunner.sample_tokens")),
        "binds the step's record to its output",
        (*WORKER, "sample", "output"),
        "under async scheduling the next step starts before this one's output is read",
        _SPANS,
        lost_encode=(),
    ),
    Target(
        "worker.output",
        "worker",
        (
            Place(_V1, "AsyncGPUModelRunnerOutput.get_output"),
            Place("vllm.v1.worker.gpu.async_utils", "AsyncOutput.get_output"),
        ),
        "resolves device events once the output copy is complete",
        (*WORKER, "sample", "output"),
        "the only moment when all events are known to be complete without a synchronization",
        _SPANS,
        lost_encode=(),
    ),
    Target(
        "transfer.create",
        "core+worker",
        (
            Place(
                "vllm.distributed.ec_transfer.ec_connector.factory",
                "ECConnectorFactory.create_connector",
            ),
        ),
        "finds the encoder-cache connector's class",
        (*QUEUES, "dispatch", "ec.transfer", "encoder.compute"),
        "connectors are third-party classes: only their maker knows them",
        "connectors report per-request timings",
        lost_encode=(*QUEUES, "dispatch", "ec.transfer", "encoder.compute", "output"),
    ),
    Target(
        "transfer.wait",
        "core",
        (),
        "ec.transfer: waiting for an item",
        (*QUEUES, "ec.transfer"),
        "connectors have no timings per request",
        "connectors report per-request timings",
        reads=("request",),
        lost_encode=(),
    ),
    Target(
        "transfer.load",
        "worker",
        (),
        "ec.transfer: load",
        ("dispatch", "ec.transfer"),
        "connectors have no timings per request",
        "connectors report per-request timings",
        lost_encode=(),
    ),
    Target(
        "transfer.save",
        "worker",
        (),
        "ec.transfer: save",
        ("ec.transfer", "encoder.compute", "dispatch"),
        "connectors have no timings per request",
        "connectors report per-request timings",
        lost_encode=("ec.transfer", "encoder.compute", "output"),
    ),
)

BY_NAME: Final[dict[str, Target]] = {target.name: target for target in TARGETS}
