# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the device clock, run on the simulated device: it finds its drift and its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hooks.device.accelerator import SimulatedDevice, SimulatedEvent, SimulatedHost, SimulatedStream

from benchmarks import gpu_clock
from ttft_otel.hooks.worker import device
from ttft_otel.tracing import clock

GRAPH_US = 10_000


class SimulatedGpu:
    """What gpu_clock.py asks of a device, simulated."""

    def __init__(self, host: SimulatedHost, drift_ppm: float) -> None:
        self.host = host
        self.device = SimulatedDevice(host, drift_ppm)
        self.copy_stream = SimulatedStream(self.device)
        self.make_event = self.device.make_event
        self.is_idle = self.device.is_idle

    def queue_work(self, us: float) -> None:
        """Host work and device work."""
        self.host.work(300)
        self.device.main.queue_work(us)

    def queue_copy(self) -> Callable[[], None]:
        """A copy behind the work."""
        self.copy_stream.wait_stream(self.device.main)
        event = self.device.make_event()
        _, event.at = self.copy_stream.queue_work(12)
        return event.synchronize

    def synchronize(self) -> None:
        """Wait for the stream; a spinning host wakes up at once."""
        self.host.sleep(max(0.0, self.device.main.busy_until - self.host.at) + 3)

    @contextlib.contextmanager
    def forbid_waits(self) -> Iterator[None]:
        """Nobody may sleep until an event has happened."""

        def refuse(event: object) -> None:
            raise RuntimeError("called a synchronizing operation")

        with mock.patch.object(SimulatedEvent, "synchronize", refuse):
            yield

    def queue_graph(self) -> tuple[Callable[[], None], float]:
        """A replay of known length."""

        def replay() -> None:
            self.device.main.queue_work(GRAPH_US)

        return replay, float(GRAPH_US)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """A device whose clock is 20 ppm fast."""
    host = SimulatedHost()
    monkeypatch.setattr(clock, "now_us", host)
    monkeypatch.setattr(clock, "count_switches", host.count_switches)
    return SimulatedGpu(host, 20.0)


def test_figures(gpu: SimulatedGpu) -> None:
    """Drift and places come out as they are; every goal is met."""
    figures = gpu_clock.measure_clock_figures(gpu)

    assert figures["drift_ppm"]["value"] == pytest.approx(20, abs=8)
    assert {name for name, figure in figures.items() if figure["goal"] is not None} == {
        "place_error_idle_p99_us",
        *(f"place_error_busy_{ms}_ms_p99_us" for ms in (1, 10, 40)),
        "graph_length_error_us",
        "steps_that_wait",
        "marked_step_us",
    }
    assert all(figure["met"] for figure in figures.values()), figures
    assert figures["stamp_us"]["value"] > 0


def test_wrong_places(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look before the wait, places under load are wrong, and the benchmark says so."""

    def look_away(self: device.DeviceClock, stamps: Any, awaited: int) -> bool:
        return False

    monkeypatch.setattr(device.DeviceClock, "note_pending", look_away)
    gpu.is_idle = lambda: False  # type: ignore[method-assign]
    figures = gpu_clock.measure_clock_figures(gpu)

    assert not figures["place_error_busy_40_ms_p99_us"]["met"]


def test_a_clock_that_waits(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that synchronizes is found out."""
    place = device.DeviceClock.place_stamps

    def wait_and_place(self: device.DeviceClock, stamps: Any) -> device.Placement:
        stamps[-1][0].synchronize()
        return place(self, stamps)

    assert gpu_clock.count_waits(gpu)["met"]
    monkeypatch.setattr(device.DeviceClock, "place_stamps", wait_and_place)

    assert gpu_clock.count_waits(gpu)["value"] == gpu_clock.WAIT_STEPS
