# SPDX-License-Identifier: Apache-2.0
"""One clock for all processes of a host, and its wall time."""

from __future__ import annotations

import subprocess
import sys
import time

from ttft_otel import clock, testing


def test_now() -> None:
    """Marks are microseconds of the system's monotonic clock, the same in another process."""
    code = "from ttft_otel import clock; print(clock.now(), clock.boot())"
    before = clock.now()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    theirs, boot = map(int, done.stdout.split())

    assert before < theirs < clock.now()
    assert boot == clock.boot_once() != 0


def test_calibration() -> None:
    """Wall time is that of the system, within the calibration's own bound."""
    offset, bound = clock.calibrate()

    assert 0 <= bound < 1_000_000_000
    assert abs(time.time_ns() - time.monotonic_ns() - offset) < bound + 50_000_000


def test_wall() -> None:
    """A mark's wall time lies where the mark lies."""
    mark = clock.now()
    at = clock.wall_ns(mark)

    assert abs(time.time_ns() - at) < 1_000_000_000
    assert clock.wall_ns(mark + 1_000_000) - at > 999_000_000


def test_frozen() -> None:
    """A test's clock stands still, and is put back."""
    real = clock.now
    with testing.frozen(5) as still:
        assert clock.now() == 5
        still.tick(3)
        assert clock.now() == 8

    assert clock.now is real
