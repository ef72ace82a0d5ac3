# SPDX-License-Identifier: Apache-2.0
"""Which native stack runs: a small file that `up` writes and `status`, `smoke` and `down` read.

Process ids are used again by the system: one counts only while its program is the one that was started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ttft_otel.lab import processes
from ttft_otel.lab.stack.parts import Addresses
from ttft_otel.lab.stack.pins import CHECKOUT

DATA: Final = CHECKOUT / "out" / "stack"
STOP_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class State:
    """One native stack: the process that runs it, its ports, its programs and their processes.

    programs: name -> [pid, executable]. grafana: where a browser goes, "" for none.
    """

    pid: int
    addresses: Addresses
    programs: dict[str, tuple[int, str]]
    grafana: str = ""

    @property
    def alive(self) -> bool:
        """Whether the process that runs it is there; the kernel tells its command line."""
        return b"ttft_otel.lab.stack" in _words(self.pid)

    def write(self, data: Path) -> None:
        """Where the others look; whole or not at all."""
        fresh = path(data).with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")
        fresh.replace(path(data))

    def stop(self) -> None:
        """End it: ask its own process; kill what a crash of that one left behind."""
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_S
            while self.alive and time.monotonic() < deadline:
                time.sleep(0.1)
        for pid, executable in self.programs.values():
            if _words(pid)[:1] == [os.fsencode(executable)]:
                processes.kill(processes.of_session(pid))


def path(data: Path) -> Path:
    """The file that says which stack runs on a data folder."""
    return data / "native.json"


def read(data: Path) -> State | None:
    """The stack that runs on this folder, or that crashed there; None if there is none."""
    try:
        told = json.loads(path(data).read_text("utf-8"))
        programs = {name: (int(pid), str(where)) for name, (pid, where) in told["programs"].items()}
        return State(told["pid"], Addresses(**told["addresses"]), programs, told["grafana"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget(data: Path) -> None:
    """It has ended."""
    with contextlib.suppress(FileNotFoundError):
        path(data).unlink()


def _words(pid: int) -> list[bytes]:
    """A process's command line; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
