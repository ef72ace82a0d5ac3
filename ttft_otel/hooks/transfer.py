# SPDX-License-Identifier: Apache-2.0
"""Encoder-cache connectors: wait (scheduler's side), load and save (worker's side), whatever their class.

Connectors are third-party classes, so their factory is the patched target; the methods of the class it
made are wrapped then. Waits go to the request's Journey, load and save into the worker's open step.
"""

from __future__ import annotations

from typing import Any, Final

from ttft_otel import breakdown, clock
from ttft_otel.hooks import worker, wrap
from ttft_otel.hooks.targets import BY_NAME


def created(_: None, connector: Any, *args: Any, **kwargs: Any) -> None:
    """After create_connector(): wrap what this class has; older ones have no wait and no publishing."""
    kind = type(connector)
    worker.roles.update(
        name for name in ("producer", "consumer") if getattr(connector, f"is_{name}", False)
    )
    for target, names in METHODS.items():
        for name in names:
            if hasattr(kind, name):
                wrap.put(BY_NAME[target], kind, name, HOOKS[target])


def asked(_: None, available: Any, connector: Any, request: Any, *args: Any, **kw: Any) -> None:
    """After ensure_cache_available(): from the first False to the first True the request waits."""
    journey = getattr(request, "_ttft", None)
    if journey is None:
        return
    if not available:
        journey.asked = journey.asked or clock.now()
    elif journey.asked:
        journey.waits += (breakdown.CACHE, journey.asked, clock.now())
        journey.asked = 0


def moving(*args: Any, **kwargs: Any) -> int:
    """Before a load or a save."""
    return worker.opened[0].stamp()


def moved(begin: int | None, result: Any, *args: Any, **kwargs: Any) -> None:
    """After it."""
    if begin is not None and worker.opened:
        worker.opened[0].close(breakdown.CACHE, begin)


METHODS: Final = {
    "transfer.wait": ("ensure_cache_available",),
    "transfer.load": ("start_load_caches",),
    "transfer.save": ("save_caches", "start_save_caches"),
}

HOOKS: Final = {
    "transfer.create": wrap.Hook(after=created),
    "transfer.wait": wrap.Hook(after=asked),
    "transfer.load": wrap.Hook(before=moving, after=moved, ready=worker.opened),
    "transfer.save": wrap.Hook(before=moving, after=moved, ready=worker.opened),
}
