# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM in which a delay can be injected, as data; importing.py patches them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from . import arrivals, control, device_sleep, encodings
from .importing import Patch


def accept_always(*_: Any) -> bool:
    """Every call counts."""
    return True


def is_first_body_read(request: Any, *_: Any) -> bool:
    """Only the call that reads from the socket, only for the inference APIs."""
    return not hasattr(request, "_body") and request.url.path.startswith("/v1/")


def is_new_request(_encoder: Any, message: Any, *_: Any) -> bool:
    """Only the message that hands a request to the engine core."""
    return type(message).__name__ == "EngineCoreRequest"


def is_copy_to_device(_worker: Any, _buffers: Any, _count: int, direction: Any) -> bool:
    """Only a consumer's copy of encodings into device memory."""
    return bool(direction.name == "HOST_TO_DEVICE")


def is_copy_to_host(_worker: Any, _buffers: Any, _count: int, direction: Any) -> bool:
    """Only a producer's copy of encodings out of device memory."""
    return bool(direction.name == "DEVICE_TO_HOST")


def is_last_stage(*_: Any) -> bool:
    """Only in the last pipeline stage, which is the only one where there is no pipeline."""
    from vllm.distributed import get_pp_group

    return bool(get_pp_group().is_last_rank)


def is_earlier_stage(*_: Any) -> bool:
    """Only in pipeline stages before the last one."""
    return not is_last_stage()


@dataclass(frozen=True)
class InjectionPoint:
    """One function of vLLM; `when` selects the calls that are delayed.

    after: delay after it has returned something, instead of before it is called.
    """

    place: str
    module: str
    owner: str
    name: str
    when: Callable[..., bool] = accept_always
    after: bool = False


SPEECH = ("vllm.model_executor.models.qwen3_asr", "Qwen3ASRForConditionalGeneration")
TEXT_FORWARD = ("vllm.model_executor.models.qwen2", "Qwen2ForCausalLM", "forward")
EXPERTS_FORWARD = ("vllm.model_executor.models.qwen3_moe", "Qwen3MoeForCausalLM", "forward")
# Of several addresses of one place those that a release has are used; no release runs two of them
# for one call. `_tokenize_prompt_async` is a method up to 0.24 and made from the other one later.
INJECTION_POINTS = (
    InjectionPoint("receive", "starlette.requests", "Request", "body", is_first_body_read),
    InjectionPoint("media", "vllm.multimodal.media.image", "ImageMediaIO", "load_bytes"),
    InjectionPoint("tokenize", "vllm.renderers.base", "BaseRenderer", "_tokenize_prompt"),
    InjectionPoint("tokenize", "vllm.renderers.base", "BaseRenderer", "_tokenize_prompt_async"),
    InjectionPoint(
        "multimodal", "vllm.multimodal.processing.processor", "BaseMultiModalProcessor", "apply"
    ),
    InjectionPoint("ipc", "vllm.v1.serial_utils", "MsgpackEncoder", "encode", is_new_request),
    InjectionPoint("queue", "vllm.v1.core.kv_cache_manager", "KVCacheManager", "allocate_slots"),
    InjectionPoint(
        "schedule", "vllm.v1.executor.multiproc_executor", "MultiprocExecutor", "execute_model"
    ),
    InjectionPoint(
        "dispatch", "vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_prepare_inputs"
    ),
    InjectionPoint(
        "dispatch", "vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "prepare_inputs"
    ),
    InjectionPoint(
        "encoder",
        "vllm.model_executor.models.qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "embed_multimodal",
    ),
    InjectionPoint(
        "ec_load", encodings.WORKER, "ECCPUWorker", "_submit_transfer", is_copy_to_device
    ),
    InjectionPoint("ec_save", encodings.WORKER, "ECCPUWorker", "_submit_transfer", is_copy_to_host),
    # The image model calls its language model's inner part, so the two never meet in one step.
    InjectionPoint(
        "forward",
        "vllm.model_executor.models.qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "forward",
    ),
    InjectionPoint("forward", *TEXT_FORWARD, is_last_stage),
    InjectionPoint("forward", *EXPERTS_FORWARD),
    InjectionPoint("encoder", *SPEECH, "embed_multimodal"),
    InjectionPoint("forward", *SPEECH, "forward"),
    # A rank without requests, before it meets the others.
    InjectionPoint("other_rank", "vllm.v1.worker.gpu_worker", "Worker", "execute_dummy_batch"),
    InjectionPoint("pipeline", *TEXT_FORWARD, is_earlier_stage),
    InjectionPoint("sample", "vllm.v1.sample.sampler", "Sampler", "forward"),
    InjectionPoint("sample", "vllm.v1.worker.gpu.sample.sampler", "Sampler", "__call__"),
    InjectionPoint("output", "vllm.v1.engine.detokenizer", "BaseIncrementalDetokenizer", "update"),
    InjectionPoint(
        "egress",
        "vllm.v1.engine.output_processor",
        "RequestOutputCollector",
        "get_nowait",
        after=True,
    ),
    InjectionPoint(
        "egress", "vllm.v1.engine.output_processor", "RequestOutputCollector", "get", after=True
    ),
)
# The example connectors, of the encoder cache and of KV blocks, and the places of their files.
FILE_CONNECTOR_PLACES = {
    "vllm.distributed.ec_transfer.ec_connector.example_connector": ("ec_load", "ec_save"),
    "vllm.distributed.kv_transfer.kv_connector.v1.example_connector": ("kv_load", ""),
}
# All places of the points above and of the patches below, in the order in which a request passes.
PLACES = (
    "receive", "media", "tokenize", "multimodal", "ipc", "ec_wait", "ec_asked", "queue",
    "kv_wait", "schedule", "dispatch", "other_rank", "pipeline", "ec_load", "encoder", "ec_save", "ec_copy",
    "kv_load", "forward", "sample", "output", "egress",
)  # fmt: skip


