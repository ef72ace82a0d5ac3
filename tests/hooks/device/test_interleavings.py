# SPDX-License-Identifier: Apache-2.0
"""Any legal interleaving of the two threads that share the device clock, against a model of its events.

One thread queues steps, the other one reads outputs in their order. Each of the device's calls lets the other
thread go on, at times that Hypothesis draws; renewals of the anchor and the pool's end come after few steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hooks.device.accelerator import SimulatedDevice, SimulatedEvent, SimulatedHost, SimulatedQueue
from hooks.device.accelerator_cases import MAX_QUEUED_STEPS
from ttft_otel.hooks.worker import device

RENEWAL_US = 4_000  # of the anchor: every few steps
MAX_BOUND = 3  # steps that are not read: of more the oldest gives its events back
ERROR_US = 20  # beyond the told one: the hook's own calls


@dataclass(frozen=True)
class PlannedStep:
    """work_us: after each of its stamps but the last. read: somebody reads its output."""

    work_us: tuple[int, ...]
    host_us: int
    read: bool


class OwnedEvent(SimulatedEvent):
    """An event that knows for which step it was recorded last; reading it for another one is an error."""

    def __init__(self, stream: Any, threads: TwoThreads) -> None:
        super().__init__(stream)
        self.threads = threads
        self.owner: int | None = None  # None: an anchor

    def record(self) -> None:
        self.owner = self.threads.queued
        super().record()

    def elapsed_time(self, other: SimulatedEvent) -> float:
        """From an anchor to a step's event, or to the next anchor."""
        assert isinstance(other, OwnedEvent)
        assert self.owner is None, "an anchor's event was recorded again"
        assert other.owner in (None, self.threads.read), (
            f"step {self.threads.read} got {other.owner}'s"
        )
        return super().elapsed_time(other)


class TwoThreads:
    """One run: what is queued, what is read, and the truth of each step."""

    def __init__(self, seed: int, make_clock: Callable[..., device.DeviceClock]) -> None:
        self.host = SimulatedHost(seed)
        self.device = SimulatedDevice(self.host)
        self.queued: int | None = None
        self.read: int | None = None
        self.clock = make_clock(self.make_event, self.device.is_idle)
        self.to_reader, self.to_main = (SimulatedQueue(self.host, 5) for _ in range(2))
        self.bound: dict[int, tuple[device.DeviceStamps, list[float]]] = {}
        self.errors: list[tuple[float, int]] = []

    def make_event(self) -> OwnedEvent:
        return OwnedEvent(self.device.main, self)

    def renew_anchor(self, now: int, original: Callable[[int], Any]) -> Any:
        """An anchor belongs to no step."""
        step, self.queued = self.queued, None
        try:
            return original(now)
        finally:
            self.queued = step

    def queue_steps(self, plan: list[PlannedStep]) -> None:
        """The first thread: as open_step() to bind_step(), and what becomes of outputs that nobody reads.

        It runs ahead by MAX_QUEUED_STEPS outputs.
        """
        awaited = 0
        for number, step in enumerate(plan):
            self.queued = number
            stamps, truth = self.clock.open_step(), []
            for us in (*step.work_us, 0):
                self.clock.add_stamp(stamps)
                truth.append(self.device.main.busy_until)
                self.device.main.queue_work(us)
            self.host.sleep(step.host_us)
            self.bound[number] = stamps, truth
            if step.read:
                self.to_reader.put(number)
                awaited += 1
            if len(self.bound) > MAX_BOUND:
                # By its ID: the reader may have taken it meanwhile.
                oldest = min(self.bound)
                self.clock.release_stamps(self.bound.pop(oldest)[0])
            if awaited == MAX_QUEUED_STEPS:
                self.to_main.get()
                awaited -= 1
        self.to_reader.put(None)

    def read_steps(self) -> None:
        """The second thread: as observe_step() to resolve_step()."""
        while (number := self.to_reader.get()) is not None:
            if number in self.bound:
                self.read_step(number)
            self.to_main.put(number)

    def read_step(self, number: int) -> None:
        """One output, unless it has waited for so long that its step has gone."""
        stamps, truth = self.bound[number]
        pending = self.clock.note_pending(stamps, -1)
        stamps[-1][0].synchronize()
        if pending:
            self.clock.note_reached(stamps)
        if self.bound.pop(number, None) is None:
            return
        self.read = number
        places, _, told_us = self.clock.place_stamps(stamps)
        extra = len(stamps) - len(truth)  # the event that looked whether the stream was idle
        places = places[extra:]
        assert all(places)
        worst = max(abs(place - at) for place, at in zip(places, truth, strict=True))
        self.errors.append((worst, told_us))
        self.clock.release_stamps(stamps)

    def run(self, plan: list[PlannedStep], pooled: int) -> None:
        """Both threads, to their end; what the second one raises is raised here.

        pooled: events that are kept.
        """
        raised: list[BaseException] = []

        def read() -> None:
            try:
                self.read_steps()
            except BaseException as error:  # noqa: BLE001 - of a thread, for the test
                raised.append(error)
                self.to_main.latency_us = 0.0
                for _ in plan:
                    self.to_main.put(None)

        original = self.clock._renew_anchor
        self.clock._renew_anchor = lambda now: self.renew_anchor(now, original)  # type: ignore[method-assign]
        limits = {
            "ANCHOR_RENEWAL_US": RENEWAL_US,
            "MIN_ANCHOR_STEPS": 1,
            "IDLE_PROBE_US": 500,
            "MAX_POOLED_EVENTS": pooled,
        }
        with self.host.replace_clock(), mock.patch.multiple(device, **limits):
            self.host.start_thread(read)
            self.queue_steps(plan)
            self.host.sleep(10_000_000)
        if raised:
            raise raised[0]


planned_steps = st.builds(
    PlannedStep,
    st.lists(st.integers(0, 3_000), min_size=1, max_size=4).map(tuple),
    st.integers(0, 4_000),
    st.sampled_from([True, True, True, False]),
)
with_any_plan = given(
    st.lists(planned_steps, min_size=2, max_size=40), st.integers(0, 10_000), st.integers(0, 20)
)
RARELY = settings(
    max_examples=settings.default.max_examples // 2,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@RARELY
@with_any_plan
def test_any_interleaving(plan: list[PlannedStep], seed: int, pooled: int) -> None:
    """No step gets another one's events, and no place is further off than is told."""
    threads = TwoThreads(seed, device.DeviceClock)
    threads.run(plan, pooled)

    late = [each for each in threads.errors if each[0] > each[1] + ERROR_US]
    assert len(late) <= 0.01 * len(threads.errors), (late, threads.errors)
    assert not any(event.owner is None for event in threads.clock.pool)


class HastyClock(device.DeviceClock):
    """Gives events back when they are read, before they are placed."""

    def note_pending(self, stamps: Any, awaited: int) -> bool:
        """As its base's, but too early."""
        pending = super().note_pending(stamps, awaited)
        self.release_stamps(stamps)
        return pending


def test_events_that_are_given_back_early() -> None:
    """The model sees it: another step has recorded them again."""
    plan = [PlannedStep((1_000, 1_000), 100, True)] * 20
    with pytest.raises((AssertionError, RuntimeError), match="got|not ready|recorded again"):
        TwoThreads(1, HastyClock).run(plan, device.MAX_POOLED_EVENTS)
