# SPDX-License-Identifier: Apache-2.0
"""A simulated accelerator and the host threads beside it, in virtual time, for the device clock's tests.

accelerated_runners.py queues work on it in vLLM's order of calls. Events have latency, the device's
clock drifts against the host's, elapsed times are rounded as CUDA's are, and calls cost host time.
"""

from __future__ import annotations

import heapq
import math
import random
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

from ttft_otel.tracing import clock

MAX_REAL_WAIT_S: Final = 60
DEVICE_CLOCK_OFFSET_US: Final = 5e8  # the device's clock has an origin of its own
# Microseconds: what the calls cost on the host, and how long after its submission an event happens
# on an idle stream.
RECORD_COST_US: Final = 2.0
QUERY_COST_US: Final = 1.5
LAUNCH_LATENCY_US: Final = (4.0, 9.0)
OWN_SLICE_US: Final = 1_000.0  # so long a shared device works for this process, then for others
WAKE_LATENCY_US: Final = (15.0, 70.0)  # of a host thread that slept until an event
PREEMPTION_SHARE: Final = 0.01  # of the wake-ups and pieces of host work, which take longer by
PREEMPTION_US: Final = (100.0, 1500.0)
# Of the threads that were woken, the share that waits for Python's lock; half of these so long, nearly all
# so long: by what the main thread does, as measured on two cores. It launches: releases the lock often.
LOCK_WAITS: Final = {
    "": (0.0, 0.0, 0.0),
    "launching": (0.6, 150.0, 4_000.0),
    "python": (0.95, 5_150.0, 11_000.0),
}
# Of an event on a stream that had nothing to do for a while: a device that has gone to sleep.
SLEEPING_AFTER_US: Final = 1_000.0
SLEEPY_LATENCY_US: Final = (30.0, 2_000.0)
SLEEPY_SHARE: Final = 0.3


class SimulatedHost:
    """Threads in virtual time: one runs at a time, always the one whose time is the least.

    Called, it tells the time in microseconds, as clock.now_us() does.
    """

    def __init__(self, seed: int = 1) -> None:
        self.at = 1_000_000.0
        self.chance = random.Random(seed)
        self.main_thread = ""  # of LOCK_WAITS: what the others have to wait for
        self.late_us = 0.0  # every thread that is woken gets a core so much later
        self.switches: Counter[int] = Counter()  # by thread: how often it went to sleep in a wait
        self._sleepers: list[tuple[float, int, threading.Semaphore]] = []
        self._started = 0

    def __call__(self) -> int:
        return int(self.at)

    def sleep(self, us: float) -> None:
        """Let `us` microseconds pass for this thread; others may run meanwhile."""
        until = self.at + us
        if not self._sleepers or until <= self._sleepers[0][0]:
            self.at = until
            return
        own = threading.Semaphore(0)
        self._push(until, own)
        self._wake_next()
        own.acquire()

    def work(self, us: float) -> None:
        """Host work of about `us`: a tenth more or less, and now and then preempted."""
        self.sleep(us * self.chance.uniform(0.9, 1.15) + self.draw_preemption())

    def draw_preemption(self) -> float:
        """Mostly 0, else how long another process has the core."""
        if self.chance.random() < PREEMPTION_SHARE:
            return self.chance.uniform(*PREEMPTION_US)
        return 0.0

    def replace_clock(self) -> AbstractContextManager[Any]:
        return mock.patch.multiple(clock, now_us=self, count_switches=self.count_switches)

    def count_switches(self) -> int:
        return self.switches[threading.get_ident()]

    def sleep_until(self, at: float, wake_us: float) -> None:
        """Sleep in a call of C until `at`, and take the interpreter's lock again."""
        own = threading.get_ident()
        self.switches[own] += 1
        self.sleep(at - self.at + wake_us + self.late_us)
        share, half_us, most_us = LOCK_WAITS[self.main_thread]
        if self.chance.random() < share:
            self.switches[own] += 1 + self.chance.randrange(3)
            longer = self.chance.random() < 0.5
            limits = (half_us, most_us) if longer else (half_us / 5, half_us)
            if self.main_thread == "python" and not longer:
                limits = (5_000.0, half_us)
            self.sleep(self.chance.uniform(*limits))

    def make_queue(self, latency_us: float) -> SimulatedQueue:
        return SimulatedQueue(self, latency_us)

    def start_thread(self, target: Callable[[], None]) -> None:
        """Start `target` as a thread of this host; it runs once the others sleep."""
        own = threading.Semaphore(0)

        def run() -> None:
            own.acquire()
            try:
                target()
            finally:
                self._wake_next()

        self._push(self.at, own)
        threading.Thread(target=run, daemon=True).start()

    def wait_for(self, token: threading.Semaphore) -> None:
        """Sleep until another thread calls wake() with `token`."""
        self._wake_next()
        if not token.acquire(timeout=MAX_REAL_WAIT_S):
            raise TimeoutError("the thread that has to wake this one has ended")

    def wake(self, token: threading.Semaphore, after_us: float) -> None:
        """Resume the thread that waits for `token`, `after_us` from now."""
        self._push(self.at + after_us, token)

    def _push(self, at: float, token: threading.Semaphore) -> None:
        self._started += 1
        heapq.heappush(self._sleepers, (at, self._started, token))

    def _wake_next(self) -> None:
        if self._sleepers:
            at, _, token = heapq.heappop(self._sleepers)
            self.at = max(self.at, at)
            token.release()


