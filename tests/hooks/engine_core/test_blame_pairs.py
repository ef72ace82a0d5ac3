# SPDX-License-Identifier: Apache-2.0
"""What is blamed on a request is what removing it changes: the same load twice, on vLLM's own Scheduler.

A step takes a fixed time and some for each token, as a model would, and a turnaround follows it; requests
come at the same times with the injected ones and without them. tests/live/test_attribution.py: a real server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hooks.process import drop_state

pytestmark = pytest.mark.filterwarnings("ignore")
MAX_ERROR = 0.05
STEP_US, TOKEN_US = 1_500, 60
TURNAROUND_US = 300
SMALL_COUNT = 40


def run_load(driver: Any, injected: dict[int, dict[str, Any]], every_us: int) -> dict[str, int]:
    """The wait of each small request in microseconds; one comes every `every_us`.

    injected: time -> fields of a request.
    """
    start = driver.clock.at
    arrivals = [(start + at, f"injected{at}", fields) for at, fields in injected.items()]
    arrivals += [
        (start + number * every_us + 7_000, f"small{number}", {"tokens": 16, "answer": 3})
        for number in range(SMALL_COUNT)
    ]
    arrivals.sort(key=lambda each: each[0])
    while arrivals or driver.scheduler.requests:
        if not driver.scheduler.requests:
            driver.clock.tick(max(0, arrivals[0][0] - driver.clock.at))
        while arrivals and arrivals[0][0] <= driver.clock.at:
            _, name, fields = arrivals.pop(0)
            driver.add(name, **fields)
        step = driver.begin_step()
        length = STEP_US + TOKEN_US * step.output.total_num_scheduled_tokens
        end = driver.clock.at + length
        late = []
        # Those that come while the step runs reach the scheduler after it.
        while arrivals and arrivals[0][0] <= end:
            at, name, fields = arrivals.pop(0)
            driver.clock.tick(at - driver.clock.at)
            late.append(driver.build(name, **fields))
        driver.clock.tick(end - driver.clock.at)
        driver.end_step(step)
        for request in late:
            driver.scheduler.add_request(request)
        driver.clock.tick(TURNAROUND_US)
    return {
        name: marks.scheduled - marks.added
        for name in driver.headers
        if name.startswith("small")
        for _, marks in (driver.read(name),)
    }


def compare(
    drive: Callable[..., Any], injected: dict[int, dict[str, Any]], every_us: int, **limits: Any
) -> None:
    """The blamed time of all delayed requests is the time that they wait longer, within 5 %."""
    without = run_load(drive(**limits), {}, every_us)
    drop_state()
    driver = drive(**limits)
    waits = run_load(driver, injected, every_us)
    changed = {name: wait - without[name] for name, wait in waits.items()}
    blamed = {
        name: sum(
            us
            for us, _, _, other, _ in driver.timelines[name].read_details().holders
            if "injected" in other
        )
        for name in waits
    }
    delayed = [name for name, us in changed.items() if us > 10 * STEP_US]

    assert len(delayed) >= 4
    assert sum(blamed[name] for name in delayed) == pytest.approx(
        sum(changed[name] for name in delayed), rel=MAX_ERROR
    )
    # Who came before it is not delayed, and blames nobody for it.
    assert blamed["small0"] == changed["small0"] == 0


def test_long_prompt(drive: Callable[..., Any]) -> None:
    """One prompt of 4096 tokens among small ones."""
    compare(drive, {150_000: {"tokens": 4096, "answer": 1}}, 20_000, max_num_batched_tokens=1024)


@pytest.mark.full  # as long as the other one
def test_long_answers(drive: Callable[..., Any]) -> None:
    """Two places, and two long answers that take them.

    Few wait, so that few wait for others that have waited: that is their blame, not the answers'.
    """
    answer = {"tokens": 8, "answer": 200}
    compare(drive, {150_000: answer, 150_001: answer}, 60_000, max_num_seqs=2)
