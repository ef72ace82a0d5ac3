# SPDX-License-Identifier: Apache-2.0
"""One clock for all processes of a host, and its wall time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ttft_otel import testing
from ttft_otel.tracing import clock


def test_now() -> None:
    """Marks are microseconds of the system's monotonic clock, the same in another process."""
    code = "from ttft_otel.tracing import clock; print(clock.now_us(), clock.read_boot_number())"
    before = clock.now_us()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    theirs, boot = map(int, done.stdout.split())

    assert before < theirs < clock.now_us()
    assert boot == clock.get_boot_number() != 0


def test_calibration() -> None:
    """Wall time is that of the system, within the calibration's own bound."""
    offset, bound = clock.measure_wall_offset()

    assert 0 <= bound < 1_000_000_000
    assert abs(time.time_ns() - time.monotonic_ns() - offset) < bound + 50_000_000


def test_wall() -> None:
    """A mark's wall time lies where the mark lies."""
    mark = clock.now_us()
    at = clock.to_wall_ns(mark)

    assert abs(time.time_ns() - at) < 1_000_000_000
    assert clock.to_wall_ns(mark + 1_000_000) - at > 999_000_000


def test_frozen() -> None:
    """A test's clock stands still, and is put back."""
    real = clock.now_us
    with testing.frozen_clock(5) as still:
        assert clock.now_us() == 5
        still.tick(3)
        assert clock.now_us() == 8

    assert clock.now_us is real


def test_time_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes of one host whose time namespaces differ have different clocks, and boot numbers."""
    offsets = tmp_path / "timens_offsets"
    monkeypatch.setattr(clock, "_OFFSETS_FILE", str(offsets))
    numbers = []
    for line in ("monotonic           0         0", "monotonic      864000         0"):
        offsets.write_text(f"{line}\nboottime            0         0\n")
        numbers.append(clock.read_boot_number())
    offsets.unlink()  # a kernel without them

    assert clock.read_boot_number() == numbers[0] != numbers[1]
