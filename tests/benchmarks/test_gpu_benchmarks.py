# SPDX-License-Identifier: Apache-2.0
"""The benchmarks for a GPU, dry: on a simulated device and simulated servers, right and wrong ones."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hooks.device.accelerator import SimulatedDevice, SimulatedEvent, SimulatedHost, SimulatedStream

from benchmarks import gpu_clock, gpu_serve, gpu_servers
from benchmarks.gpu_servers import ServeAnswer
from lab import tiny_models
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


STAGES = ("queue", "dispatch", "encoder.compute", "prefill.compute", "sample", "output")


class SimulatedServer:
    """One request at a time on a device; `told_in`: a stage that gets what another one took.

    unattributed_ms: of every answer; lost_by_sleep_ms: more of it after a sleep.
    """

    lost_by_sleep_ms = 0.0

    def __init__(self, told_in: str = "", unattributed_ms: float = 0.0) -> None:
        self.told_in = told_in
        self.unattributed_ms = unattributed_ms
        self.delays: dict[str, float] = {}
        self.chance = random.Random(5)
        self.streams = 0

    def ask(self, seed: int, image: bool = False, tokens: int = 8) -> ServeAnswer:
        """Every stage takes about a millisecond, and its delay."""
        return self._answer(seed, image, tokens, waited_ms=0.0)

    def ask_many(
        self, seeds: Sequence[int], image: bool = False, tokens: int = 8
    ) -> list[ServeAnswer]:
        """They wait for each other."""
        step_ms = 1 + sum(self.delays.values())
        return [
            self._answer(seed, image, tokens, place * step_ms) for place, seed in enumerate(seeds)
        ]

    def _answer(self, seed: int, image: bool, tokens: int, waited_ms: float) -> ServeAnswer:
        stages = {name: self.chance.uniform(0.8, 1.2) for name in STAGES}
        if not image:
            del stages["encoder.compute"]
        stages["dispatch"] += waited_ms
        for place, ms in self.delays.items():
            own = gpu_serve.STAGE_BY_PLACE[place]
            if own in stages:
                stages[self.told_in or own] += ms
        gaps = tuple(self.chance.randrange(990, 1010) for _ in range(tokens - 1))
        return ServeAnswer(stages, self.unattributed_ms, f"answer to {seed}", gaps)

    def sleep_and_wake(self) -> None:
        """After that something may be lost."""
        self.unattributed_ms += self.lost_by_sleep_ms

    @contextlib.contextmanager
    def delay_device(self, place: str, ms: float) -> Iterator[None]:
        """For the block."""
        self.delays = {place: ms}
        yield
        self.delays = {}

    @contextlib.contextmanager
    def stream_beside(self, count: int) -> Iterator[None]:
        """For the block."""
        self.streams = count
        yield
        self.streams = 0


def measure(traced: SimulatedServer, encoder: SimulatedServer) -> dict[str, bool]:
    """Which goals are met."""
    servers = gpu_serve.ServerSet(traced, SimulatedServer(), encoder)
    figures = gpu_serve.measure_servers(servers)
    return {name: figure["met"] for name, figure in figures.items() if figure["goal"] is not None}


def test_right() -> None:
    """Servers that tell the truth meet every goal; there is one for each sentence of the job."""
    met = measure(SimulatedServer(), SimulatedServer())

    assert all(met.values()), met
    places = [f"{place}{beside}" for place in gpu_serve.STAGE_BY_PLACE
              for beside in ("", "_beside_32_streams")]  # fmt: skip
    assert met.keys() == {
        *("closed_share", "encoder_only_closed_share", "equal_texts_share", "token_gap_ratio"),
        "closed_after_sleep_share",
        *("saturated_wait_ms", "saturated_output_share"),
        *(f"{place}_{kind}_ms" for place in places for kind in ("error", "elsewhere")),
    }


def test_told_elsewhere() -> None:
    """A delay that shows in another stage misses both goals of its place."""
    met = measure(SimulatedServer(told_in="output"), SimulatedServer())

    assert not met["forward_error_ms"] and not met["forward_elsewhere_ms"]
    assert not met["sample_beside_32_streams_elsewhere_ms"]
    assert met["closed_share"]


def test_open() -> None:
    """Unattributed time misses the goals of closing."""
    met = measure(SimulatedServer(unattributed_ms=0.001), SimulatedServer(unattributed_ms=0.001))

    assert not met["closed_share"] and not met["encoder_only_closed_share"]
    assert met["forward_error_ms"]


def test_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost once a server has slept misses the goal after it, and not the one before."""
    monkeypatch.setattr(SimulatedServer, "lost_by_sleep_ms", 1.0)
    met = measure(SimulatedServer(), SimulatedServer())

    assert met["closed_share"] and not met["closed_after_sleep_share"]


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines and environments: graphs as wanted, nothing of a CPU build, delays only if traced."""
    monkeypatch.setattr(tiny_models, "build_model", lambda recipe: tmp_path)
    traced = gpu_servers.build_gpu_command("a", "v2", False, tmp_path / "control.json")
    untraced = gpu_servers.build_gpu_command("b", "v1", True, None)
    encode = gpu_servers.build_encode_command("v1", True, tmp_path)

    at = traced.argv.index("--compilation-config")
    assert json.loads(traced.argv[at + 1])["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert "--enforce-eager" not in traced.argv and "TRITON_ATTN" not in traced.argv
    assert traced.env["VLLM_USE_V2_MODEL_RUNNER"] == "1" and traced.env["TTFT_OTEL"] == "1"
    assert "inject" in traced.env["PYTHONPATH"]
    assert "TTFT_OTEL" not in untraced.env and "inject" not in untraced.env["PYTHONPATH"]
    assert "TRITON_ATTN" in untraced.argv and "TORCH_SDPA" in untraced.argv
    assert "ec_producer" in " ".join(encode.argv)
