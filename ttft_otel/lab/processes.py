# SPDX-License-Identifier: Apache-2.0
"""Find and kill the processes of one session by reading /proc; servers.py stops with it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def of_session(leader: int) -> list[int]:
    """Living processes whose session was opened by `leader`, which must be ours."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and session(entry) == leader:
            found.append(int(entry.name))
    return found


def session(entry: Path) -> int | None:
    """The session of one /proc entry; None if the process is gone or a zombie."""
    try:
        text = (entry / "stat").read_text()
    except OSError:
        return None
    # The second field is the name in parentheses and may itself hold spaces.
    state, _parent, _group, number = text.rpartition(")")[2].split()[:4]
    return None if state in "ZX" else int(number)


def kill(pids: list[int]) -> None:
    """SIGKILL them all; one that has just gone is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
