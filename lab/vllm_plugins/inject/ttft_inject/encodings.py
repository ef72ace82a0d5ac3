# SPDX-License-Identifier: Apache-2.0
"""Let encodings of ECCPUConnector come late, or the wait for them end early; __init__.py patches it in.

On a GPU the producer copies encodings to host memory on a stream of its own, and its answer does not
wait for that: consumers that ask in the meantime are told "not ready" and ask again. Nothing sleeps
here either; `ec_copy` is the producer's side of it, `ec_asked` the consumer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

from . import control
from .importing import Patch

PACKAGE = "vllm.distributed.ec_transfer.ec_connector.cpu"
WORKER = f"{PACKAGE}.worker"
SAVE_DIRECTION = "save"  # what vLLM calls copies to host memory
PATIENCE_S = 60.0  # vLLM's, unless the control file names another

Collect: TypeAlias = "Callable[[Any, Any, str], list[Any]]"
Grant: TypeAlias = "Callable[[Any, Any], Any]"


def build_patches() -> dict[str, Patch]:
    """Module name -> what to do with it after its import."""
    return {
        WORKER: patch_worker,
        f"{PACKAGE}.session": patch_session,
        f"{PACKAGE}.scheduler": patch_scheduler,
    }


def patch_worker(module: ModuleType) -> None:
    """Hold finished copies back where the worker looks for them in every step."""
    owner: Any = module.ECCPUWorker
    owner._collect_finished = delay_copies(owner._collect_finished)


def patch_session(module: ModuleType) -> None:
    """Refuse reads where the producer decides on them."""
    owner: Any = module.ProducerSession

    def refuse(request: Any) -> Any:
        status = module.XferStatus.NACK_NOT_READY
        return module.XferAck(mm_hash=request.mm_hash, status=status)

    owner._grant_or_nack = delay_grants(owner._grant_or_nack, refuse)


def patch_scheduler(module: ModuleType) -> None:
    """Let the consumer wait as long for an encoding as the control file says: `ec_patience_s`."""
    vllm: Any = module
    original = vllm.ECCPUScheduler.ensure_cache_available

    def ensure_cache_available(*args: Any, **kwargs: Any) -> bool:
        vllm._ADMIT_DEFER_TIMEOUT_S = control.read().get("ec_patience_s", PATIENCE_S)
        return bool(original(*args, **kwargs))

    vllm.ECCPUScheduler.ensure_cache_available = ensure_cache_available


def delay_copies(original: Collect) -> Collect:
    """The worker's report of finished copies, with those to host memory reported `ec_copy` ms late.

    Its first call for a copy comes in the step that starts it, right after that start.
    """

    def collect_finished(worker: Any, inflight: Any, direction: str) -> list[Any]:
        wanted = (
            control.read_delay_s("ec_copy") if direction == SAVE_DIRECTION and inflight else 0.0
        )
        if wanted <= 0:
            return original(worker, inflight, direction)
        oldest = inflight[0]
        if not hasattr(oldest, "ttft_began_ns"):
            oldest.ttft_began_ns = time.monotonic_ns()
        if time.monotonic_ns() - oldest.ttft_began_ns < wanted * 1e9:
            return []
        done = original(worker, inflight, direction)
        if done:
            control.log_delay("ec_copy", oldest.ttft_began_ns)
        return done

    return collect_finished


def delay_grants(original: Grant, refuse: Callable[[Any], Any]) -> Grant:
    """The producer's answer to a read: "not ready" until `ec_asked` ms after it was first asked.

    The noted length is what the consumer waited longer: from its first refusal until its grant.
    """
    first_asked_ns: dict[str, int] = {}

    def grant_or_nack(session: Any, request: Any) -> Any:
        wanted = control.read_delay_s("ec_asked")
        if wanted <= 0:
            return original(session, request)
        began = first_asked_ns.setdefault(request.mm_hash, time.monotonic_ns())
        if time.monotonic_ns() - began < wanted * 1e9:
            return refuse(request)
        del first_asked_ns[request.mm_hash]
        control.log_delay("ec_asked", began)
        return original(session, request)

    return grant_or_nack
