# SPDX-License-Identifier: Apache-2.0
"""Gather every file's hooks and hand them to wrap.py; plugin.py calls it in each of vLLM's processes."""

from __future__ import annotations

import logging

from ttft_otel import settings
from ttft_otel.hooks import engine, frontend, kv, scheduler, transfer, worker, wrap

HOOKS = {
    **frontend.HOOKS,
    **engine.HOOKS,
    **scheduler.HOOKS,
    **worker.HOOKS,
    **transfer.HOOKS,
    **kv.HOOKS,
}


def install() -> None:
    """Patch what is imported, wait for the rest; make our log lines visible beside vLLM's."""
    _speak()
    settings.freeze()
    wrap.install(HOOKS)


def _speak() -> None:
    """vLLM configures its own logger only; ours borrows its handlers, else warnings go to stderr."""
    log = logging.getLogger("ttft_otel")
    if log.handlers:
        return
    log.setLevel(logging.INFO)
    host = logging.getLogger("vllm")
    for handler in host.handlers or [logging.StreamHandler()]:
        log.addHandler(handler)
    log.propagate = False
