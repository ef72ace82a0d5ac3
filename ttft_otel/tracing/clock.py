# SPDX-License-Identifier: Apache-2.0
"""The clock of all marks: CLOCK_MONOTONIC in integer microseconds, and its conversion to wall time."""

from __future__ import annotations

import functools
import resource
import time
import zlib
from time import monotonic_ns as monotonic_ns  # hooks of each step divide it in line
from typing import Final

# Nanoseconds between the two monotonic reads around a wall-clock read, at most; 100 ns when the
# process is not preempted in between.
MAX_BRACKET_NS: Final = 20_000
MAX_READS: Final = 5
# Error bound of to_wall_ns(): half a bracket, plus the rounding of a mark to one microsecond. A read
# that was preempted is repeated; on an overloaded machine one of five was always undisturbed.
WALL_ERROR_US: Final = MAX_BRACKET_NS // 2000 + 1
# Which clock placed a worker's marks; the words for them are keys.CLOCK_WORDS.
CLOCK_HOST: Final = 0
CLOCK_DEVICE: Final = 1  # the device's events, placed on the host's time
CLOCK_LENGTHS: Final = 2  # the device's events, of which only the lengths are known
CLOCK_NONE: Final = 3  # the platform has no timing events
_BOOT_FILE: Final = "/proc/sys/kernel/random/boot_id"
_OFFSETS_FILE: Final = "/proc/self/timens_offsets"  # of this process's time namespace


def now_us() -> int:
    """CLOCK_MONOTONIC in microseconds; comparable between all processes of this host."""
    return monotonic_ns() // 1000


def count_switches() -> int:
    """How often the calling thread has gone to sleep (voluntary context switches), 0.3 us."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def to_wall_ns(mark: int) -> int:
    """Unix time in nanoseconds of `mark` (microseconds of now_us()).

    The offset is measured at each call, so that steps of the wall clock (NTP) are followed: the wall clock
    is read between two monotonic reads, and of MAX_READS such brackets the tightest counts.
    """
    offset = 0
    tightest = 1 << 62
    for _ in range(MAX_READS):
        before = monotonic_ns()
        wall = time.time_ns()
        after = monotonic_ns()
        if after - before < tightest:
            tightest = after - before
            offset = wall - (before + after) // 2
            if tightest <= MAX_BRACKET_NS:  # nearly always the first
                break
    return mark * 1000 + offset


@functools.lru_cache(maxsize=1)
def get_boot_number() -> int:
    """A 32-bit number that identifies this boot of this host, and the offset of this process's time
    namespace; 0 where the kernel does not give it. The same in all children that it forks.

    Marks of processes with different boot numbers are not comparable: CLOCK_MONOTONIC starts at boot.
    """
    try:
        with open(_BOOT_FILE, "rb") as file:
            boot = file.read().strip()
    except OSError:
        return 0
    try:
        with open(_OFFSETS_FILE, "rb") as file:
            offsets = b" ".join(file.readline().split())  # "monotonic <seconds> <nanoseconds>"
    except OSError:  # a kernel without time namespaces
        offsets = b""
    return zlib.crc32(boot + (b"" if offsets in (b"", b"monotonic 0 0") else offsets))
