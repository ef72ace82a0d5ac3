# SPDX-License-Identifier: Apache-2.0
"""Find and remove shared memory that killed processes leave in /dev/shm, for local_servers.py.

Python's resource tracker removes it when a process has ended, unless it was killed as well. Files are told
by device and inode, not by name: glibc maps a semaphore before it gives it its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")
PREFIXES = ("psm_", "sem.mp-")  # what multiprocessing names its shared memory and its semaphores


def list_mapped_files(pids: Iterable[int]) -> set[tuple[int, int]]:
    """Device and inode of all files of FOLDER that these processes have mapped."""
    found: set[tuple[int, int]] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        # It has ended, or belongs to another user.
        except OSError:
            continue
        for line in lines:
            if f" {FOLDER}/" in line:
                device, inode = line.split(None, 5)[3:5]
                major, minor = (int(number, 16) for number in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
    return found


def remove_left_files(mapped: set[tuple[int, int]]) -> None:
    """Remove those of `mapped` that are there still and that no living process has mapped."""
    left = {}
    for path in FOLDER.iterdir():
        if path.name.startswith(PREFIXES):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if (status.st_dev, status.st_ino) in mapped:
                left[status.st_dev, status.st_ino] = path
    if left:
        everybody = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        for key in left.keys() - list_mapped_files(everybody):
            left[key].unlink(missing_ok=True)
