# SPDX-License-Identifier: Apache-2.0
"""Whose the time between two steps is, on vLLM's own Scheduler; test_held_steps.py has the steps."""

from __future__ import annotations

import pytest

from hooks.engine_core.test_held_steps import MakeDriver, read_holders, sum_held
from hooks.process import CORE
from ttft_otel.model.stages import QUEUE_STAGES

pytestmark = pytest.mark.filterwarnings("ignore")


def test_turnaround(drive: MakeDriver) -> None:
    """What passes until the next step is scheduled is the step's before, also for one that ended with it."""
    driver = drive(max_num_seqs=1)
    driver.queue_behind(10)
    while "second" not in driver.headers:
        driver.step(idle_us=700)

    # Nine steps, and nine turnarounds: in that of the first step it came, and after the last its own begins.
    assert sum_held(driver, "second", *QUEUE_STAGES) == {"decode": 9 * 10_700, "idle": 700}
    assert read_holders(driver, "second") == [(9 * 10_700, 9, "decode", "first")]


def test_came_in_a_turnaround(drive: MakeDriver) -> None:
    """The same for whoever comes between two steps, whether others waited then or not: idle."""
    driver = drive(max_num_seqs=1)
    driver.add("first", answer=10)
    driver.step()
    for number in range(2):
        driver.clock.tick(300)
        driver.add(f"waiter{number}")
        driver.clock.tick(400)
        driver.step()
    driver.run_until_answered("waiter0", "waiter1")

    for number in range(2):
        assert sum_held(driver, f"waiter{number}", *QUEUE_STAGES)["idle"] == 400


def test_pause(drive: MakeDriver) -> None:
    """A pause between two steps is nobody's, nor is the turnaround before it."""
    driver = drive(max_num_seqs=1)
    driver.queue_behind(10)
    driver.step()
    driver.clock.tick(300)
    driver.pause(5_000)
    driver.run_until_answered("second")

    assert sum_held(driver, "second", *QUEUE_STAGES) == {"decode": 90_000, "idle": 5_300}
    assert read_holders(driver, "second") == [(90_000, 9, "decode", "first")]


def test_nothing_schedulable(drive: MakeDriver) -> None:
    """Of steps that schedule nothing all is idle, also until the next one."""
    driver = drive(max_num_seqs=1)
    driver.queue_behind(10)
    driver.step()
    limit = driver.scheduler.max_num_scheduled_tokens
    driver.scheduler.max_num_scheduled_tokens = 0
    driver.clock.tick(200)
    driver.step(50)
    driver.clock.tick(1_000)
    driver.scheduler.max_num_scheduled_tokens = limit
    driver.run_until_answered("second")

    # The turnaround before is still that of a step with work.
    assert sum_held(driver, "second", *QUEUE_STAGES) == {"decode": 90_200, "idle": 1_050}


@pytest.mark.parametrize("steady", [True, False])
def test_same_requests_decode(drive: MakeDriver, steady: bool) -> None:
    """Steps in which the same requests decode are one segment, with turnarounds; a prompt divides it."""
    driver = drive(max_num_seqs=2)
    driver.add("first", answer=60, traced=False)
    driver.add("one", answer=60 if steady else 3, traced=False)
    driver.step()
    if not steady:
        for number in range(10):
            driver.add(f"other{number}", answer=3, traced=False)
    driver.add("last")
    driver.step(idle_us=500)
    before = len(CORE.held.log.times)
    for _ in range(20):
        driver.step(idle_us=500)
    edges = len(CORE.held.log.times) - before
    driver.run_until_answered("last")

    assert (edges <= 2) == steady
    held = sum_held(driver, "last", *QUEUE_STAGES)
    # In the first turnaround it came.
    assert (held == {"decode": 59 * 10_000 + 20 * 500, "idle": 500}) == steady
