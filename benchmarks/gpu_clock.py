# SPDX-License-Identifier: Apache-2.0
"""How exactly the device clock places events on a real GPU, and what its calls cost there.

    python -m benchmarks.gpu_clock [--json FILE]

Needs torch with CUDA and this checkout, no vLLM; 90 s at most. The truth is an event between two reads
of the host's clock, taken with the device idle before and after each phase; the clocks' drift follows
from the two. Goals are for errors, calls that wait, and a marked step's cost.
tests/benchmarks/test_figures.py runs it on the simulated device.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.figures import Figure, build_figure, build_figure_parser, report_figures
from benchmarks.gpu_device import CudaGpu, Gpu
from ttft_otel.hooks.worker import device
from ttft_otel.model.statistics import compute_quantile
from ttft_otel.tracing import clock

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
WAIT_STEPS: Final = 20
WARM_UP_STEPS: Final = 20
MAX_STEP_US: Final = 10


@dataclass(frozen=True, slots=True)
class Reference:
    """A CUDA event whose time on the host's clock is known.

    at_us: that time, the middle of an interval. width_us: the interval's length.
    """

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
        is_pending = step_clock.note_pending(stamps, -1)
        wait()
        if is_pending:
            step_clock.note_reached(stamps)
        places, _, _ = step_clock.place_stamps(stamps)
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


def count_waits(gpu: Gpu) -> Figure:
    """Of the calls that a step makes of the clock, with work queued: how many wait for the device."""
    step_clock = device.DeviceClock(gpu.make_event, gpu.is_idle)
    waits = 0
    for _ in range(WAIT_STEPS):
        gpu.queue_work(IDLE_WORK_US)
        try:
            with gpu.forbid_waits():
                stamps = step_clock.open_step()
                step_clock.add_stamp(stamps)
                step_clock.note_pending(stamps, -1)
                step_clock.place_stamps(stamps)
        except RuntimeError:
            waits += 1
        gpu.synchronize()
        step_clock.place_stamps(stamps)
    return build_figure([waits], 0)


def measure_step(gpu: Gpu) -> Figure:
    """What a marked step costs, microseconds: three events, a look before the wait, the reading."""
    step_clock = device.DeviceClock(gpu.make_event, gpu.is_idle)
    spent_us = 0
    for number in range(CALLS // 8 + WARM_UP_STEPS):
        began = clock.now_us()
        stamps = step_clock.open_step()
        for _ in range(3):
            step_clock.add_stamp(stamps)
        is_pending = step_clock.note_pending(stamps, -1)
        noted = clock.now_us()
        gpu.synchronize()
        reading = clock.now_us()
        if is_pending:
            step_clock.note_reached(stamps)
        step_clock.place_stamps(stamps)
        step_clock.release_stamps(stamps)
        if number >= WARM_UP_STEPS:  # from then on no event is made any more
            spent_us += clock.now_us() - reading + noted - began
    return build_figure([spent_us / (CALLS // 8)], MAX_STEP_US)


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
    # Eight: five of a step, and some of an encoder's or a connector's.
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
        [compute_quantile((abs(error) for error in errors), 0.99)], MAX_IDLE_ERROR_US
    )
    for work_us in BUSY_WORK_US:
        errors, _ = run_phase(gpu, work_us, BUSY_STEPS, QUEUED_STEPS)
        figures[f"place_error_busy_{work_us // 1000}_ms_p99_us"] = build_figure(
            [compute_quantile((abs(error) for error in errors), 0.99)], MAX_BUSY_ERROR_US
        )
    figures["steps_that_wait"] = count_waits(gpu)
    figures["marked_step_us"] = measure_step(gpu)
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
    options = build_figure_parser(__doc__).parse_args()
    return report_figures(measure_clock_figures(CudaGpu()), options.json)


if __name__ == "__main__":
    sys.exit(main())
