# SPDX-License-Identifier: Apache-2.0
"""The workers' folder: private, and gone with the last of them, also where all were killed at once."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ttft_otel.router.workers import worker_socket

# A supervisor that waits, with the child that it has forked.
RUNNING = """
import os, sys, time
from ttft_otel.router.workers.worker_socket import make_private_folder
folder = make_private_folder()
(folder / "worker-0.sock").touch()
child = os.fork()
if child:
    print(folder, child, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("runtime_folder", ["", "/nowhere", "/" + "x" * 200])
def test_the_folder_is_private(monkeypatch: pytest.MonkeyPatch, runtime_folder: str) -> None:
    """Nobody else may enter it, and a socket's path in it is short enough."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime_folder)
    folder = worker_socket.make_private_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in folder.iterdir())
        assert len(str(folder / "worker-255.sock")) < 108
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where folders are made; its path is short, which pytest's own ones are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


def test_orphans_leave_nothing(parent: Path) -> None:
    """Each removes what is its own, and the last one the folder."""
    folder = worker_socket.make_private_folder()
    for name in ("worker-0.sock", "worker-0.metrics", "worker-1.metrics"):
        (folder / name).touch()

    worker_socket.leave_folder(folder, 0)
    names = sorted(each.name for each in folder.iterdir())
    assert names == [worker_socket.LOCK_NAME, "worker-1.metrics"]

    worker_socket.leave_folder(folder, 1)
    assert not [*parent.iterdir()]


def test_what_killed_routers_left(parent: Path) -> None:
    """The next one removes it, once no process of the killed one runs, and nothing of others."""
    process = subprocess.Popen((sys.executable, "-c", RUNNING), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        name, child = process.stdout.readline().split()
    old = Path(name)
    unknown = parent / f"{worker_socket.FOLDER_PREFIX}of-another-release"
    unknown.mkdir()
    (parent / f"{worker_socket.FOLDER_PREFIX}link").symlink_to(parent)
    try:
        worker_socket.sweep_folders(parent)
        assert old.exists()
        process.kill()
        process.wait()
        worker_socket.sweep_folders(parent)
        assert (old / "worker-0.sock").exists()  # its worker still runs
    finally:
        process.kill()
        os.kill(int(child), signal.SIGKILL)
    for _ in range(600):
        worker_socket.sweep_folders(parent)
        if not old.exists():
            break
        time.sleep(0.05)  # until the kernel has let go of the lock
    assert not old.exists() and unknown.exists() and parent.exists()
