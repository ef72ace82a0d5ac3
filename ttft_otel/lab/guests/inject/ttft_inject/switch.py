# SPDX-License-Identifier: Apache-2.0
"""Switch ttft-otel's hooks off, or make them raise, as the control file says, while vLLM runs."""

from __future__ import annotations

import sys
import threading
import time

from . import control

PERIOD = 0.05
HOOKS = "ttft_otel.hooks.wrap"


def start() -> None:
    """Watch the control file from a thread of its own."""
    threading.Thread(target=watch, name="ttft-lab-switch", daemon=True).start()


def watch() -> None:
    """Pass every change on to ttft-otel, once it is loaded."""
    applied: tuple[set[str], set[str]] = (set(), set())
    while True:
        content = control.read()
        wanted = set(content.get("off", ())), set(content.get("raise", ()))
        switch = getattr(sys.modules.get(HOOKS), "switch", None)
        if wanted != applied and switch is not None:
            switch(wanted[0], wanted[1])
            applied = wanted
        time.sleep(PERIOD)
