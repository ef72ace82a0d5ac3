# SPDX-License-Identifier: Apache-2.0
"""Install the hooks of all files with wrap.py; plugin.py calls it in each of vLLM's processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Final

from ttft_otel.hooks import api_server, target_check, wrap
from ttft_otel.hooks.connectors import build_connector_hooks
from ttft_otel.hooks.engine_core.tracer import EngineCoreTracer
from ttft_otel.hooks.worker.model_runners import WorkerTracer
from ttft_otel.model.names import env_names
from ttft_otel.tracing import settings

log = logging.getLogger("ttft_otel")
# Of vLLM: comma-separated names of variables that it copies to Ray's actors, beside its own ones.
RAY_VARIABLES: Final = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def build_hooks(patcher: wrap.Patcher) -> dict[str, wrap.Hook]:
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
    if wrap.find_patcher() is None:
        patcher = wrap.Patcher()
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
