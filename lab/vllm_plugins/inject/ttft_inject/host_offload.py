# SPDX-License-Identifier: Apache-2.0
"""OffloadingConnector's CPU tier without a GPU: its copies are made by the host, inside the step.

vLLM's CPUOffloadingSpec copies with CUDA streams. Connector, scheduler and manager stay vLLM's; tests name
this one with `spec_module_path` in the connector's configuration.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's, with another worker."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker of this process, created at the first call."""
        if self._worker is None:
            self._worker = HostWorker(kv_caches, self.num_chunks)
        return self._worker


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies whole blocks of one group of layers at once."""

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self.near = [each.tensor for each in kv_caches.tensors]
        self.far = [torch.empty((chunks, each.shape[1]), dtype=each.dtype) for each in self.near]
        self.ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the KV cache to the tier."""
        return self.copy_blocks(job_id, self.near, src_spec, self.far, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the tier to the KV cache."""
        return self.copy_blocks(job_id, self.far, src_spec, self.near, dst_spec)

    def copy_blocks(
        self, job_id: int, sources: Any, source: Any, targets: Any, target: Any
    ) -> bool:
        """Copy the blocks `source` to the blocks `target`, each a LoadStoreSpec with as many."""
        began, size = time.monotonic(), 0
        here, there = torch.from_numpy(source.block_ids), torch.from_numpy(target.block_ids)
        for each, into in zip(sources, targets, strict=True):
            blocks = each[here.long()]
            into[there.long()] = blocks
            size += blocks.nbytes
        self.ended.append(TransferResult(job_id, True, size, time.monotonic() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Copies since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""
