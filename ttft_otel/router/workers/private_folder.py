# SPDX-License-Identifier: Apache-2.0
"""The folder of one router's workers, with their sockets and files: made, left, and swept.

supervisor.py makes it before it forks; the last worker removes it where the supervisor cannot. Where all
were killed at once, the next router of the same user does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

MAX_FOLDER_CHARS: Final = 80  # a Unix socket's path has at most 107
FOLDER_PREFIX: Final = "ttft-otel-router-"
# A file that is locked for as long as a process of its router runs.
LOCK_NAME: Final = "running"


def make_private_folder() -> Path:
    """A new folder that only this user can enter; those of routers that were killed are removed."""
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR", "")
    is_usable = os.access(runtime_folder, os.W_OK) and len(runtime_folder) <= MAX_FOLDER_CHARS - 24
    parent = runtime_folder if runtime_folder and is_usable else None
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))  # mode 0700
    if len(str(folder)) > MAX_FOLDER_CHARS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))
    _lock_folder(folder)
    sweep_folders(folder.parent)
    return folder


def _lock_folder(folder: Path) -> None:
    unlocked = folder / f"{LOCK_NAME}.new"
    # Never closed: forked workers have the same lock, and the kernel lets go of it with the last of them.
    descriptor = os.open(unlocked, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    # A file system without locks: its folder is left if all are killed at once.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Its name appears once it is locked, so that nobody finds it in between.
        unlocked.rename(folder / LOCK_NAME)


def sweep_folders(parent: Path) -> None:
    """Remove folders below `parent` whose lock nobody holds, of this user."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            # Of another user, or a link that another user has put there.
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / LOCK_NAME, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def leave_folder(folder: Path, number: int) -> None:
    """Remove what is worker `number`'s, and the folder if it was the last: no supervisor does it."""
    for path in folder.glob(f"worker-{number}.*"):
        path.unlink(missing_ok=True)
    if not any(folder.glob("worker-*")):
        shutil.rmtree(folder, ignore_errors=True)
