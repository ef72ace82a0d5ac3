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
        for line in _read_text(membership).splitlines():
            _, controllers, path = line.split(":", 2)
            folder, limit, *names = _VERSIONS.get(controllers, ("", ""))
            # A container may see its own group as the root, whatever its name.
            for group in (root / folder / path.lstrip("/"), root / folder):
                text = _read_text(group / limit).strip() if names else ""
                # "max", or in version 1 a number that no machine has.
                if text.isdigit() and len(text) < 19 and not self.max_bytes:
                    self._group, self._names, self.max_bytes = group, names, int(text)

    def measure_share(self) -> float:
        """The share of the limit that is in use, without what the kernel would drop; 0 without a limit."""
        if not self.max_bytes:
            return 0.0
        used, dropped = self._names
        lines = _read_text(self._group / "memory.stat").splitlines()
        statistics = dict(line.split(" ", 1) for line in lines)
        used_bytes = int(_read_text(self._group / used) or 0)
        return (used_bytes - int(statistics.get(dropped, 0))) / self.max_bytes


def _read_text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""
