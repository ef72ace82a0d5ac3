# SPDX-License-Identifier: Apache-2.0
"""The supervisor: how long it waits before it replaces a worker, what it keeps private, when it gives up."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ttft_otel.router.workers import supervisor
from ttft_otel.router.workers.load_counts import LoadCounts
from ttft_otel.router.workers.load_rings import LoadRings

FAILING_START = """
import sys
from ttft_otel.router.workers.load_counts import LoadCounts
from ttft_otel.router.workers.load_rings import LoadRings
from ttft_otel.router.workers.supervisor import WorkerSupervisor
sys.exit(WorkerSupervisor(2, lambda seat: sys.exit(3), 1.0, lambda: None).run())
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


@pytest.mark.parametrize("runtime_folder", ["", "/nowhere", "/" + "x" * 200])
def test_the_folder_is_private(monkeypatch: pytest.MonkeyPatch, runtime_folder: str) -> None:
    """Nobody else may enter it, and a socket's path in it is short enough."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime_folder)
    folder = supervisor.make_private_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(str(folder / "worker-255.sock")) < 108
    finally:
        folder.rmdir()


def test_orphans_leave_nothing(tmp_path: Path) -> None:
    """Each removes what is its own, and the last one the folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    seats = [
        supervisor.WorkerSeat(number, 2, folder, LoadRings(2), LoadCounts(2), -1)
        for number in range(2)
    ]
    for name in ("worker-0.sock", "worker-0.metrics", "worker-1.metrics"):
        (folder / name).touch()

    seats[0].leave_folder()
    assert [each.name for each in folder.iterdir()] == ["worker-1.metrics"]

    seats[1].leave_folder()
    assert not folder.exists()


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
