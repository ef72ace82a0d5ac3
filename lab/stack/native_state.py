# SPDX-License-Identifier: Apache-2.0
"""The state file of a native stack: `up` writes it; `status`, `smoke` and `down` read it.

The system reuses process IDs: one is valid only while it runs the program that was started.
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

from lab import session_processes
from lab.stack.program_pins import CHECKOUT
from lab.stack.stack_parts import StackAddresses

DEFAULT_DATA_FOLDER: Final = CHECKOUT / "out" / "stack"
# Longer than native_stack's own: all parts get STOP_TIMEOUT_S, and children some seconds more.
DOWN_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class NativeState:
    """One native stack: the process that runs it, its ports, its programs and their processes.

    programs: name -> [pid, executable]. grafana: where a browser goes, "" for none.
    """

    pid: int
    addresses: StackAddresses
    programs: dict[str, tuple[int, str]]
    grafana: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether the process that runs it is there; the kernel tells its command line."""
        # A process id may belong to another program by now; ours has this word in its command line.
        return b"lab.stack" in _read_command_line(self.pid)

    def write(self, data: Path) -> None:
        """Write the state file atomically."""
        # Renamed into place: `status` in another terminal reads it at any time.
        fresh = get_state_path(data).with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")
        fresh.replace(get_state_path(data))

    def stop(self) -> None:
        """Stop it by signalling its process, then kill programs that are left after a crash."""
        if self.is_alive:
            # The process stops its programs itself, in order; only a crash leaves some.
            os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + DOWN_TIMEOUT_S
            while self.is_alive and time.monotonic() < deadline:
                time.sleep(0.1)
        for pid, executable in self.programs.values():
            # The same program under the same id: nobody else's process is killed.
            if _read_command_line(pid)[:1] == [os.fsencode(executable)]:
                session_processes.kill_processes(session_processes.list_session_pids(pid))


def get_state_path(data: Path) -> Path:
    """The state file of the stack on a data folder."""
    return data / "native.json"


def read_state(data: Path) -> NativeState | None:
    """The stack that runs, or has crashed, on this data folder; None without one."""
    try:
        document = json.loads(get_state_path(data).read_text("utf-8"))
        programs = {
            name: (int(pid), str(where)) for name, (pid, where) in document["programs"].items()
        }
        return NativeState(
            document["pid"], StackAddresses(**document["addresses"]), programs, document["grafana"]
        )
    # A file of another version, or half of one, is no stack: the caller starts afresh.
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove_state(data: Path) -> None:
    """Remove the state file after the stack has ended."""
    with contextlib.suppress(FileNotFoundError):
        get_state_path(data).unlink()


def _read_command_line(pid: int) -> list[bytes]:
    """A process's command line; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
