# SPDX-License-Identifier: Apache-2.0
"""Both model runners' order of calls, of several releases of vLLM, on a GPU's own streams under our hooks.

    scripts/gpu run runners [--json FILE]

Needs torch with CUDA and what scripts/gpu packs as `clock`, no vLLM; six minutes. Figures begin with the
letters of what a GPU has to show: how late events of an idle device are (a), places and told errors by the
steps' length (b) and beside late readers (c), each release's order of calls (d), lengths (h). Letters e, f
and g need vLLM itself: scripts/gpu run serve. test_gpu_runners.py has a simulated device for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from benchmarks.figures import Figure, build_figure, build_figure_parser, report_figures
from benchmarks.gpu_clock import TruthLine, take_reference
from benchmarks.gpu_device import CudaGpu
from hooks.device.accelerated_runners import (
    AcceleratedRunnerV1,
    AcceleratedRunnerV2,
    AcceleratedRunnerV2Of026,
    AcceleratedRunnerV2Of033,
    StepWork,
    wrap_accelerated_classes,
)
from hooks.device.accelerator_cases import LOOPS, AcceleratorCase, Judgement, run_case
from ttft_otel.hooks.worker import device as worker_device
from ttft_otel.model.statistics import compute_quantile
from ttft_otel.tracing import clock

# The order of calls of the releases; V1's is the same in all.
KINDS: Final[dict[str, type]] = {
    f"{release}_{runner}": kind
    for release, v2 in {
        "0.26": AcceleratedRunnerV2Of026,
        "0.29": AcceleratedRunnerV2,
        "0.32": AcceleratedRunnerV2,
        "0.33": AcceleratedRunnerV2Of033,
    }.items()
    for runner, kind in (("v1", AcceleratedRunnerV1), ("v2", v2))
}
NEWEST: Final = "0.33_v2"
STEP_MS: Final = (0.3, 1, 10, 40, 200)
DEVICE_BOUND_HOST_SHARE: Final = 0.05  # of what a step costs the host
READER_TAILS_MS: Final = (0.2, 1, 5)
PHASE_US: Final = 3_000_000  # of the device, for each case
MIN_STEPS, MAX_STEPS = 20, 400
MAX_PLACE_ERROR_US: Final = 150
MIN_TOLD_SHARE: Final = 0.99
OWN_CALLS_US: Final = 20  # of the hooks and of the truth's events, beyond the told error
MAX_LENGTH_ERROR_US: Final = 5
LENGTH_US: Final = 10_000
# How long the device has had nothing to do -> how often that is tried.
IDLE_TRIES: Final = {1_000: 200, 100_000: 30, 10_000_000: 3, 60_000_000: 1}
COPY_STREAM_US: Final = 5_000
ONE_CONNECTION: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
MakeDevice = Callable[[AcceleratorCase], Any]


class GpuHost:
    """This process's threads in real time; what accelerator.SimulatedHost is in virtual time."""

    def __init__(self, main_thread: str) -> None:
        self.chance = random.Random(1)
        self.main_thread = main_thread
        self.threads: list[threading.Thread] = []

    @property
    def at(self) -> float:
        return clock.now_us()

    def __call__(self) -> int:
        return clock.now_us()

    def sleep(self, us: float) -> None:
        """Without Python's lock."""
        if us > 0:
            time.sleep(us / 1e6)

    def work(self, us: float) -> None:
        """In Python, as vLLM's launches; what is longer than 0.2 ms releases the lock now and then."""
        until = clock.now_us() + us
        while (left := until - clock.now_us()) > 0:
            if left > 200:
                time.sleep(1e-4)

    def start_thread(self, target: Callable[[], None]) -> None:
        self.threads.append(threading.Thread(target=target, daemon=True))
        self.threads[-1].start()

    def make_queue(self, latency_us: float) -> queue.SimpleQueue[Any]:
        return queue.SimpleQueue()

    @contextlib.contextmanager
    def compute_beside(self) -> Iterator[None]:
        """With `main_thread` "python", a thread in pure Python while the block runs."""
        running = threading.Event()
        running.set()

        def spin() -> None:
            while running.is_set():
                sum(range(1_000))

        if self.main_thread == "python":
            self.start_thread(spin)
        try:
            yield
        finally:
            running.clear()
            for thread in self.threads:
                thread.join()


