# SPDX-License-Identifier: Apache-2.0
"""The hooks of this test process and the owners of their state, as install.py makes them in one of vLLM's.

Tests put these hooks around fakes, or around vLLM's classes, and read the state; conftest.py drops it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ttft_otel.hooks.api_server import DirectCallTracer
from ttft_otel.hooks.engine_core.tracer import EngineCoreTracer
from ttft_otel.hooks.install import build_hooks
from ttft_otel.hooks.targets import TARGETS_BY_NAME
from ttft_otel.hooks.worker.model_runners import WorkerTracer
from ttft_otel.hooks.wrap import Patcher

PATCHER: Final = Patcher()
HOOKS: Final = build_hooks(PATCHER)
CORE: EngineCoreTracer
WORKER: WorkerTracer
DIRECT: DirectCallTracer
CORE, WORKER, DIRECT = PATCHER.tracers
# All that have a state, and what of it is not of single requests.
OWNERS: Final[tuple[Any, ...]] = (
    *(CORE, CORE.queue, CORE.held, WORKER, DIRECT),
    *(CORE.blocks, CORE.blocks.answers, CORE.encodings, CORE.encodings.answers),
)
LASTING: Final = ("ec_roles", "fetched_hashes", "_changes")


def wrap_methods(owner: type, method_by_target: Mapping[str, str]) -> None:
    """Wrap the methods of the class `owner` with the hooks of these targets."""
    for target, method in method_by_target.items():
        PATCHER.patch_attribute(TARGETS_BY_NAME[target], owner, method, HOOKS[target])


def wrap_copy(base: type, method_by_target: Mapping[str, str]) -> Any:
    """A class of its own, so that patches do not accumulate, with all that `base` and its bases have."""
    members: dict[str, Any] = {}
    for each in reversed(base.__mro__[:-1]):
        members |= vars(each)
    kind = type(base.__name__, (base,), members)
    wrap_methods(kind, method_by_target)
    return kind


def wrap_ec_connector(connector: Any) -> None:
    """Wrap the class of an encoder-cache connector, as if its factory had made it."""
    HOOKS["transfer.create"].after(None, connector)  # type: ignore[misc]


def wrap_kv_connector(connector: Any) -> None:
    """Wrap the class of a KV connector, as if its factory had made it."""
    HOOKS["kv.create"].after(None, connector)  # type: ignore[misc]


def count_state() -> dict[str, int]:
    """How much the tracers keep of requests and steps, by owner and name; what outlives them is left out."""
    return {
        f"{type(owner).__name__}.{name}": len(value)
        for owner in OWNERS
        for name, value in vars(owner).items()
        if hasattr(value, "__len__") and name not in LASTING
    } | {"updating": int(CORE.is_updating)}


def drop_state() -> None:
    """Forget all requests and steps, as in new processes; hooks keep the same containers."""
    for owner in OWNERS:
        for value in vars(owner).values():
            if hasattr(value, "clear"):
                value.clear()
    CORE.held.log.reset()
    CORE.is_updating = False
    CORE.dropped_requests = CORE.encodings.dropped_leases = 0
    WORKER.clock = None


def put_back_classes() -> None:
    """Take all wrappers off again."""
    PATCHER.switch(off=[*PATCHER.installed])
    PATCHER.disabled.clear()
