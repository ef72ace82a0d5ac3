# SPDX-License-Identifier: Apache-2.0
"""Install the hooks of all files with wrap.py; plugin.py calls it in each of vLLM's processes."""

from __future__ import annotations

import logging
import os
from typing import Final

from ttft_otel.hooks import api_server, wrap
from ttft_otel.hooks.connectors import build_connector_hooks
from ttft_otel.hooks.engine_core.tracer import EngineCoreTracer
from ttft_otel.hooks.worker.model_runners import WorkerTracer
from ttft_otel.model.names import env_names
from ttft_otel.tracing import settings

# Of vLLM: comma-separated prefixes of variables that it copies to Ray's actors, beside its own ones.
RAY_PREFIXES: Final = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
SETTINGS_PREFIXES: Final = (env_names.TTFT_OTEL, "OTEL_")


def build_hooks(patcher: wrap.Patcher) -> dict[str, wrap.Hook]:
    """Target name -> hook, for all files: one table, because a target has one hook per process.

    Also makes the tracers of the process, which is an engine core, a worker, both or an API server.
    """
    worker = WorkerTracer(patcher)
    core = EngineCoreTracer(patcher, worker)
    patcher.tracers = (core, worker)
    return {
        **api_server.build_hooks(patcher),
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
    _pass_settings_to_ray()
    if wrap.find_patcher() is None:
        patcher = wrap.Patcher()
        patcher.install_hooks(build_hooks(patcher))


def _pass_settings_to_ray() -> None:
    """Let vLLM copy our settings to actors of Ray, which see no other variables of this process."""
    known = [each.strip() for each in os.environ.get(RAY_PREFIXES, "").split(",") if each.strip()]
    missing = [prefix for prefix in SETTINGS_PREFIXES if prefix not in known]
    if missing:
        os.environ[RAY_PREFIXES] = ",".join((*known, *missing))


def _show_logs() -> None:
    """Give our logger the handlers of vLLM's, which configures only its own; stderr without any."""
    log = logging.getLogger("ttft_otel")
    if log.handlers:
        return
    log.setLevel(logging.INFO)
    host = logging.getLogger("vllm")
    for handler in host.handlers or [logging.StreamHandler()]:
        log.addHandler(handler)
    # vLLM's handlers are on our logger now; the root's would print each line once more.
    log.propagate = False
