# SPDX-License-Identifier: Apache-2.0
"""Let vLLM's ECCPUConnector run without a GPU; vLLM loads `register` by entry point.

The connector copies encodings between device memory and a shared host region with CUDA streams and
events. vLLM's CPU build has none of the three that patch_worker replaces; all else (scheduler,
shared region, side channel, NIXL) is vLLM's own. Two more patches make it fit for a small machine: an
idle engine rests, and a server that is gone leaves no file. The `inject` plugin has to be on the same
PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from types import ModuleType
from typing import Any

PACKAGE = "vllm.distributed.ec_transfer.ec_connector.cpu"
# With NIXL on, engines make a step each millisecond for ever, to look for peers: most of a core for
# each idle server. Here an idle one wakes up this often, and makes a step only for a request, for a
# peer that asks, or after REST_S.
POLL_INTERVAL_S = 0.002
REST_S = 0.1


class HostEvent:
    """Stands in for torch.Event where copies are complete when the call returns."""

    def __init__(self) -> None:
        """Not recorded yet."""
        self.recorded_ns = 0

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self.recorded_ns = time.perf_counter_ns()

    def query(self) -> bool:
        """Whether everything before it is done, which it always is."""
        return True

    def synchronize(self) -> None:
        """Return at once: there is nothing to wait for."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to a later one, as torch.Event gives them."""
        return (end.recorded_ns - self.recorded_ns) / 1e6


def register() -> None:
    """Patch the connector's modules after their import; other processes never import them."""
    # Imported here: a broken path must show as this plugin's failure, not as a missing entry point.
    from lab.vllm_plugins.inject.ttft_inject import importing

    importing.install(
        {
            f"{PACKAGE}.worker": patch_worker,
            f"{PACKAGE}.scheduler": patch_scheduler,
            f"{PACKAGE}.ec_shared_region": patch_region,
            "vllm.v1.engine.core": patch_engine,
        }
    )


def patch_worker(module: ModuleType) -> None:
    """Replace the batched copy, the events, and Tensor.record_stream() of the CUDA allocator."""
    import torch

    vllm: Any = module
    vllm.swap_blocks_batch = copy_blocks
    vllm.ECCPUWorker._acquire_event = acquire_event
    torch.Tensor.record_stream = ignore_stream


def patch_scheduler(module: ModuleType) -> None:
    """Ask for another step only when something is under way, a peer asks, or REST_S are over."""
    owner: Any = module.ECCPUScheduler
    original = owner.build_connector_meta

    def build_connector_meta(scheduler: Any, output: Any) -> Any:
        scheduler.ttft_rests_until = None
        return original(scheduler, output)

    def has_pending_push_work(scheduler: Any) -> bool:
        if not is_idle(scheduler):
            return True
        now = time.monotonic()
        if getattr(scheduler, "ttft_rests_until", None) is None:
            scheduler.ttft_rests_until = now + REST_S
        return bool(now >= scheduler.ttft_rests_until)

    owner.build_connector_meta = build_connector_meta
    owner.has_pending_push_work = has_pending_push_work


def patch_engine(module: ModuleType) -> None:
    """Let an idle engine wake up while it waits for requests, so that it makes those steps.

    vLLM loads plugins in the constructor of its engine, so that this is the first chance.
    """
    owner: Any = module.EngineCoreProc
    original = owner._process_input_queue

    def _process_input_queue(core: Any) -> None:
        waiting = core.input_queue
        if "get" not in vars(waiting):
            get = waiting.get
            waiting.get = lambda block=True: get(block, POLL_INTERVAL_S if block else None)
        original(core)

    owner._process_input_queue = _process_input_queue


def patch_region(module: ModuleType) -> None:
    """Remove the region's file once scheduler and worker have it open: vLLM often leaves it behind.

    It takes 64 MiB of memory until it is removed.
    """
    owner: Any = module.ECSharedRegion
    original = owner.__init__

    def __init__(region: Any, *args: Any, **kwargs: Any) -> None:
        original(region, *args, **kwargs)
        if not region._is_creator:  # the second of the two
            with contextlib.suppress(FileNotFoundError):
                os.unlink(region._mmap_path)

    owner.__init__ = __init__


def is_idle(scheduler: Any) -> bool:
    """Whether no encoding is being saved, loaded, fetched or waited for, and no peer asks for one."""
    if scheduler._deferred_since or scheduler._cache.has_held_entries():
        return False
    session = scheduler._producer_session
    return session is None or not session._transport._poller.poll(0)


def copy_blocks(sources: Any, targets: Any, sizes: Any, **_: Any) -> None:
    """Copy sizes[i] bytes from address sources[i] to address targets[i], one after another."""
    copies = zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True)
    for source, target, size in copies:
        ctypes.memmove(target, source, size)


def acquire_event(worker: Any) -> Any:
    """An event of the worker's pool, to which finished copies return theirs, or a new one."""
    return worker._event_pool.pop() if worker._event_pool else HostEvent()


def ignore_stream(tensor: Any, stream: Any) -> None:
    """Host memory is freed by reference count: no stream can still be reading it."""
