# SPDX-License-Identifier: Apache-2.0
"""Targets in the worker, both model runners; hooks/worker.py hangs in."""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.row import SPANS, WORKER, Place, Target

_V1: Final = "vllm.v1.worker.gpu_model_runner"
_V2: Final = "vllm.v1.worker.gpu.model_runner"

RUNNERS: Final[tuple[Target, ...]] = (
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
        SPANS,
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
        SPANS,
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
        SPANS,
    ),
    Target(
        "worker.sample",
        "worker",
        (Place(_V1, "GPUModelRunner._sample"), Place(_V2, "GPUModelRunner.sample")),
        "end of sample",
        ("sample", "output"),
        "no event tells when the sampler ended",
        SPANS,
    ),
    Target(
        "worker.tokens",
        "worker",
        (Place(_V1, "GPUModelRunner.sample_tokens"), Place(_V2, "GPUModelRunner.sample_tokens")),
        "binds the step's record to its output",
        (*WORKER, "sample", "output"),
        "under async scheduling the next step starts before this one's output is read",
        SPANS,
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
        SPANS,
        lost_encode=(),
    ),
)
