# SPDX-License-Identifier: Apache-2.0
"""Hooks around connectors of encodings (EC) and of KV blocks, in the engine core and in the worker.

Connectors can be third-party classes, so vLLM's factories are the patched targets, and the methods of the
class of each connector that they create are wrapped. Both processes create one: its hooks go to the tracer of
the engine core (waits, sources of media items, what is kept) and of the worker (loads and saves).
"""

from __future__ import annotations

from typing import Any, Final

from ttft_otel.hooks import ec_fields
from ttft_otel.hooks.engine_core.tracer import EngineCoreTracer
from ttft_otel.hooks.worker.model_runners import WorkerTracer
from ttft_otel.hooks.wrap import Hook, Patcher

# Wrapped also where they are empty: on an encoder's step without anything to encode they are the only
# sign that the worker was reached.
_LOAD_AND_SAVE: Final = ("transfer.load", "transfer.save")


def build_connector_hooks(
    patcher: Patcher, core: EngineCoreTracer, worker: WorkerTracer
) -> dict[str, Hook]:
    """Hooks of both factories, and of the methods of what they create."""
    steps = worker.open_steps
    move_encodings = Hook(
        before=worker.stamp_interval_start, after=worker.record_encodings, ready=steps
    )
    move_blocks = Hook(before=worker.stamp_interval_start, after=worker.record_blocks, ready=steps)
    ec_methods = {
        "transfer.wait": Hook(after=core.record_ec_wait),
        "transfer.place": Hook(after=core.note_allocated),
        "transfer.keep": Hook(after=core.encodings.record_announced),
        "transfer.ready": Hook(after=core.encodings.record_saved, ready=core.encodings.leases),
        "transfer.load": move_encodings,
        "transfer.save": move_encodings,
        "transfer.flush": Hook(
            before=worker.stamp_flush_start, after=worker.record_encodings, ready=steps
        ),
    }
    session_methods = core.encodings.build_session_hooks()
    kv_methods = {
        "kv.match": Hook(after=core.blocks.record_match),
        "kv.keep": Hook(after=core.blocks.record_kept_blocks),
        "kv.load": move_blocks,
        "kv.save": move_blocks,
    }

    def wrap_ec_connector(_: None, connector: Any, *args: Any, **kwargs: Any) -> None:
        # ec_both is both. The engine core and the worker each create a connector, of the same roles.
        worker.ec_roles.update(
            name for name in ("producer", "consumer") if getattr(connector, f"is_{name}", False)
        )
        patcher.patch_methods(type(connector), ec_methods, _is_worth_wrapping)
        delegate = getattr(connector, "connector_scheduler", None)
        patcher.patch_methods(type(getattr(delegate, "_producer_session", None)), session_methods)

    def wrap_kv_connector(_: None, connector: Any, *args: Any, **kwargs: Any) -> None:
        patcher.patch_methods(type(connector), kv_methods)

    return {
        "transfer.create": Hook(after=wrap_ec_connector),
        "kv.create": Hook(after=wrap_kv_connector),
        **ec_methods,
        **session_methods,
        **kv_methods,
    }


def _is_worth_wrapping(kind: type[Any], target: str, name: str) -> bool:
    # A hook around vLLM's empty method would run in every step and see nothing.
    return ec_fields.has_own_method(kind, name) or (
        target in _LOAD_AND_SAVE and hasattr(kind, name)
    )
