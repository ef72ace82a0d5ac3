# SPDX-License-Identifier: Apache-2.0
"""Read the CPU time of another process from the kernel; benchmarks compare what processes use."""

from __future__ import annotations

import time


def read_process_cpu_s(pid: int) -> float:
    """Seconds of CPU that all threads of a process have used, to the nanosecond; /proc's stat counts 10 ms.

    Raises OSError for a process that has ended.
    """
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) makes of a pid
