# SPDX-License-Identifier: Apache-2.0
"""Install the hooks of all files with wrap.py; plugin.py calls it in each of vLLM's processes."""

from __future__ import annotations

import logging

from ttft_otel import settings
from ttft_otel.hooks import (
    api_server,
    ec_connectors,
    engine_core,
    kv,
    model_runners,
    scheduler,
    wrap,
)

HOOKS = {
    **api_server.HOOKS,
    **engine_core.HOOKS,
    **scheduler.HOOKS,
    **model_runners.HOOKS,
    **ec_connectors.HOOKS,
    **kv.HOOKS,
}


def install_all() -> None:
    """Patch modules that are imported, and others as they are imported; set up logging."""
    _show_logs()
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
    log.propagate = False
