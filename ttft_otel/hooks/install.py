# SPDX-License-Identifier: Apache-2.0
"""Install the hooks of all files with wrap.py; plugin.py calls it in each of vLLM's processes.

Connectors of encodings (EC) and of KV blocks can be third-party classes: vLLM's factories are the patched
targets, and the methods of each class that they create are wrapped here, for both tracers.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Any, Final

from ttft_otel.hooks import api_server, target_check, vllm_fields
from ttft_otel.hooks.engine_core.tracer import EngineCoreTracer
from ttft_otel.hooks.worker.model_runners import WorkerTracer
from ttft_otel.hooks.wrap import Patcher, find_patcher
from ttft_otel.model.breakdown import CODE_EC_TRANSFER, CODE_KV_TRANSFER
from ttft_otel.model.names import env_names
from ttft_otel.tracing import settings
from ttft_otel.tracing.guard import Hook

log = logging.getLogger("ttft_otel")
# Of vLLM: comma-separated names of variables that it copies to Ray's actors, beside its own ones.
RAY_VARIABLES: Final = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
# Wrapped also where they are empty: on an encoder's step without anything to encode they are the only
# sign that the worker was reached.
_LOAD_AND_SAVE: Final = ("transfer.load", "transfer.save")


def build_hooks(patcher: Patcher) -> dict[str, Hook]:
    """Target name -> hook, for all files: one table, because a target has one hook per process.

    Also makes the tracers of the process, which is an engine core, a worker, both or an API server.
    """
    worker = WorkerTracer(patcher)
    core = EngineCoreTracer(patcher, worker)
    direct = api_server.DirectCallTracer(patcher)
    patcher.tracers = (core, worker, direct)
    return {
        **api_server.build_hooks(patcher, direct),
        **core.build_hooks(),
        **worker.build_hooks(),
        **build_connector_hooks(patcher, core, worker),
    }


def install_all() -> None:
    """Patch modules that are imported, and others as they are imported; set up logging. Idempotent."""
    # First, so that a failing installation is seen in vLLM's log.
    _show_logs()
    # Before any hook runs, and while the environment is still as the operator set it.
    settings.freeze_settings()
    _pass_switch_to_ray()
    # Once, in the process that starts the others.
    if target_check.has_rust_frontend() and multiprocessing.parent_process() is None:
        log.warning(
            "ttft-otel: %s is set: %s",
            target_check.RUST_FRONTEND,
            target_check.RUST_FRONTEND_LIMITS,
        )
    if find_patcher() is None:
        patcher = Patcher()
        patcher.install_hooks(build_hooks(patcher))


def _pass_switch_to_ray() -> None:
    """Let vLLM copy TTFT_OTEL to actors of Ray, which see no other variables of this process.

    Engine cores and workers read no other one, and Ray's dashboard shows what is copied: not the OTEL_ ones,
    whose headers may have a token.
    """
    known = [each.strip() for each in os.environ.get(RAY_VARIABLES, "").split(",") if each.strip()]
    if env_names.TTFT_OTEL not in known:
        os.environ[RAY_VARIABLES] = ",".join((*known, env_names.TTFT_OTEL))


def _show_logs() -> None:
    """Give our logger the handlers of vLLM's, which configures only its own; stderr without any."""
    if log.handlers:
        return
    log.setLevel(logging.INFO)
    host = logging.getLogger("vllm")
    for handler in host.handlers or [logging.StreamHandler()]:
        log.addHandler(handler)
    # vLLM's handlers are on our logger now; the root's would print each line once more.
    log.propagate = False


def build_connector_hooks(
    patcher: Patcher, core: EngineCoreTracer, worker: WorkerTracer
) -> dict[str, Hook]:
    """Hooks of both factories, and of the methods of what they create."""
    steps = worker.open_steps
    start, record_encodings = worker.stamp_interval_start, worker.record_interval(CODE_EC_TRANSFER)
    move_encodings = Hook(before=start, after=record_encodings, ready=steps)
    # A step leaves those out that are too short to have moved anything.
    move_blocks = Hook(before=start, after=worker.record_interval(CODE_KV_TRANSFER), ready=steps)
    ec_methods = {
        "transfer.wait": Hook(after=core.record_ec_wait),
        "transfer.place": Hook(after=core.note_allocated),
        "transfer.keep": Hook(after=core.encodings.record_announced),
        "transfer.ready": Hook(after=core.encodings.record_saved, ready=core.encodings.leases),
        "transfer.load": move_encodings,
        "transfer.save": move_encodings,
        "transfer.flush": Hook(
            before=worker.stamp_flush_start, after=record_encodings, ready=steps
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
    return vllm_fields.has_own_method(kind, name) or (
        target in _LOAD_AND_SAVE and hasattr(kind, name)
    )
