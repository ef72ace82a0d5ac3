# SPDX-License-Identifier: Apache-2.0
"""Switch ttft-otel's hooks off, or make them raise, as the control file says, while vLLM runs."""

from __future__ import annotations

import sys
import threading
import time

from . import control

POLL_PERIOD_S = 0.05
WRAP_MODULE = "ttft_otel.hooks.wrap"


class HookSwitch:
    """Passes changes of the control file on to ttft-otel, and notes which of them this process has."""

    def __init__(self) -> None:
        """Nothing is switched yet, and nothing has been noted."""
        self.applied: tuple[set[str], set[str]] = (set(), set())
        self.noted_number = 0

    def apply_changes(self) -> None:
        """Apply the file once; does nothing in a process that has not loaded ttft-otel's hooks."""
        find_patcher = getattr(sys.modules.get(WRAP_MODULE), "find_patcher", None)
        patcher = find_patcher() if find_patcher is not None else None
        if patcher is None:
            return
        content = control.read()
        wanted = set(content.get("off", ())), set(content.get("raise", ()))
        if wanted != self.applied:
            patcher.switch(*wanted)
            self.applied = wanted
        # After the switch: whoever finds the number can rely on what it stands for.
        if (number := content.get("number", 0)) != self.noted_number:
            control.note_applied(number)
            self.noted_number = number


def start() -> None:
    """Watch the control file from a thread of its own."""
    threading.Thread(target=watch_control_file, name="ttft-lab-switch", daemon=True).start()


def watch_control_file() -> None:
    """Apply changes for as long as the process lives."""
    switch = HookSwitch()
    while True:
        switch.apply_changes()
        time.sleep(POLL_PERIOD_S)
