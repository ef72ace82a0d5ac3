# SPDX-License-Identifier: Apache-2.0
"""Adapt vLLM to the laboratory, where several servers share two cores: remove two busy loops.

Worker and engine core of each server spin after every message, for up to a second; NIXL's progress
thread spins for ever. With two servers on two cores they leave no time to the API servers, the router
and the client, and milliseconds of scheduling show up in every stage.

And on CPUs with AMX it asks the kernel for its registers, which vLLM 0.32 uses without asking.
"""

from __future__ import annotations

import time
from typing import Any

PAUSE_S = 0.0001  # sleep instead of a spin


def register() -> None:
    """Replace both loops; a release without them stays as it is."""
    request_amx_tiles()
    try:
        from vllm.distributed.device_communicators import shm_broadcast
    except ImportError:
        return
    # Without any spin the readers can miss a wake-up and hang: the polling has to stay.
    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = yield_core
    try:
        from vllm.distributed import nixl_utils
    except ImportError:
        return
    nixl_utils.nixl_agent_config = build_threadless_config


def request_amx_tiles() -> None:
    """Let this process use AMX's tile registers, where the CPU has them.

    The kernel wants to be asked. oneDNN asks before its first large product, vLLM's attention kernel
    never does: a NIXL decode instance, whose first step computes one token, died of an illegal instruction.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()


def yield_core() -> None:
    """Sleep for PAUSE_S instead of spinning."""
    time.sleep(PAUSE_S)


def build_threadless_config(**options: Any) -> Any:
    """NIXL's configuration without a progress thread: the worker's own polling makes progress.

    It polls in every step, and an engine with blocks on their way or kept makes a step each ms.
    """
    from nixl._api import nixl_agent_config

    return nixl_agent_config(**options, enable_prog_thread=False)
