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
        name="worker.start",
        process="worker",
        places=(TargetPlace("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device"),),
        marks="which model runner the platform has",
        why="a runner of another package can have an execute_model() that passes our hooks",
        drop_when=VLLM_EMITS_IT,
    ),
    PatchTarget(
        # MMEncoderModelRunner (0.29) is V2's runner without a language model, with its own method.
        name="worker.execute",
        process="worker",
        places=(
            TargetPlace(_V1, "GPUModelRunner.execute_model"),
            TargetPlace(_V2, "GPUModelRunner.execute_model"),
            TargetPlace(
                "vllm.v1.worker.mm_encoder_model_runner",
                "MMEncoderModelRunner.execute_model",
                since="0.29",
            ),
        ),
        marks="opens the step's record",
        lost=(*WORKER_STAGES, "sample", "output"),
        why="runner internals have no events",
        drop_when=VLLM_EMITS_IT,
        reads=("scheduler_output", "intermediate_tensors"),
    ),
    PatchTarget(
        # V1 calls it in every step with multimodal models, V2 only with something to encode.
        name="worker.encoder",
        process="worker",
        places=(
            TargetPlace(_V1, "GPUModelRunner._execute_mm_encoder"),
            TargetPlace("vllm.v1.worker.gpu.mm.encoder_runner", "EncoderRunner.execute_mm_encoder"),
        ),
        marks="encoder.compute",
        lost=("dispatch", "encoder.compute"),
        why="vLLM's own encoder timing synchronizes the device",
        drop_when=VLLM_EMITS_IT,
        lost_encode=("dispatch", "encoder.compute", "output"),
    ),
    PatchTarget(
        # V2 has no method around its forward: what runs just before it marks the start.
        name="worker.forward",
        process="worker",
        places=(
            TargetPlace(_V1, "GPUModelRunner._model_forward"),
            TargetPlace(
                "vllm.v1.worker.gpu.async_utils", "StepTimingCollector.forward_start", "0.29"
            ),
            TargetPlace("vllm.v1.worker.gpu.kv_connector", "KVConnector.pre_forward", until="0.29"),
            TargetPlace(
                "vllm.v1.worker.gpu.kv_connector", "ActiveKVConnector.pre_forward", until="0.29"
            ),
        ),
        marks="prefill.compute",
        lost=("dispatch", "prefill.compute", "prefill.stall", "sample"),
        why="vLLM has no event for the forward pass",
        drop_when=VLLM_EMITS_IT,
    ),
    PatchTarget(
        # Only with experts. V2 does it in a function of its own, before encoder and forward as V1.
        name="worker.dp_sync",
        process="worker",
        places=(
            TargetPlace("vllm.v1.worker.dp_utils", "_synchronize_dp_ranks"),
            TargetPlace("vllm.v1.worker.gpu.dp_utils", "sync_cudagraph_and_dp_padding"),
        ),
        marks="dispatch: the wait for other data-parallel ranks",
        why="runner internals have no events",
        drop_when=VLLM_EMITS_IT,
    ),
    PatchTarget(
        name="worker.sample",
        process="worker",
        places=(
            TargetPlace(_V1, "GPUModelRunner._sample"),
            TargetPlace(_V2, "GPUModelRunner.sample"),
        ),
        marks="end of sample",
        lost=("sample", "output"),
        why="vLLM has no event for the sampler's end",
        drop_when=VLLM_EMITS_IT,
    ),
    PatchTarget(
        # V1 drafts before its output is ready, V2 after it has gone.
        name="worker.draft",
        process="worker",
        places=(TargetPlace(_V1, "GPUModelRunner.propose_draft_token_ids"),),
        marks="output: the drafter, with speculative decoding",
        why="runner internals have no events",
        drop_when=VLLM_EMITS_IT,
    ),
    PatchTarget(
        # execute_model() has returned None: the forward is queued, and sampling follows here.
        name="worker.tokens",
        process="worker",
        places=(
            TargetPlace(_V1, "GPUModelRunner.sample_tokens"),
            TargetPlace(_V2, "GPUModelRunner.sample_tokens"),
        ),
        marks="binds the step's record to its output",
        lost=(*WORKER_STAGES, "sample", "output"),
        why="under async scheduling the next step starts before this one's output is read",
        drop_when=VLLM_EMITS_IT,
        lost_encode=(),
    ),
    PatchTarget(
        # get_output() waits for the copy's event itself (synchronize()), so that our hook need not.
        name="worker.output",
        process="worker",
        places=(
            TargetPlace(_V1, "AsyncGPUModelRunnerOutput.get_output"),
            TargetPlace("vllm.v1.worker.gpu.async_utils", "AsyncOutput.get_output"),
        ),
        marks="resolves device events once the output copy is complete",
        lost=(*WORKER_STAGES, "sample", "output"),
        why="the only moment when all events are known to be complete without a synchronization",
        drop_when=VLLM_EMITS_IT,
        lost_encode=(),
    ),
)
