# SPDX-License-Identifier: Apache-2.0
"""The supervisor: how long it waits before it replaces a worker, when it gives up."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from ttft_otel.router.workers import supervisor

FAILING_START = """
import sys
from ttft_otel.router.workers.shared_memory import SharedMemory
from ttft_otel.router.workers.shared_memory import SharedMemory
from ttft_otel.router.workers.supervisor import WorkerSupervisor
sys.exit(WorkerSupervisor(2, lambda slot: sys.exit(3), 1.0, lambda: None).run())
"""


def test_pauses() -> None:
    """None after a steady life; else doubled, up to a limit."""
    pauses = [0.0]
    for _ in range(8):
        pauses.append(supervisor.choose_pause_s(pauses[-1], 1.0))

    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert supervisor.choose_pause_s(30.0, supervisor.STEADY_S) == 0.0


def test_ends_in_words() -> None:
    """A signal by its name, else the exit code."""
    assert supervisor.describe_end(-9) == "was ended by SIGKILL"
    assert supervisor.describe_end(1) == "ended with exit code 1"


def test_a_port_is_reserved() -> None:
    """Any free one for 0; workers may share it; whoever listens there already is noticed."""
    port, reserved = supervisor.reserve_port("127.0.0.1", 0)
    workers = [*supervisor.bind_shared_port("127.0.0.1", port)]
    workers[0].listen()

    with pytest.raises(OSError):
        supervisor.reserve_port("127.0.0.1", port)

    with socket.create_connection(("127.0.0.1", port)):
        pass
    for each in (*reserved, *workers):
        each.close()


def test_a_worker_that_cannot_start() -> None:
    """The router ends with its exit code: what is wrong will be wrong again."""
    ended = subprocess.run(
        [sys.executable, "-c", FAILING_START], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 3
    assert "could not start" in ended.stderr
