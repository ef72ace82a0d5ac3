# SPDX-License-Identifier: Apache-2.0
"""How exactly the device clock places events on a real GPU, and what its calls cost there.

    python -m benchmarks.gpu_clock [--json FILE]

Needs torch with CUDA and this checkout, no vLLM; 90 s at most. The truth is an event between two reads
of the host's clock, taken with the device idle before and after each phase; the clocks' drift follows
from the two. Goals are for errors, microseconds of cost stand beside them without one.
tests/benchmarks/test_gpu_clock.py runs it on the simulated device.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.figures import Figure, build_figure, report_figures
from ttft_otel import clock
from ttft_otel.hooks import device

# The best of many: most tries are disturbed by an interrupt or a slow call.
REFERENCE_TRIES: Final = 300
IDLE_STEPS: Final = 200
IDLE_WORK_US: Final = 2_000
BUSY_STEPS: Final = 300
# A decode step, a chunk of prefill, and one of a large model, by order of magnitude.
BUSY_WORK_US: Final = (1_000, 10_000, 40_000)
QUEUED_STEPS: Final = 2  # as vLLM under async scheduling
# On an idle stream an event happens when it is recorded, so that the host's time is nearly known;
# with work queued only bounds are known, which come closer with every step.
MAX_IDLE_ERROR_US: Final = 30
MAX_BUSY_ERROR_US: Final = 200
MAX_GRAPH_ERROR_US: Final = 100
CALLS: Final = 2_000


class Gpu(Protocol):
    """A device with one stream, as CudaGpu and the simulated one are."""

    def make_event(self) -> Any:
        """An event with timing."""

    def is_idle(self) -> bool:
        """Whether all queued work is done."""

    def queue_work(self, us: float) -> None:
        """Queue work of about `us` microseconds; returns at once."""

    def queue_copy(self) -> Callable[[], None]:
        """Queue the copy of an output; returns the call that sleeps until it is complete."""

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def queue_graph(self) -> tuple[Callable[[], None], float]:
        """A captured graph's replay, and how long it takes by the host's clock, in microseconds."""


class CudaGpu:
    """The current CUDA device. Work is a kernel that spins for a number of cycles."""

    def __init__(self) -> None:
        import torch  # 3 s, and not installed where the simulated device is measured

        self.torch = torch
        self.stream = torch.cuda.current_stream()
        self.copy_stream = torch.cuda.Stream()
        # Pinned, as vLLM's output buffers: a copy to pageable memory would wait on the host.
        self.source = torch.zeros(64, device="cuda")
        self.target = torch.zeros(64, pin_memory=True)
        # A guess, with which the true rate is measured: it differs from GPU to GPU.
        self.cycles_per_us = 1000.0
        self.cycles_per_us *= 20_000 / self._measure_work(20_000)

    def _measure_work(self, us: float) -> float:
        first, last = self.make_event(), self.make_event()
        self.queue_work(us)  # warm-up
        first.record()
        self.queue_work(us)
        last.record()
        self.synchronize()
        return float(first.elapsed_time(last)) * 1000

    def make_event(self) -> Any:
        """As choose_clock() makes them."""
        return self.torch.cuda.Event(enable_timing=True)

    def is_idle(self) -> bool:
        """As choose_clock() asks."""
        return bool(self.torch.cuda.current_stream().query())

    def queue_work(self, us: float) -> None:
        """Spin."""
        # Spins on the device without using its memory: lengths do not depend on data.
        self.torch.cuda._sleep(int(us * self.cycles_per_us))

    def queue_copy(self) -> Callable[[], None]:
        """On a stream of its own, with a blocking event, as vLLM's AsyncOutput."""
        # Blocking: the host sleeps until it is done, as vLLM's does, instead of spinning.
        done = self.torch.cuda.Event(blocking=True)
        self.copy_stream.wait_stream(self.stream)
        with self.torch.cuda.stream(self.copy_stream):
            self.target.copy_(self.source, non_blocking=True)
            done.record()
        return done.synchronize  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """The whole device."""
        self.torch.cuda.synchronize()

    def queue_graph(self) -> tuple[Callable[[], None], float]:
        """Ten pieces of work of 1 ms."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for _ in range(10):
                self.queue_work(1_000)
        lengths = []
        for _ in range(5):
            self.synchronize()
            began = clock.now_us()
            graph.replay()
            self.synchronize()
            lengths.append(clock.now_us() - began)
        # The least: whatever disturbs makes it longer, never shorter.
        return graph.replay, float(min(lengths))


@dataclass(frozen=True, slots=True)
class Reference:
    """An event whose host time is known to half of `width_us`."""

    event: Any
    at_us: float
    width_us: float


def take_reference(gpu: Gpu) -> Reference:
    """The event with the least time between two reads of the host's clock around it."""
    best = Reference(None, 0.0, float("inf"))
    for _ in range(REFERENCE_TRIES):
        event = gpu.make_event()
        # On an idle device an event happens between the two reads of the clock, and nowhere else.
        gpu.synchronize()
        before = clock.now_us()
        event.record()
        gpu.synchronize()
        after = clock.now_us()
        if after - before < best.width_us:
            best = Reference(event, (before + after) / 2, after - before)
    return best


