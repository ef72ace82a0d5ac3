# SPDX-License-Identifier: Apache-2.0
"""Make vLLM's shared-memory readers sleep 0.1 ms where they would yield in a spin of up to a second.

Worker and engine core of each server spin after every message; with two servers on two cores they
leave no time to the API servers, the router and the client, and milliseconds of scheduling show up in
every hop. (Without any spin the readers can miss a wake-up and hang: the polling has to stay.)
"""

from __future__ import annotations

import time

PAUSE = 0.0001  # seconds


def register() -> None:
    """Replace the yield; a release without it stays as it is."""
    try:
        from vllm.distributed.device_communicators import shm_broadcast
    except ImportError:
        return
    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = pause


def pause() -> None:
    """Give the core away for a moment."""
    time.sleep(PAUSE)