def build_patches() -> dict[str, Patch]:
    """Module name -> what to do with it after its import."""
    by_module: dict[str, Patch] = {arrivals.MODULE: arrivals.patch_worker}
    for module, (load, save) in FILE_CONNECTOR_PLACES.items():
        by_module[module] = functools.partial(patch_files, load, save)
    for module in {spot.module for spot in INJECTION_POINTS}:
        spots = [spot for spot in INJECTION_POINTS if spot.module == module]
        by_module[module] = functools.partial(patch_spots, spots)
    return by_module


def patch_spots(spots: list[InjectionPoint], module: ModuleType) -> None:
    """Replace the functions of this module that this release has."""
    for spot in spots:
        owner = getattr(module, spot.owner, None)
        original = vars(owner).get(spot.name) if owner else None
        if original is not None:
            setattr(owner, spot.name, wrap_with_delay(spot, original))


def wrap_with_delay(spot: InjectionPoint, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the delay of its place before or after it."""
    if inspect.iscoroutinefunction(original):
        return wrap_async_with_delay(spot, original)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if (
            not spot.after
            and spot.when(*args)
            and device_sleep.is_delayed(spot.place, args, kwargs, control.read_min_tokens())
        ):
            control.delay(spot.place)
        result = original(*args, **kwargs)
        if spot.after and result is not None:
            control.delay(spot.place)
        return result

    return run


def wrap_async_with_delay(spot: InjectionPoint, original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a coroutine function."""

    @functools.wraps(original)
    async def run(*args: Any, **kwargs: Any) -> Any:
        if not spot.after and spot.when(*args):
            await control.delay_async(spot.place)
        result = await original(*args, **kwargs)
        if spot.after and result is not None:
            await control.delay_async(spot.place)
        return result

    return run


def is_first_layer(*arguments: Any) -> bool:
    """Only the first file of a request whose KV blocks come in one file per layer."""
    return "layers." not in str(arguments[-1]) or "layers.0." in str(arguments[-1])


def patch_files(load: str, save: str, module: ModuleType) -> None:
    """Give an example connector its own `safetensors`, so that only its files are delayed."""
    import safetensors.torch as real

    files = SimpleNamespace(
        save_file=wrap_with_delay(InjectionPoint(save, "", "", ""), real.save_file),
        load_file=wrap_with_delay(InjectionPoint(load, "", "", "", is_first_layer), real.load_file),
    )
    module.safetensors = SimpleNamespace(torch=files)  # type: ignore[attr-defined]
