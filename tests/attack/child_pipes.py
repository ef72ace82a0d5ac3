# SPDX-License-Identifier: Apache-2.0
"""End a child process that tests talk to through pipes; imports nothing that would slow its start."""

from __future__ import annotations

import subprocess
from typing import Any


def kill_and_close(process: subprocess.Popen[Any]) -> None:
    """Kill a child process, if it still runs, and close the pipes to it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
