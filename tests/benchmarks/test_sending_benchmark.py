# SPDX-License-Identifier: Apache-2.0
"""The benchmark of sending times what it says, with a real exporter behind the socket."""

from __future__ import annotations

import time

from benchmarks import sending


def burn_cpu(seconds: float) -> None:
    """Compute for so much CPU time."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def test_times() -> None:
    """Waiting is wall time alone, computing both; the pauses between records are neither."""
    waiting, computing = sending.PacedTimes(), sending.PacedTimes()
    waiting.add_round([b""] * 3, lambda _: time.sleep(0.003), 0.006)
    computing.add_round([b""] * 3, lambda _: burn_cpu(0.003), 0.006)
    assert waiting.wall_us[0] >= 3000 > waiting.cpu_us[0]
    assert computing.wall_us[0] >= computing.cpu_us[0] >= 3000 > computing.cpu_us[0] / 2


def test_figures() -> None:
    """Each record is sent, in every round, and the ratios are those of their rounds."""
    times = sending.measure_sending(20, 2)
    figures = sending.compute_sending_figures(times)
    assert {len(each.cpu_us) for each in times.values()} == {2}
    assert all(0 < us for each in times.values() for us in (*each.cpu_us, *each.wall_us))
    ratios = [
        ours / reference
        for ours, reference in zip(times["sending"].cpu_us, times["sdk_span"].cpu_us, strict=True)
    ]
    assert figures["sending_per_sdk_span"]["spread"] == [
        round(bound, 2) for bound in (min(ratios), max(ratios))
    ]
