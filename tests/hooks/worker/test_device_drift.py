# SPDX-License-Identifier: Apache-2.0
"""The device clock where its assumptions do not hold: clocks that drift apart fast, results read late.

What cannot be known is told as an error. test_accelerator.py has the usual cases, and their table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hooks.device.accelerator import SimulatedDevice, SimulatedHost
from hooks.device.accelerator_cases import CASES, run_case
from hooks.device.accelerator_loops import LOOPS
from ttft_otel.hooks.worker import device
from ttft_otel.tracing import clock as clocks

SLEWED_CASES = [case for case in CASES if "slewed" in case.name]
NTP_PPM = 500.0
NEAR_US = 40  # of an idle stream, as in test_device.py
# Until two anchors have ended nothing tells that the clocks drift faster than they should.
UNTOLD_US = 2 * device.ANCHOR_RENEWAL_US


@pytest.mark.parametrize("drift_ppm", [NTP_PPM, -NTP_PPM])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("case", SLEWED_CASES, ids=lambda case: case.name)
def test_slewed_host(kinds: dict[str, Any], case: Any, loop: str, drift_ppm: float) -> None:
    """NTP corrects the host's clock at its fastest: the told error covers the places' all the same."""
    for kind in kinds:
        judgement = run_case(replace(case, drift_ppm=drift_ppm), kinds, kind, loop)
        step_us = judgement.virtual_us / case.steps
        told = judgement.told_errors[int(UNTOLD_US / step_us) + 1 :]
        slack_us = device.READING_US
        uncovered = [error for error, error_us in told if error > error_us + slack_us]

        assert len(told) > 100 and len(uncovered) <= 0.01 * len(told), (kind, max(uncovered))
        is_off = drift_ppm < 0 and not case.gap_us and loop != "sync"
        assert (max(error for error, _ in told) > 5 * slack_us) is is_off


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimulatedHost:
    """A host whose time is ours."""
    made = SimulatedHost()
    monkeypatch.setattr(clocks, "now_us", made)
    monkeypatch.setattr(clocks, "count_switches", made.count_switches)
    return made


def place_steps(
    host: SimulatedHost,
    simulated: SimulatedDevice,
    step_clock: device.DeviceClock,
    count: int,
    ahead_us: int = 0,
) -> list[tuple[float, int]]:
    """Steps of 5 ms on an idle stream, read when they are over: the greatest error of each, and the told.

    ahead_us: by how much the clock that is read differs from the time in which events happen.
    """
    told: list[tuple[float, int]] = []
    for _ in range(count):
        host.sleep(device.IDLE_PROBE_US + 1)
        stamps = step_clock.open_step()
        step_clock.add_stamp(stamps)
        simulated.main.queue_work(5_000)
        step_clock.add_stamp(stamps)
        host.sleep(9_000)
        placement = step_clock.place_stamps(stamps)
        errors = [
            abs(place - ahead_us - event.at)
            for place, (event, _) in zip(placement.places, stamps, strict=True)
        ]
        told.append((max(errors), placement.error_us))
        step_clock.release_stamps(stamps)
    return told


@pytest.mark.parametrize("jump_us", [50_000, -50_000])
def test_set_clock(host: SimulatedHost, jump_us: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host clock that jumps (a machine that was moved): one step tells an error, the next are right."""
    simulated = SimulatedDevice(host)
    step_clock = device.DeviceClock(simulated.make_event, simulated.is_idle)
    place_steps(host, simulated, step_clock, 20)
    monkeypatch.setattr(clocks, "now_us", lambda: host() + jump_us)
    after = place_steps(host, simulated, step_clock, 20, jump_us)

    assert all(error <= told + NEAR_US for error, told in after), after
    assert after[0][1] >= 40_000
    assert all(error <= NEAR_US for error, _ in after[1:]), after


def test_backlog(host: SimulatedHost) -> None:
    """Steps that are read seconds after they were queued: what was known is handed on."""
    simulated = SimulatedDevice(host)
    step_clock = device.DeviceClock(simulated.make_event, simulated.is_idle)
    place_steps(host, simulated, step_clock, 3)
    queued = []
    for _ in range(20):  # 6 s of work in 2 s
        stamps = step_clock.open_step()
        step_clock.add_stamp(stamps)
        simulated.main.queue_work(300_000)
        step_clock.add_stamp(stamps)
        queued.append(stamps)
        host.sleep(100_000)
    anchors = {id(stamps.anchor) for stamps in queued}
    host.sleep(6_000_000)
    errors = []
    for stamps in queued:
        places = step_clock.place_stamps(stamps).places
        errors += [place - event.at for place, (event, _) in zip(places, stamps, strict=True)]

    assert 1 <= len(anchors) <= 2  # an anchor that nobody has read tells its successor nothing
    # Seven seconds of drift beside what is assumed of it.
    assert max(map(abs, errors)) <= 7 * 70 + device.READING_US


def test_few_steps(host: SimulatedHost) -> None:
    """With few marked steps an anchor lasts until four have been read, or five seconds."""
    simulated = SimulatedDevice(host)
    step_clock = device.DeviceClock(simulated.make_event, simulated.is_idle)
    ages: dict[int, int] = {}
    for _ in range(60):
        host.sleep(800_000)
        place_steps(host, simulated, step_clock, 1)
        assert step_clock.anchor is not None
        ages[step_clock.anchor.recorded_at] = host() - step_clock.anchor.recorded_at

    told = list(ages.values())[:-1]  # the last one is not over
    assert len(told) > 10
    assert all(2_500_000 < age < device.SPARSE_RENEWAL_US for age in told)


def test_reached_while_it_is_asked(host: SimulatedHost) -> None:
    """A step that ends between two queries of one reading has all its places."""
    simulated = SimulatedDevice(host)
    step_clock = device.DeviceClock(simulated.make_event, simulated.is_idle)
    stamps = step_clock.open_step()
    step_clock.add_stamp(stamps)
    simulated.main.queue_work(5_000)
    step_clock.add_stamp(stamps)
    host.sleep(stamps[-1][0].at - host.at - 2)  # a query takes 1.5 us
    placement = step_clock.place_stamps(stamps)

    assert placement.read_at and all(placement.places)
