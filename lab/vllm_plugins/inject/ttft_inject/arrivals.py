# SPDX-License-Identifier: Apache-2.0
"""Let KV blocks from another instance arrive late, as over a slow network; places.py patches it in.

NIXL's worker is told of a finished transfer `kv_wait` milliseconds after it had finished; nothing
sleeps, so that other requests of the instance go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

from . import control

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
Finished: TypeAlias = "tuple[set[str], set[str]]"


def patch_worker(module: ModuleType) -> None:
    """Hold finished transfers back in the base of NIXL's two workers."""
    owner: Any = module.NixlBaseConnectorWorker
    owner._pop_done_transfers = delay_finished_transfers(owner._pop_done_transfers)


def delay_finished_transfers(original: Callable[..., Finished]) -> Callable[..., Finished]:
    """Wrap the function that reports finished transfers, so that they are reported late."""
    since: dict[str, int] = {}

    def pop(worker: Any, transfers: Any) -> Finished:
        done, failed = original(worker, transfers)
        if not done and not since:
            return done, failed
        wanted = control.read_delay_s("kv_wait")
        now = time.monotonic_ns()
        since.update(dict.fromkeys(done, now))
        ready = {name for name, began in since.items() if now - began >= wanted * 1e9}
        for name in ready:
            began = since.pop(name)
            if wanted > 0:
                control.log_delay("kv_wait", began)
        return ready, failed

    return pop