class GpuStream:
    """A CUDA stream; its marks are events of their own, whose times are known after the run."""

    def __init__(self, device: GpuDevice, stream: Any) -> None:
        self.device = device
        self.stream = stream
        self.cuda = device.gpu.torch.cuda

    def queue_work(self, us: float) -> None:
        """A kernel that spins."""
        with self.cuda.stream(self.stream):
            self.device.gpu.queue_work(us)

    def wait_stream(self, other: GpuStream) -> None:
        """Later work begins after what `other` has by now."""
        self.stream.wait_stream(other.stream)

    def make_awaited(self) -> Any:
        """As vLLM's copy events: the host sleeps until it has happened."""
        event = self.cuda.Event(blocking=True)
        event.record(self.stream)
        return event

    def mark(self) -> Any:
        event = self.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event


class GpuDevice:
    """The current CUDA device; what accelerator.SimulatedDevice is in virtual time."""

    def __init__(self, gpu: CudaGpu, case: AcceleratorCase) -> None:
        self.gpu = gpu
        self.host = GpuHost(case.main_thread)
        self.calls: Counter[str] = Counter()
        self.main = GpuStream(self, gpu.stream)
        self.make_event = gpu.make_event
        self.is_idle = gpu.is_idle
        self.synchronize = gpu.synchronize
        self.truth: TruthLine | None = None

    def make_stream(self) -> GpuStream:
        return GpuStream(self, self.gpu.torch.cuda.Stream())

    @contextlib.contextmanager
    def measure_truth(self) -> Iterator[None]:
        """References before and after the block give marks their host times."""
        first = take_reference(self.gpu)
        with self.host.compute_beside():
            yield
        self.truth = TruthLine(first, take_reference(self.gpu))

    def resolve_time(self, mark: Any) -> float:
        assert self.truth is not None
        return self.truth.find_time(mark)


def judge_places(runs: list[Judgement]) -> dict[str, Figure]:
    """Of a case's runs: the error of places, whether the told one covers it, and what was not recorded."""
    places = [compute_quantile(map(abs, run.place_errors), 0.99) for run in runs]
    told = [
        sum(error <= claimed + OWN_CALLS_US for error, claimed in run.told_errors)
        / max(len(run.told_errors), 1)
        for run in runs
    ]
    return {
        "place_p99_us": build_figure(places, MAX_PLACE_ERROR_US),
        "told_share": build_figure(told, MIN_TOLD_SHARE, at_least=True, digits=4),
        "missing": build_figure([sum(run.missing for run in runs)], 0),
    }


def name_figures(prefix: str, figures: dict[str, Figure]) -> dict[str, Figure]:
    """The figures with `prefix` before their names."""
    return {f"{prefix}_{name}": figure for name, figure in figures.items()}


def make_case(
    step_ms: float, host_share: float = 1.0, gap_us: float = 0.0, **fields: Any
) -> AcceleratorCase:
    """Steps of so much work on the device, as many as fit into PHASE_US. host_share: see StepWork."""
    steps = min(max(int(PHASE_US / (step_ms * 1000 + gap_us)), MIN_STEPS), MAX_STEPS)
    work = StepWork(step_ms * 1000, **fields.pop("work", {})).scale_host(host_share)
    return AcceleratorCase("", work, steps=steps, gap_us=gap_us, **fields)


def measure_idle_latency(make_device: MakeDevice, one_queue: bool = False) -> dict[str, Figure]:
    """a: how long after it was recorded an event of an idle stream has happened, beside a busy one, too."""
    device = make_device(AcceleratorCase("", StepWork(), one_queue=one_queue))
    other = device.make_stream()
    figures = {}
    with device.measure_truth():
        for idle_us, tries in IDLE_TRIES.items():
            found = []
            for _ in range(tries):
                device.synchronize()
                device.host.sleep(idle_us)
                found.append(time_event(device))
            figures[f"after_{idle_us // 1000}_ms_us"] = build_figure(found)
        found = []
        for _ in range(IDLE_TRIES[1_000]):
            other.queue_work(COPY_STREAM_US)
            found.append(time_event(device))
            other.make_awaited().synchronize()
        figures["beside_a_busy_stream_us"] = build_figure(found)
    return name_figures("a_one_connection" if one_queue else "a_idle", figures)


