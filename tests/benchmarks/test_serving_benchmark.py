# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/serving.py moves to a core of its own, with a real exporter process and no server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.serving import move_to_cores
from lab.session_processes import find_exporters
from ttft_otel.tracing.handoff import RecordSender
from ttft_otel.tracing.settings import Settings


def wait_for_exporter(sender: RecordSender) -> int:
    """The exporter's process, once the short-lived one that forks it has ended."""
    found: list[int] = []
    for _ in range(1000):
        sender.send(b"x")
        found = find_exporters([os.getpid()])
        with contextlib.suppress(OSError):  # it ended meanwhile
            if len(found) == 1 and read_parent(found[0]) != os.getpid():
                return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no exporter, or more than one: {found}")


def read_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_exporter_is_moved() -> None:
    """The exporter of this process is found, no other process is, and all of its threads are moved."""
    before = os.sched_getaffinity(0)
    sender = RecordSender(Settings(on=True))
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        exporter = wait_for_exporter(sender)
        assert find_exporters([other.pid]) == []
        move_to_cores([exporter], {max(before)})
        threads = [int(task.name) for task in Path(f"/proc/{exporter}/task").iterdir()]
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {
            frozenset({max(before)})
        }
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.pid) == before
    finally:
        sender.close()
        other.communicate(b"\n")
