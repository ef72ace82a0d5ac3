# SPDX-License-Identifier: Apache-2.0
"""One clock for all marks: CLOCK_MONOTONIC in integer microseconds, and its wall time with its error."""

from __future__ import annotations

import functools
import time
import zlib
from typing import Final

_BOOT_FILE: Final = "/proc/sys/kernel/random/boot_id"


def now() -> int:
    """Microseconds of CLOCK_MONOTONIC, the same in every process of this host."""
    return time.monotonic_ns() // 1000


def calibrate(tries: int = 5) -> tuple[int, int]:
    """Offset (wall - monotonic) and its error bound, both in ns; the tightest of some bracketed reads."""
    best = (0, 1 << 62)
    for _ in range(tries):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        if after - before < best[1]:
            best = (wall - (before + after) // 2, after - before)
    return best


def wall_ns(mark: int) -> int:
    """Unix nanoseconds of a mark; calibrated at each call, so a stepped wall clock is followed."""
    return mark * 1000 + calibrate(1)[0]


def boot() -> int:
    """32-bit number of this host's boot: marks of processes with another one are not comparable."""
    try:
        with open(_BOOT_FILE, "rb") as file:
            return zlib.crc32(file.read().strip())
    except OSError:
        return 0


@functools.lru_cache(maxsize=1)
def boot_once() -> int:
    """boot(), read once: a boot does not change under a process, its fork children included."""
    return boot()
