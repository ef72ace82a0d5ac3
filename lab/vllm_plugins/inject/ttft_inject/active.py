# SPDX-License-Identifier: Apache-2.0
"""Let a scheduler run as few requests at once as the control file says; __init__.py patches it in.

One server serves for tests of several places and of one: a start takes a minute.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from . import control
from .importing import Patch


def build_patches() -> dict[str, Patch]:
    """The scheduler's module."""
    return {"vllm.v1.core.sched.scheduler": patch_scheduler}


def patch_scheduler(module: ModuleType) -> None:
    """Admit by `max_active`, where it is given, from the next step on; in releases that have such a limit."""
    owner: Any = module.Scheduler
    original = owner.schedule

    @functools.wraps(original)
    def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = control.read().get("max_active") or scheduler.max_num_running_reqs
        if wanted != getattr(scheduler, "max_num_active_reqs", wanted):
            scheduler.max_num_active_reqs = wanted
            # What ttft-otel has read of this scheduler, if it has.
            if (facts := getattr(scheduler, "_ttft_facts", None)) is not None:
                facts.max_running = wanted
        return original(scheduler, *args, **kwargs)

    owner.schedule = schedule
