# SPDX-License-Identifier: Apache-2.0
"""The program for a GPU with the runners' order of calls, on the simulated one: it tells right from wrong."""

from __future__ import annotations

from typing import Any

import pytest

from hooks.device import gpu_runners
from hooks.device.accelerator_cases import AcceleratorCase, simulate_device
from lab import gpu_run
from ttft_otel.hooks.worker import device


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, kinds: dict[str, Any]) -> None:
    """Few steps, with the hooks around the runners."""
    monkeypatch.setattr(gpu_runners, "PHASE_US", 400_000)


@pytest.mark.full
def test_figures() -> None:
    """Every letter has its figures, and on a device that is as the clock takes it to be all goals are met."""
    figures = gpu_runners.measure_runners(simulate_device)
    shared = gpu_runners.measure_idle_latency(simulate_device, one_queue=True)

    assert {name.partition("_")[0] for name in figures} == {"a", "b", "c", "d", "h"}
    for name in ("0.26_v1", "0.26_v2", "0.29_v2", "0.32_v1", "0.33_v2"):
        assert figures[f"d_{name}_place_p99_us"]["goal"] == gpu_runners.MAX_PLACE_ERROR_US
    missed = {name for name, figure in figures.items() if not figure["met"]}
    # A main thread in pure Python, which the simulated reader waits for, too.
    assert missed <= {"c_pure_python_place_p99_us"}, missed
    one = figures["a_idle_beside_a_busy_stream_us"]["value"]
    assert shared["a_one_connection_beside_a_busy_stream_us"]["value"] > 10 * one


@pytest.mark.full
def test_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release in which the forward begins before the hook sees it misses its goal; the others do not."""
    runner = gpu_runners.AcceleratedRunnerV2Of026
    begin = runner.begin_forward

    def begin_late(self: Any) -> Any:
        mark = self.device.main.mark()
        self.device.main.queue_work(3_000)
        begin(self)
        return mark

    monkeypatch.setattr(runner, "begin_forward", begin_late)
    figures = gpu_runners.measure_orders(simulate_device)

    missed = {name for name, figure in figures.items() if not figure["met"]}
    assert missed == {"d_0.26_v2_place_p99_us", "d_0.26_v2_told_share"}


@pytest.mark.full
def test_clock_that_looks_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look before the wait places under load are wrong, and no told error covers them."""

    def simulate_busy(case: AcceleratorCase) -> Any:
        made = simulate_device(case)
        made.is_idle = lambda: False  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(device.DeviceClock, "note_pending", lambda *_: False)
    limits = {"PHASE_US": 4_000_000, "STEP_MS": (40,), "READER_TAILS_MS": ()}
    for name, value in limits.items():
        monkeypatch.setattr(gpu_runners, name, value)
    figures = gpu_runners.measure_places(simulate_busy)

    assert not figures["b_40_ms_device_bound_place_p99_us"]["met"]


def test_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that takes longer than it is told to is found out."""

    def simulate_slow(case: AcceleratorCase) -> Any:
        made = simulate_device(case)
        queue = made.main.queue_work
        made.main.queue_work = lambda us: queue(us * 1.01)  # type: ignore[method-assign]
        return made

    assert gpu_runners.measure_lengths(simulate_device)["h_length_error_us"]["met"]
    assert not gpu_runners.measure_lengths(simulate_slow)["h_length_error_us"]["met"]


def test_known_to_the_machine() -> None:
    """scripts/gpu run knows each program, and what it needs."""
    assert gpu_run.MODULES.keys() == gpu_run.PIECES_NEEDED.keys()
    assert gpu_run.MODULES["runners"] == gpu_runners.__name__
