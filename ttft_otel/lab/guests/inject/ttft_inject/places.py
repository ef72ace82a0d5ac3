# SPDX-License-Identifier: Apache-2.0
"""The places where a delay can be injected, as data; importing.py patches them in, control.py waits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from . import arrivals, control
from .importing import Patch


def always(*_: Any) -> bool:
    """Every call counts."""
    return True


def first_body(request: Any, *_: Any) -> bool:
    """Only the call that reads from the socket, only for the inference APIs."""
    return not hasattr(request, "_body") and request.url.path.startswith("/v1/")


def new_request(_encoder: Any, message: Any, *_: Any) -> bool:
    """Only the message that hands a request to the engine core."""
    return type(message).__name__ == "EngineCoreRequest"


@dataclass(frozen=True)
class Spot:
    """One function of vLLM: where it is, and for which of its calls the delay counts.

    after: wait once it has returned something, instead of before it is called.
    """

    place: str
    module: str
    owner: str
    name: str
    when: Callable[..., bool] = always
    after: bool = False


# Of several addresses of one place those that a release has are used; no release runs two of them
# for one call. `_tokenize_prompt_async` is a method up to 0.24 and made from the other one later.
SPOTS = (
    Spot("receive", "starlette.requests", "Request", "body", first_body),
    Spot("media", "vllm.multimodal.media.image", "ImageMediaIO", "load_bytes"),
    Spot("tokenize", "vllm.renderers.base", "BaseRenderer", "_tokenize_prompt"),
    Spot("tokenize", "vllm.renderers.base", "BaseRenderer", "_tokenize_prompt_async"),
    Spot("multimodal", "vllm.multimodal.processing.processor", "BaseMultiModalProcessor", "apply"),
    Spot("ipc", "vllm.v1.serial_utils", "MsgpackEncoder", "encode", new_request),
    Spot("queue", "vllm.v1.core.kv_cache_manager", "KVCacheManager", "allocate_slots"),
    Spot("dispatch", "vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_prepare_inputs"),
    Spot("dispatch", "vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "prepare_inputs"),
    Spot(
        "encoder",
        "vllm.model_executor.models.qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "embed_multimodal",
    ),
    # The image model calls its language model's inner part, so the two never meet in one step.
    Spot(
        "forward",
        "vllm.model_executor.models.qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "forward",
    ),
    Spot("forward", "vllm.model_executor.models.qwen2", "Qwen2ForCausalLM", "forward"),
    Spot("sample", "vllm.v1.sample.sampler", "Sampler", "forward"),
    Spot("sample", "vllm.v1.worker.gpu.sample.sampler", "Sampler", "__call__"),
    Spot("output", "vllm.v1.engine.detokenizer", "BaseIncrementalDetokenizer", "update"),
    Spot(
        "egress",
        "vllm.v1.engine.output_processor",
        "RequestOutputCollector",
        "get_nowait",
        after=True,
    ),
    Spot("egress", "vllm.v1.engine.output_processor", "RequestOutputCollector", "get", after=True),
)
# The example connectors, of the encoder cache and of KV blocks, and the places of their files.
FILES = {
    "vllm.distributed.ec_transfer.ec_connector.example_connector": ("ec_load", "ec_save"),
    "vllm.distributed.kv_transfer.kv_connector.v1.example_connector": ("kv_load", ""),
}
# What the spots above and the patches below serve, in the order of a request's life.
PLACES = (
    *("receive", "media", "tokenize", "multimodal", "ipc", "ec_wait", "queue", "kv_wait"),
    *("dispatch", "ec_load", "encoder", "ec_save", "kv_load", "forward", "sample", "output"),
    "egress",
)


def patches() -> dict[str, Patch]:
    """Module name -> what to do with it after its import."""
    by_module: dict[str, Patch] = {arrivals.MODULE: arrivals.patch_worker}
    for module, (load, save) in FILES.items():
        by_module[module] = functools.partial(patch_files, load, save)
    for module in {spot.module for spot in SPOTS}:
        spots = [spot for spot in SPOTS if spot.module == module]
        by_module[module] = functools.partial(patch_spots, spots)
    return by_module


def patch_spots(spots: list[Spot], module: ModuleType) -> None:
    """Replace the functions of this module that this release has."""
    for spot in spots:
        owner = getattr(module, spot.owner, None)
        original = vars(owner).get(spot.name) if owner else None
        if original is not None:
            setattr(owner, spot.name, delayed(spot, original))


def delayed(spot: Spot, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the delay of its place before or after it."""
    if inspect.iscoroutinefunction(original):
        return delayed_async(spot, original)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not spot.after and spot.when(*args):
            control.delay(spot.place)
        result = original(*args, **kwargs)
        if spot.after and result is not None:
            control.delay(spot.place)
        return result

    return run


def delayed_async(spot: Spot, original: Callable[..., Any]) -> Callable[..., Any]:
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


def first_layer(*arguments: Any) -> bool:
    """Only the first file of a request whose KV blocks come in one file per layer."""
    return "layers." not in str(arguments[-1]) or "layers.0." in str(arguments[-1])


def patch_files(load: str, save: str, module: ModuleType) -> None:
    """Give an example connector a `safetensors` of its own: nobody else's files wait."""
    import safetensors.torch as real

    files = SimpleNamespace(
        save_file=delayed(Spot(save, "", "", ""), real.save_file),
        load_file=delayed(Spot(load, "", "", "", first_layer), real.load_file),
    )
    module.safetensors = SimpleNamespace(torch=files)  # type: ignore[attr-defined]