def time_event(device: Any) -> float:
    """Microseconds from an event's recording until it can be seen to have happened."""
    event = device.make_event()
    began = device.host.at
    event.record()
    while not event.query():
        pass
    return float(device.host.at - began)


def measure_places(make_device: MakeDevice) -> dict[str, Figure]:
    """b, c: by the steps' length, device- and host-bound; with late readers, and without Python's lock."""
    cases = {"c_pure_python": make_case(10, main_thread="python")}
    for ms in STEP_MS:
        cases[f"b_{ms}_ms_device_bound"] = make_case(ms, DEVICE_BOUND_HOST_SHARE)
        cases[f"b_{ms}_ms_host_bound"] = make_case(ms, gap_us=2_000 * ms + 1_000)
    for ms in READER_TAILS_MS:
        cases[f"c_reader_{ms}_ms"] = make_case(10, aux_us=ms * 1000)
    figures: dict[str, Figure] = {}
    for name, case in cases.items():
        run = run_case(case, KINDS, NEWEST, "async, own process", make_device=make_device)
        figures |= name_figures(name, judge_places([run]))
    return figures


def measure_orders(make_device: MakeDevice) -> dict[str, Figure]:
    """d: each release's order of calls in all loops, with an encoder and a KV connector."""
    work = {"encoder_us": 5_000.0, "kv_save_us": 900.0}
    case = make_case(10, work=work, items=True, connector="kv")
    figures: dict[str, Figure] = {}
    for name in KINDS:
        runs = [run_case(case, KINDS, name, loop, make_device=make_device) for loop in LOOPS]
        figures |= name_figures(f"d_{name}", judge_places(runs))
    return figures


def measure_lengths(make_device: MakeDevice) -> dict[str, Figure]:
    """h: what a kernel that spins for LENGTH_US is told to take."""
    device = make_device(AcceleratorCase("", StepWork()))
    step_clock = worker_device.DeviceClock(device.make_event, device.is_idle)
    errors = []
    with device.measure_truth():
        for _ in range(MIN_STEPS):
            stamps = step_clock.open_step()
            step_clock.add_stamp(stamps)
            device.main.queue_work(LENGTH_US)
            step_clock.add_stamp(stamps)
            device.synchronize()
            begin, end = step_clock.place_stamps(stamps)[0][-2:]
            errors.append(abs(end - begin - LENGTH_US))
    return {"h_length_error_us": build_figure(errors, MAX_LENGTH_ERROR_US)}


def measure_runners(make_device: MakeDevice) -> dict[str, Figure]:
    """All but what needs a process with one connection."""
    return {
        **measure_idle_latency(make_device),
        **measure_places(make_device),
        **measure_orders(make_device),
        **measure_lengths(make_device),
    }


def measure_one_connection() -> dict[str, Figure]:
    """a: the same in a process whose streams share one queue of the hardware."""
    command = [sys.executable, "-m", "hooks.device.gpu_runners", "--one-connection"]
    answer = subprocess.run(
        command, env={**os.environ, ONE_CONNECTION: "1"}, stdout=subprocess.PIPE, check=True
    )
    figures: dict[str, Figure] = json.loads(answer.stdout)
    return figures


def main() -> int:
    """Measure, print, and write the file that was asked for; 1 when a goal is missed."""
    parser = build_figure_parser(__doc__)
    parser.add_argument("--one-connection", action="store_true", help="a alone, as JSON")
    options = parser.parse_args()
    gpu = CudaGpu()
    wrap_accelerated_classes()

    def make_device(case: AcceleratorCase) -> GpuDevice:
        return GpuDevice(gpu, case)

    if options.one_connection:
        sys.stdout.write(json.dumps(measure_idle_latency(make_device, one_queue=True)))
        return 0
    return report_figures(measure_runners(make_device) | measure_one_connection(), options.json)


if __name__ == "__main__":
    sys.exit(main())
