# SPDX-License-Identifier: Apache-2.0
"""Let a model with experts run data-parallel without a GPU; vLLM loads `register` by entry point.

Ranks hand each other tokens of unequal numbers, for which vLLM's CPU communicator has no calls. These use
gloo: what is gathered is padded and cut, what is scattered is summed up whole. The `inject` plugin has to be
on the same PYTHONPATH.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def register() -> None:
    """Patch the communicator after its import; processes without a worker never import it."""
    # Imported here: a broken path must show as this plugin's failure, not as a missing entry point.
    from lab.vllm_plugins.inject.ttft_inject import importing

    importing.install(
        {"vllm.distributed.device_communicators.cpu_communicator": patch_communicator}
    )


def patch_communicator(module: ModuleType) -> None:
    """Add the two calls that vLLM's all2all manager makes."""
    owner: Any = module.CpuCommunicator
    owner.all_gatherv = gather_unequal
    owner.reduce_scatterv = scatter_unequal


def gather_unequal(
    communicator: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None
) -> Any:
    """The rows of all ranks, rank after rank; `tensors` is one or a list, `sizes` the rows of each rank."""
    import torch

    if isinstance(tensors, list):
        return [gather_unequal(communicator, each, dim, sizes) for each in tensors]
    assert dim == 0
    sizes = sizes or [len(tensors)] * communicator.world_size
    padded = tensors.new_zeros((max(sizes), *tensors.shape[1:]))
    padded[: len(tensors)] = tensors
    found = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(found, padded, group=communicator.device_group)
    return torch.cat([rows[:size] for rows, size in zip(found, sizes, strict=True)])


def scatter_unequal(
    communicator: Any, tensor: Any, dim: int = -1, sizes: list[int] | None = None
) -> Any:
    """This rank's rows of the sum over all ranks."""
    import torch

    assert dim == 0
    total = tensor.contiguous().clone()
    torch.distributed.all_reduce(total, group=communicator.device_group)
    if sizes is None:
        sizes = [len(total) // communicator.world_size] * communicator.world_size
    return total.split(sizes)[communicator.rank_in_group]
