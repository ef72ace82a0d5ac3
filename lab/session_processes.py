# SPDX-License-Identifier: Apache-2.0
"""Find and kill the processes of one session by reading /proc, for local_servers.py; find exporters."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from ttft_otel.tracing import handoff


def list_session_pids(leader: int) -> list[int]:
    """Living processes whose session was opened by `leader`, which must be ours."""
    # By session, not by parent: a child whose parent has ended
    # belongs to init, but keeps its session.
    entries = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [int(entry.name) for entry in entries if read_session_id(entry) == leader]


def read_session_id(entry: Path) -> int | None:
    """The session of one /proc entry; None if the process is gone or a zombie."""
    try:
        text = (entry / "stat").read_text()
    # It ended between the listing and the reading.
    except OSError:
        return None
    # The second field is the name in parentheses and may itself hold spaces.
    state, _parent, _group, number = text.rpartition(")")[2].split()[:4]
    return None if state in "ZX" else int(number)


def find_exporters(hosts: Iterable[int]) -> list[int]:
    """The exporter processes of these processes; each has a session of its own, and names its host."""
    names_of_hosts = {str(pid).encode() for pid in hosts}
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended between the listing and the reading
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            module = handoff.EXPORTER_MODULE.encode()
            # After the module: its socket, its page, its host.
            if module in words and names_of_hosts & {*words[words.index(module) + 3 :][:1]}:
                found.append(int(entry.name))
    return found


def wait_for_session_end(leader: int, timeout_s: float) -> None:
    """Wait until the session is empty, `timeout_s` seconds at most."""
    deadline = time.monotonic() + timeout_s
    while list_session_pids(leader) and time.monotonic() < deadline:
        # Polled: only parents are told of an end, and most of these are not our children.
        time.sleep(0.05)


def kill_processes(pids: list[int]) -> None:
    """Send SIGKILL to all `pids`; one that has ended already is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            # One by one: a process group would not reach children that opened groups of their own.
            os.kill(pid, signal.SIGKILL)