class SimulatedQueue:
    """A queue between two of a host's threads; what is put arrives `latency_us` later."""

    def __init__(self, host: SimulatedHost, latency_us: float) -> None:
        self.host = host
        self.latency_us = latency_us
        self.items: deque[tuple[float, Any]] = deque()
        self.waiting: threading.Semaphore | None = None

    def put(self, item: Any) -> None:
        arrives_after = self.latency_us * self.host.chance.uniform(0.8, 1.5)
        self.items.append((self.host.at + arrives_after, item))
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self.host.wake(waiting, arrives_after)

    def get(self) -> Any:
        if not self.items:
            self.waiting = threading.Semaphore(0)
            self.host.wait_for(self.waiting)
        arrival, item = self.items.popleft()
        self.host.sleep(max(0.0, arrival - self.host.at))
        return item


class SimulatedDevice:
    """One accelerator: streams that work through their queues, and a clock of its own.

    drift_ppm: by how much its clock is faster than the host's. calls: how often each call was made.
    sleepy: what is queued after a pause begins late. one_queue: its streams share a queue of the hardware.
    foreign_us: after each millisecond it works for others for so long.
    """

    def __init__(
        self,
        host: SimulatedHost,
        drift_ppm: float = 20.0,
        sleepy: bool = False,
        one_queue: bool = False,
        foreign_us: float = 0.0,
    ) -> None:
        self.host = host
        self.rate = 1 + drift_ppm * 1e-6
        self.calls: Counter[str] = Counter()
        self.sleepy = sleepy
        self.one_queue = one_queue
        self.foreign_us = foreign_us
        self.busy_until = 0.0
        self.main = SimulatedStream(self)

    def synchronize(self) -> None:
        """Wait for the main stream; a spinning host wakes up at once."""
        self.host.sleep(max(0.0, self.main.busy_until - self.host.at) + 3)

    def make_stream(self) -> SimulatedStream:
        return SimulatedStream(self)

    def measure_truth(self) -> AbstractContextManager[Any]:
        """While the block runs, the package's clock is the host's, and marks are host times."""
        return self.host.replace_clock()

    def resolve_time(self, mark: float) -> float:
        """The host's time of what a stream's mark() gave."""
        return mark

    def make_event(self) -> SimulatedEvent:
        """An event with timing, on the main stream."""
        self.calls["make"] += 1
        return SimulatedEvent(self.main)

    def is_idle(self) -> bool:
        """As the current stream's query(): whether everything queued on it is done."""
        self.calls["stream query"] += 1
        self.host.sleep(QUERY_COST_US)
        return self.main.busy_until <= self.host.at

    def draw_launch(self) -> float:
        """When work that is submitted now begins on an idle stream."""
        latency_us = self.host.chance.uniform(*LAUNCH_LATENCY_US)
        if self.sleepy and self.host.at - self.busy_until > SLEEPING_AFTER_US:
            if self.host.chance.random() < SLEEPY_SHARE:
                low, high = map(math.log, SLEEPY_LATENCY_US)
                latency_us = math.exp(self.host.chance.uniform(low, high))
        return self.host.at + latency_us

    def find_own_time(self, at: float) -> float:
        """The first moment from `at` on in which it does not work for others."""
        if not self.foreign_us:
            return at
        period = OWN_SLICE_US + self.foreign_us
        into = at % period
        return at if into < OWN_SLICE_US else at - into + period

    def find_end(self, begin: float, us: float) -> float:
        """When work of `us` that begins at `begin` ends."""
        while self.foreign_us:
            left = OWN_SLICE_US - begin % (OWN_SLICE_US + self.foreign_us)
            if us <= left:
                break
            us -= left
            begin = self.find_own_time(begin + left)
        return begin + us


