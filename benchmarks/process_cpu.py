# SPDX-License-Identifier: Apache-2.0
"""CPU time of another process, for benchmarks that compare what processes use."""

from __future__ import annotations

import time


def read_process_cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used, to the nanosecond; /proc's stat counts 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) makes of a pid
