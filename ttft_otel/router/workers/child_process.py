# SPDX-License-Identifier: Apache-2.0
"""One process that the supervisor runs and replaces when it dies: when, and how that is said."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkContext, ForkProcess
from typing import Final

STEADY_S: Final = 10.0  # seconds after which a process that dies is replaced at once
FIRST_PAUSE_S: Final = 0.5  # before one that died sooner is replaced; doubled while it goes on
MAX_PAUSE_S: Final = 30.0


@dataclass(slots=True)
class ChildProcess:
    """What is known of it. restart_at_s: monotonic seconds, 0 while it is not to be replaced."""

    process: ForkProcess | None = None
    started_s: float = 0.0
    restart_at_s: float = 0.0
    pause_s: float = 0.0

    def start(self, context: ForkContext, enter: Callable[[], None], name: str) -> None:
        """Fork a process that does `enter`."""
        self.process = context.Process(target=enter, name=name)
        self.started_s, self.restart_at_s = time.monotonic(), 0.0
        self.process.start()

    def has_ended(self) -> bool:
        """Whether it was started and has ended; reaps it."""
        return self.process is not None and self.process.exitcode is not None

    def is_due(self) -> bool:
        """Whether it is to be replaced now."""
        return self.process is None and 0 < self.restart_at_s <= time.monotonic()

    def plan_restart(self) -> str:
        """Have an ended one replaced; returns when that is, in words."""
        self.process, moment = None, time.monotonic()
        self.pause_s = choose_pause_s(self.pause_s, moment - self.started_s)
        self.restart_at_s = moment + self.pause_s
        return f"in {self.pause_s:g} s" if self.pause_s else "at once"


def choose_pause_s(last_pause_s: float, lived_s: float) -> float:
    """Seconds before a process is replaced that lived `lived_s` seconds after `last_pause_s` of waiting."""
    if lived_s >= STEADY_S:
        return 0.0
    return min(max(last_pause_s * 2, FIRST_PAUSE_S), MAX_PAUSE_S)


def describe_end(exit_code: int) -> str:
    """How log lines say that a process has ended; `exit_code` is negative after a signal."""
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
