# SPDX-License-Identifier: Apache-2.0
"""Targets in the worker, in both of vLLM's model runners; for hooks/worker/model_runners.py."""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.patch_target import (
    VLLM_EMITS_IT,
    WORKER_STAGES,
    PatchTarget,
    TargetPlace,
)

# A release can have both; a server uses one of them.
_V1: Final = "vllm.v1.worker.gpu_model_runner"
_V2: Final = "vllm.v1.worker.gpu.model_runner"

WORKER_TARGETS: Final[tuple[PatchTarget, ...]] = (
    PatchTarget(
        # MMEncoderModelRunner (0.29) is V2's runner without a language model, with its own method.
        "worker.execute",
        "worker",
        (
            TargetPlace(_V1, "GPUModelRunner.execute_model"),
            TargetPlace(_V2, "GPUModelRunner.execute_model"),
            TargetPlace(
                "vllm.v1.worker.mm_encoder_model_runner",
                "MMEncoderModelRunner.execute_model",
                since="0.29",
            ),
        ),
        "opens the step's record",
        (*WORKER_STAGES, "sample", "output"),
        "runner internals have no events",
        VLLM_EMITS_IT,
        reads=("scheduler_output", "intermediate_tensors"),
    ),
    PatchTarget(
        # V1 calls it in every step with multimodal models, V2 only with something to encode.
        "worker.encoder",
        "worker",
        (
            TargetPlace(_V1, "GPUModelRunner._execute_mm_encoder"),
            TargetPlace("vllm.v1.worker.gpu.mm.encoder_runner", "EncoderRunner.execute_mm_encoder"),
        ),
        "encoder.compute",
        ("dispatch", "encoder.compute"),
        "vLLM's own encoder timing synchronizes the device",
        VLLM_EMITS_IT,
        lost_encode=("dispatch", "encoder.compute", "output"),
    ),
    PatchTarget(
        # V2 has no method around its forward: what runs just before it marks the start.
        "worker.forward",
        "worker",
        (
            TargetPlace(_V1, "GPUModelRunner._model_forward"),
            TargetPlace(
                "vllm.v1.worker.gpu.async_utils", "StepTimingCollector.forward_start", "0.29"
            ),
            TargetPlace("vllm.v1.worker.gpu.kv_connector", "KVConnector.pre_forward", until="0.29"),
            TargetPlace(
                "vllm.v1.worker.gpu.kv_connector", "ActiveKVConnector.pre_forward", until="0.29"
            ),
        ),
        "prefill.compute",
        ("dispatch", "prefill.compute", "prefill.stall", "sample"),
        "vLLM has no event for the forward pass",
        VLLM_EMITS_IT,
    ),
    PatchTarget(
        "worker.sample",
        "worker",
        (TargetPlace(_V1, "GPUModelRunner._sample"), TargetPlace(_V2, "GPUModelRunner.sample")),
        "end of sample",
        ("sample", "output"),
        "vLLM has no event for the sampler's end",
        VLLM_EMITS_IT,
    ),
    PatchTarget(
        # execute_model() has returned None: the forward is queued, and sampling follows here.
        "worker.tokens",
        "worker",
        (
            TargetPlace(_V1, "GPUModelRunner.sample_tokens"),
            TargetPlace(_V2, "GPUModelRunner.sample_tokens"),
        ),
        "binds the step's record to its output",
        (*WORKER_STAGES, "sample", "output"),
        "under async scheduling the next step starts before this one's output is read",
        VLLM_EMITS_IT,
        lost_encode=(),
    ),
    PatchTarget(
        # get_output() waits for the copy's event itself (synchronize()), so that our hook need not.
        "worker.output",
        "worker",
        (
            TargetPlace(_V1, "AsyncGPUModelRunnerOutput.get_output"),
            TargetPlace("vllm.v1.worker.gpu.async_utils", "AsyncOutput.get_output"),
        ),
        "resolves device events once the output copy is complete",
        (*WORKER_STAGES, "sample", "output"),
        "the only moment when all events are known to be complete without a synchronization",
        VLLM_EMITS_IT,
        lost_encode=(),
    ),
)