class SimulatedStream:
    """Work in the order in which it was queued."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.busy_until = 0.0

    def find_begin(self) -> float:
        """When what is queued now begins, at the earliest."""
        device = self.device
        earliest = max(self.busy_until, device.busy_until if device.one_queue else 0.0)
        return device.find_own_time(max(earliest, device.draw_launch()))

    def queue_work(self, us: float) -> tuple[float, float]:
        begin = self.find_begin()
        self.busy_until = self.device.find_end(begin, us)
        self.device.busy_until = max(self.device.busy_until, self.busy_until)
        return begin, self.busy_until

    def wait_stream(self, other: SimulatedStream) -> None:
        self.busy_until = max(self.busy_until, other.busy_until)

    def make_awaited(self) -> SimulatedEvent:
        return SimulatedEvent(self, self.busy_until)

    def mark(self) -> float:
        """When an event that is recorded now would happen."""
        device = self.device
        earliest = max(self.busy_until, device.busy_until if device.one_queue else 0.0)
        return device.find_own_time(max(earliest, device.host.at + LAUNCH_LATENCY_US[0]))


class SimulatedEvent:
    """Happens when everything that was queued before it is done; `at` is the host's time of that."""

    def __init__(self, stream: SimulatedStream, at: float = 0.0) -> None:
        self.stream = stream
        self.device = stream.device
        self.at = at

    def record(self) -> None:
        self.device.calls["record"] += 1
        self.at = self.stream.find_begin()
        self.stream.busy_until = self.at
        self.device.busy_until = max(self.device.busy_until, self.at)
        self.device.host.sleep(RECORD_COST_US)

    def query(self) -> bool:
        self.device.calls["query"] += 1
        self.device.host.sleep(QUERY_COST_US)
        return self.device.host.at >= self.at

    def synchronize(self) -> None:
        """Sleep until it has happened (a blocking event: the thread is woken a while after)."""
        host = self.device.host
        wake = host.chance.uniform(*WAKE_LATENCY_US) + host.draw_preemption()
        if self.at > host.at:
            host.sleep_until(self.at, wake)

    def elapsed_time(self, other: SimulatedEvent) -> float:
        """Milliseconds by the device's clock, as a float32; never waits."""
        self.device.calls["elapsed"] += 1
        if not (self.device.host.at >= self.at and self.device.host.at >= other.at):
            raise RuntimeError("CUDA error: device not ready")
        elapsed_ms = (other.read_device_clock() - self.read_device_clock()) / 1000
        return float(struct.unpack("f", struct.pack("f", elapsed_ms))[0])

    def read_device_clock(self) -> float:
        """The device's timestamp of this event, in half microseconds."""
        return round((DEVICE_CLOCK_OFFSET_US + self.at * self.device.rate) * 2) / 2
