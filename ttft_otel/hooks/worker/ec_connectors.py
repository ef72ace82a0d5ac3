# SPDX-License-Identifier: Apache-2.0
"""Hooks in encoder-cache (EC) connectors: wait (scheduler's side), load and save (worker's side).

Connectors can be third-party classes, so the factory is the patched target, and the methods of the
class of each connector that it creates are wrapped. Waits go to the request's EngineTimeline, loads
and saves into the worker's open step. ec_items.py follows the sources of items, ec_kept.py how long
they are kept for another instance.
"""

from __future__ import annotations

from typing import Any, Final

from ttft_otel.hooks import ec_fields, wrap
from ttft_otel.hooks.engine_core import ec_items, ec_kept
from ttft_otel.hooks.targets import TARGETS_BY_NAME
from ttft_otel.hooks.worker import model_runners
from ttft_otel.model import breakdown
from ttft_otel.tracing import clock


def wrap_ec_connector(_: None, connector: Any, *args: Any, **kwargs: Any) -> None:
    """After create_connector(): wrap the methods that the connector's class has.

    Methods inherited empty from vLLM's base class are skipped, except load and save: on an encoder's
    step without anything to encode they are the only sign that the worker was reached.
    """
    kind = type(connector)
    # ec_both is both. The engine core and the worker each create a connector, of the same roles.
    model_runners.ec_roles.update(
        name for name in ("producer", "consumer") if getattr(connector, f"is_{name}", False)
    )
    for target, names in WRAPPED_METHODS.items():
        for name in names:
            # A hook around an empty method would run in every step and see nothing.
            if ec_fields.has_own_method(kind, name) or (
                target in LOAD_AND_SAVE and hasattr(kind, name)
            ):
                wrap.patch_attribute(TARGETS_BY_NAME[target], kind, name, HOOKS[target])
    ec_kept.wrap_session_class(connector)


def record_ec_wait(
    _: None, available: Any, connector: Any, request: Any, *args: Any, **kw: Any
) -> None:
    """After ensure_cache_available(): the request waits from the first False to the first True.

    available: what the connector answered. vLLM asks in every step, also while decoding; once the
    request is scheduled, further waits belong to `prefill.stall` and are not recorded here.
    """
    timeline = getattr(request, "_ttft", None)
    if timeline is None or timeline.scheduled:
        return
    # Before the wait is judged: what the connector holds at its first answer is not this request's.
    if not timeline.read_details().media and getattr(request, "mm_features", None):
        ec_items.open_items(timeline, request, connector, available)
    elif timeline.details is None and available:
        return
    details = timeline.open_details()
    # From the first "not yet" on: later ones must not move the start of the wait.
    if not available:
        details.asked = details.asked or clock.now_us()
    elif details.asked:
        details.waits += (breakdown.CODE_EC_TRANSFER, details.asked, clock.now_us())
        details.asked = 0


def stamp_move_start(*args: Any, **kwargs: Any) -> int:
    """Before a load or a save: index of the stamp."""
    return model_runners.open_steps[0].take_stamp()


def stamp_flush_start(*args: Any, **kwargs: Any) -> int | None:
    """Before get_finished(), in which ECCPUConnector starts to copy what this step has encoded."""
    step = model_runners.open_steps[0]
    # vLLM calls get_finished() in steps that encode nothing, too: no event for these.
    return step.take_stamp() if step.encodes and "producer" in model_runners.ec_roles else None


def record_move(begin: int | None, result: Any, *args: Any, **kwargs: Any) -> None:
    """After a load, a save or get_finished(): record the interval that began at stamp `begin`."""
    if begin is not None and model_runners.open_steps:
        model_runners.open_steps[0].close_interval(breakdown.CODE_EC_TRANSFER, begin)


LOAD_AND_SAVE: Final = ("transfer.load", "transfer.save")
WRAPPED_METHODS: Final = {
    "transfer.wait": ("ensure_cache_available",),
    "transfer.place": ("update_state_after_alloc",),
    "transfer.keep": ("request_finished",),
    "transfer.ready": ("update_connector_output",),
    "transfer.load": ("start_load_caches",),
    # start_save_caches() (0.32) publishes items of earlier steps, which no save_caches() sees.
    "transfer.save": ("save_caches", "start_save_caches"),
    "transfer.flush": ("get_finished",),
}

HOOKS: Final = {
    "transfer.create": wrap.Hook(after=wrap_ec_connector),
    "transfer.wait": wrap.Hook(after=record_ec_wait),
    "transfer.load": wrap.Hook(
        before=stamp_move_start, after=record_move, ready=model_runners.open_steps
    ),
    "transfer.save": wrap.Hook(
        before=stamp_move_start, after=record_move, ready=model_runners.open_steps
    ),
    "transfer.flush": wrap.Hook(
        before=stamp_flush_start, after=record_move, ready=model_runners.open_steps
    ),
    **ec_items.HOOKS,
    **ec_kept.HOOKS,
}
