# SPDX-License-Identifier: Apache-2.0
"""Install the hooks of all files with wrap.py; plugin.py calls it in each of vLLM's processes."""

from __future__ import annotations

import logging

from ttft_otel.hooks import api_server, wrap
from ttft_otel.hooks.engine_core import kv, request_arrival, scheduler
from ttft_otel.hooks.worker import ec_connectors, model_runners
from ttft_otel.tracing import settings

# One table: a target has one hook per process, whichever file it is in.
HOOKS = {
    **api_server.HOOKS,
    **request_arrival.HOOKS,
    **scheduler.HOOKS,
    **model_runners.HOOKS,
    **ec_connectors.HOOKS,
    **kv.HOOKS,
}


def install_all() -> None:
    """Patch modules that are imported, and others as they are imported; set up logging."""
    # First, so that a failing installation is seen in vLLM's log.
    _show_logs()
    # Before any hook runs, and while the environment is still as the operator set it.
    settings.freeze_settings()
    wrap.install_hooks(HOOKS)


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
