# SPDX-License-Identifier: Apache-2.0
"""Streams of inputs, as /v1/realtime has them, in vLLM's own scheduler: a timeline for each input."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from hooks.fakes import HEADERS
from hooks.process import CORE, count_state
from ttft_otel.hooks.engine_core import tracer
from ttft_otel.model.names import header_names
from ttft_otel.tracing import carrier
from ttft_otel.tracing.engine_timeline import EngineTimeline

STEP_US = 10_000
LATER = {**HEADERS, header_names.CARRIER_KEY: carrier.LATER_INPUT}
NAME = "session"


def add_input(driver: Any, *, later: bool = True, answer: int = 3, traced: bool = True) -> None:
    """An input of the session comes."""
    headers: dict[str, Any] = {} if traced else {"traced": False}
    if later and traced:
        headers = {"headers": dict(LATER)}
    driver.add(NAME, answer=answer, resumable=True, **headers)


def read_answer(driver: Any) -> tuple[dict[str, int], Any]:
    """Stages and marks of the input that was answered last; the next one can be read afterwards."""
    cut, marks = driver.read(NAME)
    del driver.headers[NAME]
    assert sum(cut.stages.values()) + cut.unattributed == cut.end - cut.start
    return cut.stages, marks


@pytest.mark.parametrize("overlapping", [False, True])
def test_input_after_an_answer(drive: Any, overlapping: bool) -> None:
    """It begins when it comes: the pause before it is nobody's, and its steps are its own ones."""
    driver = drive(async_scheduling=overlapping)
    add_input(driver, later=False)
    for number in range(4):
        if number:
            driver.clock.tick(500_000)
            add_input(driver)
        came = driver.clock.at
        driver.run_until_answered(NAME)
        found, marks = read_answer(driver)
        for _ in range(4):
            driver.step()
        assert marks.added == came
        assert found["prefill.compute"] == pytest.approx(STEP_US, abs=1)
        assert found.get("prefill.queue", 0) == 0
        assert len(marks.steps) == 1
    assert not any(count_state().values())


@pytest.mark.parametrize("answer", [1, 5])
def test_inputs_at_once(drive: Any, answer: int) -> None:
    """Those behind the first wait in their queues for the answers before them."""
    driver = drive()
    add_input(driver, later=False, answer=answer)
    for _ in range(2):
        add_input(driver, answer=answer)
    came = driver.clock.at
    for number in range(3):
        driver.run_until_answered(NAME)
        found, marks = read_answer(driver)
        assert marks.added == came
        assert found.get("prefill.queue", 0) == number * answer * STEP_US
        assert found["prefill.compute"] == pytest.approx(STEP_US, abs=1)
    for _ in range(answer):
        driver.step()
    assert not any(count_state().values())


def test_reason_behind_an_answer(drive: Any) -> None:
    """What an input waits for behind another one of its session has no name of its own."""
    driver = drive()
    add_input(driver, later=False)
    add_input(driver)
    driver.run_until_answered(NAME)
    del driver.headers[NAME]
    driver.run_until_answered(NAME)
    assert driver.sum_reasons(NAME) == {"other": 3 * STEP_US}


def test_steps_in_flight(drive: Any) -> None:
    """A step that was scheduled for the answer before it, and ends later, is not the input's."""
    driver = drive(async_scheduling=True)
    add_input(driver, later=False)
    driver.run_until_answered(NAME)
    read_answer(driver)
    for _ in range(3):
        driver.step()
    add_input(driver)
    own = driver.begin_step()
    # One of which vLLM drops what it has sampled: it ran while the answer ended by a stop token.
    CORE.record_step(driver.scheduler, copy.copy(own.output), SimpleNamespace())
    CORE.attach_timelines(None, {}, driver.scheduler)
    driver.clock.tick(STEP_US)
    driver.end_step(own)
    _, marks = read_answer(driver)
    assert len(marks.steps) == 1


def test_no_step_is_seen(drive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the hook of steps is missing, sessions whose next input began are bounded, and counted."""
    monkeypatch.setattr(tracer, "MAX_AWAITING_REQUESTS", 2)
    drive()
    for number in range(5):
        session = SimpleNamespace(request_id=f"session-{number}")
        own = SimpleNamespace(_ttft_input=(EngineTimeline(added=1), HEADERS))
        CORE.record_input(True, None, None, session, SimpleNamespace(sampling_params=own))
    assert list(CORE.resumed) == ["session-3", "session-4"] and CORE.dropped_requests == 3


@pytest.mark.parametrize("traced", [(True, False, True), (False, True, False), (False, True, True)])
def test_some_are_not_traced(drive: Any, traced: tuple[bool, ...]) -> None:
    """Whether an input is traced is decided for each."""
    driver = drive()
    for number, is_traced in enumerate(traced):
        add_input(driver, later=number > 0, traced=is_traced)
        for _ in range(4):
            driver.step()
        assert (NAME in driver.headers) is is_traced
        driver.headers.clear()
    assert not any(count_state().values())


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_aborted(drive: Any, steps: int) -> None:
    """A session that ends with inputs in its queue leaves nothing behind."""
    driver = drive()
    from vllm.v1.request import RequestStatus

    add_input(driver, later=False)
    for _ in range(2):
        add_input(driver)
    for _ in range(steps):
        driver.step()
    driver.scheduler.finish_requests(NAME, RequestStatus.FINISHED_ABORTED)
    driver.step()
    driver.clock.tick(STEP_US)
    CORE.answer_aborted(NAME)
    assert not any(count_state().values())
