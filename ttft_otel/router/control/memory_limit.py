# SPDX-License-Identifier: Apache-2.0
"""The memory limit of this process's container: uvicorn_server.py asks each second how near it is.

The kernel kills what goes beyond it, with all requests; refusing new ones before costs only those.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

MAX_USED_SHARE: Final = 0.9
# Of control groups of version 2 and 1: folder, limit, memory in use, and what of that can be dropped.
_VERSIONS: Final = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class MemoryLimit:
    """Of a control group; max_bytes is 0 where there is none.

    root: where the file systems of control groups are. membership: the file that names this process's.
    """

    def __init__(
        self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
    ) -> None:
        self.max_bytes = 0
        try:
            groups = [line.split(":", 2)[1:] for line in membership.read_text().splitlines()]
        except OSError:
            groups = []
        for controllers, path in groups:
            if controllers in _VERSIONS:
                base, limit, *self._names = _VERSIONS[controllers]
                # A container may see its own group as the root, whatever its name.
                for self._folder in (root / base / path.lstrip("/"), root / base):
                    self.max_bytes = self._read_number(limit)
                    if self.max_bytes:
                        return

    def measure_share(self) -> float:
        """The share of the limit that is in use, without what the kernel would drop; 0 without a limit."""
        if not self.max_bytes:
            return 0.0
        used, dropped = self._names
        dropped_bytes = 0
        try:
            for line in (self._folder / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == dropped:
                    dropped_bytes = int(value)
        except OSError:
            pass
        return (self._read_number(used) - dropped_bytes) / self.max_bytes

    def _read_number(self, name: str) -> int:
        """The number in a file; 0 where there is none, "max", or more than any machine has."""
        try:
            number = int((self._folder / name).read_text())
        except (OSError, ValueError):
            return 0
        return number if number < 1 << 60 else 0
