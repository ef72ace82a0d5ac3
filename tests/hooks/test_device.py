# SPDX-License-Identifier: Apache-2.0
"""Device events with a clock of their own: lengths are theirs, places stay within bounds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from ttft_otel import testing
from ttft_otel.hooks import device

OFFSET, DRIFT = 7_000_000_000.0, 1.00002  # us; the device's clock runs 20 ppm fast


class Device:
    """A stream that works its queue off in order, `late` microseconds behind the host."""

    def __init__(self, clock: testing.Clock) -> None:
        self.clock = clock
        self.free = 0  # host time until which the stream is busy
        self.made = 0

    def work(self, us: int) -> None:
        """Queue work; the host does not wait."""
        self.free = max(self.free, self.clock.at) + us

    def event(self) -> Event:
        """An event with timing."""
        self.made += 1
        return Event(self)


class Event:
    """Happens when everything queued before it is done."""

    def __init__(self, on: Device) -> None:
        self.on = on
        self.at = 0

    def record(self) -> None:
        """Queue this event."""
        self.at = max(self.on.free, self.on.clock.at)

    def query(self) -> bool:
        """Whether the device has come by."""
        return self.on.clock.at >= self.at

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds by the device's clock."""
        if not (self.query() and other.query()):
            raise RuntimeError("not ready")
        return (self.ticks(other.at) - self.ticks(self.at)) / 1000.0

    def ticks(self, host: int) -> float:
        """The device's time, which is nothing like the host's."""
        return OFFSET + host * DRIFT


@pytest.fixture
def gpu(clock: testing.Clock) -> Iterator[Device]:
    """A device on a still clock."""
    yield Device(clock)


def step(made: device.DeviceClock, gpu: Device, us: int) -> list[tuple[Event, int]]:
    """Stamp, queue work, stamp."""
    begin = made.stamp()
    gpu.work(us)
    return [begin, made.stamp()]


def test_idle_stream(gpu: Device, clock: testing.Clock) -> None:
    """On an idle stream places are the host's times, the length is the device's."""
    made = device.DeviceClock(gpu.event)
    stamps = step(made, gpu, 5000)
    clock.tick(6000)

    begin, end = made.place(stamps) or (0, 0)

    assert abs(begin - 1_000_000) <= 2
    assert abs(end - begin - 5000) <= 2


def test_unfinished(gpu: Device, clock: testing.Clock) -> None:
    """While the device is still at it there is no place, and nobody waits."""
    made = device.DeviceClock(gpu.event)
    stamps = step(made, gpu, 5000)
    clock.tick(4999)

    assert made.place(stamps) is None
    clock.tick(1)
    assert made.place(stamps) is not None


def test_queue_ahead(gpu: Device, clock: testing.Clock) -> None:
    """Under asynchronous scheduling the host runs ahead; places are where the work really ran."""
    made = device.DeviceClock(gpu.event)
    first = step(made, gpu, 5000)
    clock.tick(100)
    second = step(made, gpu, 3000)  # queued while the first still runs
    clock.tick(9000)

    ends = [*(made.place(first) or []), *(made.place(second) or [])]

    assert [abs(place - true) <= 3 for place, true in zip(ends, TRUE, strict=True)] == [True] * 4


TRUE = (1_000_000, 1_005_000, 1_005_000, 1_008_000)


def test_within_bounds(gpu: Device, clock: testing.Clock) -> None:
    """Over an hour of random steps: in order, never before the work was queued, never in the future."""
    made, chance = device.DeviceClock(gpu.event), random.Random(7)
    for _ in range(400):
        clock.tick(chance.randrange(100, 9_000_000))
        queued, stamps = clock.at, step(made, gpu, chance.randrange(50, 40_000))
        length = stamps[1][0].at - stamps[0][0].at
        clock.tick(chance.randrange(60_000))
        places = made.place(stamps)
        if places is None:
            continue
        begin, end = places
        assert queued - 5 <= begin <= end <= clock.at
        assert abs(end - begin - length) <= 5


def test_anchor_renewal(gpu: Device, clock: testing.Clock) -> None:
    """The anchor is renewed before its distance costs resolution, also while a step is under way."""
    made = device.DeviceClock(gpu.event)
    made.place(step(made, gpu, 10))
    anchor = made.anchor
    clock.tick(device.RENEW + 1)
    stamps = step(made, gpu, 500)
    assert made.anchor is not anchor
    clock.tick(600)

    begin, end = made.place(stamps) or (0, 0)

    assert abs(begin - (clock.at - 600)) <= 2 and abs(end - begin - 500) <= 2


def test_renewed_between(gpu: Device, clock: testing.Clock) -> None:
    """A step stamped before a renewal and read after it still has its place."""
    made = device.DeviceClock(gpu.event)
    before = step(made, gpu, 500)
    clock.tick(device.RENEW + 1)
    after = step(made, gpu, 500)
    clock.tick(600)

    early, late = made.place(before) or [], made.place(after) or []

    assert [b - a for a, b in pairwise(early)] == pytest.approx([500], abs=3)
    assert late[0] - early[0] == pytest.approx(device.RENEW + 1, abs=500)


def test_events_reused(gpu: Device, clock: testing.Clock) -> None:
    """Events are pooled: a thousand steps make a handful."""
    made = device.DeviceClock(gpu.event)
    for _ in range(1000):
        stamps = step(made, gpu, 10)
        clock.tick(1000)
        made.place(stamps)

    assert gpu.made < 10
    assert len(made.pool) <= device.RECENT


def test_never_read(gpu: Device, clock: testing.Clock) -> None:
    """Steps whose output nobody reads leave nothing in the clock."""
    made = device.DeviceClock(gpu.event)
    for _ in range(100):
        step(made, gpu, 10)
        clock.tick(1000)

    assert len(made.bounds) == len(made.pool) == 0


def test_host_clock(clock: testing.Clock) -> None:
    """On a CPU a stamp is the place."""
    made = device.HostClock()
    first = made.stamp()
    clock.tick(5)

    assert made.place([first, made.stamp()]) == [1_000_000, 1_000_005]


def test_pick_without_vllm() -> None:
    """Where no platform is known, or it is a CPU, the host's clock is used."""
    assert isinstance(device.pick(), device.HostClock)