class TruthLine:
    """Host times of events between two references; drift_ppm: of the device against the host."""

    def __init__(self, first: Reference, last: Reference) -> None:
        self.first = first
        elapsed_us = float(first.event.elapsed_time(last.event)) * 1000
        # Clocks of host and device drift apart by some millionths, linearly over a phase.
        self.rate = (last.at_us - first.at_us) / elapsed_us
        self.drift_ppm = (1 / self.rate - 1) * 1e6

    def find_time(self, event: Any) -> float:
        """When `event` happened."""
        elapsed_ms = float(self.first.event.elapsed_time(event))
        return self.first.at_us + elapsed_ms * 1000 * self.rate


def run_phase(gpu: Gpu, work_us: float, steps: int, queued: int) -> tuple[list[float], TruthLine]:
    """Steps of work, each read when `queued` of them are under way; the errors of all places.

    queued: 1 leaves the device idle between steps.
    """
    # A new clock for each phase: what it has learnt of its anchor must not help the next one.
    step_clock = device.DeviceClock(gpu.make_event, gpu.is_idle)
    first = take_reference(gpu)
    under_way: deque[tuple[device.DeviceStamps, Callable[[], None]]] = deque()
    placed: list[tuple[Any, int]] = []

    def read_step() -> None:
        stamps, wait = under_way.popleft()
        step_clock.note_pending(stamps, -1)
        wait()
        places = step_clock.place_stamps(stamps).places
        placed.extend((event, place) for (event, _), place in zip(stamps, places, strict=True))

    for _ in range(steps):
        stamps = step_clock.open_step()
        step_clock.add_stamp(stamps)
        gpu.queue_work(work_us)
        step_clock.add_stamp(stamps)
        under_way.append((stamps, gpu.queue_copy()))
        # The oldest is read while younger ones run, as an engine does that schedules ahead.
        if len(under_way) == queued:
            read_step()
    while under_way:
        read_step()
    truth = TruthLine(first, take_reference(gpu))
    # 0 is "not reached yet": no place, so no error.
    return [place - truth.find_time(event) for event, place in placed if place], truth


def find_percentile(values: list[float], share: float = 0.99) -> float:
    """The value that `share` of `values` do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure_calls(gpu: Gpu) -> dict[str, Figure]:
    """What a stamp and the reading of eight of them cost, and how often a new event is pending."""
    step_clock = device.DeviceClock(gpu.make_event, gpu.is_idle)
    pending = 0
    for _ in range(CALLS):
        event = gpu.make_event()
        event.record()
        pending += not event.query()
    gpu.synchronize()
    began = clock.now_us()
    steps = [step_clock.open_step() for _ in range(CALLS // 8)]
    opened = clock.now_us()
    # Eight: five of a step, and some of an encoder's or a connector's (docs/performance.md).
    for stamps in steps:
        for _ in range(8):
            step_clock.add_stamp(stamps)
    stamped = clock.now_us()
    gpu.synchronize()
    reading = clock.now_us()
    for stamps in steps:
        step_clock.place_stamps(stamps)
        step_clock.release_stamps(stamps)
    read = clock.now_us()
    return {
        "pending_after_record_share": build_figure([pending / CALLS]),
        "open_step_us": build_figure([(opened - began) / len(steps)]),
        "stamp_us": build_figure([(stamped - opened) / (8 * len(steps))]),
        "place_of_8_us": build_figure([(read - reading) / len(steps)]),
    }


def measure_clock_figures(gpu: Gpu) -> dict[str, Figure]:
    """All figures."""
    figures: dict[str, Figure] = {}
    errors, truth = run_phase(gpu, IDLE_WORK_US, IDLE_STEPS, 1)
    figures["drift_ppm"] = build_figure([truth.drift_ppm])
    figures["reference_width_us"] = build_figure([truth.first.width_us])
    figures["place_error_idle_p99_us"] = build_figure(
        [find_percentile([abs(error) for error in errors])], MAX_IDLE_ERROR_US
    )
    for work_us in BUSY_WORK_US:
        errors, _ = run_phase(gpu, work_us, BUSY_STEPS, QUEUED_STEPS)
        figures[f"place_error_busy_{work_us // 1000}_ms_p99_us"] = build_figure(
            [find_percentile([abs(error) for error in errors])], MAX_BUSY_ERROR_US
        )
    figures |= measure_calls(gpu)
    replay, length_us = gpu.queue_graph()
    first, last = gpu.make_event(), gpu.make_event()
    first.record()
    replay()
    last.record()
    gpu.synchronize()
    error_us = abs(float(first.elapsed_time(last)) * 1000 - length_us)
    figures["graph_length_error_us"] = build_figure([error_us], MAX_GRAPH_ERROR_US)
    return figures


def main() -> int:
    """Measure, print, and write the file that was asked for; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write {figure: {value, goal, met}} there")
    options = parser.parse_args()
    return report_figures(measure_clock_figures(CudaGpu()), options.json)


if __name__ == "__main__":
    sys.exit(main())
