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
from ttft_otel.router.workers.supervisor import WorkerSupervisor
sys.exit(WorkerSupervisor(2, lambda slot: sys.exit(3), 1.0, lambda: None).run())
"""

# Workers whose heart beats, without a file of metrics, as if there were no room for it; the first one of
# slot 0 stops after a moment.
HUNG_WORKER = """
import os, signal, sys, time
from ttft_otel.router.workers import supervisor
supervisor.CHECK_INTERVAL_S, supervisor.MAX_SILENT_CHECKS = 0.2, 3
def work(slot):
    for beat in range(1, 1000):
        slot.shared.record_heartbeat(slot.number, beat)
        if slot.number == 0 and beat == 20:
            if slot.is_successor:
                os.kill(os.getppid(), signal.SIGTERM)
            else:
                os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.02)
sys.exit(supervisor.WorkerSupervisor(2, work, 1.0, lambda: None).run())
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


def test_a_worker_that_hangs() -> None:
    """It is killed and replaced, and no other one is."""
    ended = subprocess.run(
        [sys.executable, "-c", HUNG_WORKER], capture_output=True, text=True, check=False, timeout=60
    )

    assert "worker 0 (process" in ended.stderr and "hangs, its event loop" in ended.stderr
    assert ended.stderr.count("it is killed") == 1, ended.stderr
    assert "was ended by SIGKILL" in ended.stderr
