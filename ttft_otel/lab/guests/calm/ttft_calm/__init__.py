# SPDX-License-Identifier: Apache-2.0
"""Take two spinning loops out of vLLM's processes: several servers share two cores in the laboratory.

Worker and engine core of each server spin after every message, for up to a second; NIXL's progress
thread spins for ever. With two servers on two cores they leave no time to the API servers, the router
and the client, and milliseconds of scheduling show up in every stage.
"""

from __future__ import annotations

import time
from typing import Any

PAUSE = 0.0001  # seconds


def register() -> None:
    """Replace both; a release without them stays as it is."""
    try:
        from vllm.distributed.device_communicators import shm_broadcast
    except ImportError:
        return
    # Without any spin the readers can miss a wake-up and hang: the polling has to stay.
    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = pause
    try:
        from vllm.distributed import nixl_utils
    except ImportError:
        return
    nixl_utils.nixl_agent_config = threadless


def pause() -> None:
    """Give the core away for a moment."""
    time.sleep(PAUSE)


def threadless(**options: Any) -> Any:
    """NIXL's configuration without a progress thread: the worker's own polling makes progress.

    It polls in every step, and an engine with blocks on their way or kept makes a step each ms.
    """
    from nixl._api import nixl_agent_config

    return nixl_agent_config(**options, enable_prog_thread=False)
