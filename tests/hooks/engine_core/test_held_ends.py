# SPDX-License-Identifier: Apache-2.0
"""Requests that end in odd moments, or have odd IDs, leave nothing of "who held it" behind."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from hooks.engine_core.test_held_steps import MakeDriver
from hooks.fakes import FakeEngineCore, make_request
from hooks.process import CORE

pytestmark = pytest.mark.filterwarnings("ignore")
ID_CHARS = 200_000  # a client names its request in the body, which may have megabytes


def assert_nothing_kept() -> None:
    """No request and no step is known."""
    assert not CORE.held.unanswered and not CORE.held.followed
    assert not CORE.held.unmarked and not CORE.held._ended
    log = CORE.held.log
    assert not log.times and not log.in_flight and not log.holders.started and not log.ending
    assert not CORE.queue.arrived and not CORE.queue.waiting


def abort(driver: Any, *ids: str) -> None:
    """The client has gone."""
    from vllm.v1.request import RequestStatus

    driver.scheduler.finish_requests([*ids], RequestStatus.FINISHED_ABORTED)


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("tokens", [8, 300])
def test_aborted_in_first_step(drive: MakeDriver, tokens: int, overlapping: bool) -> None:
    """Aborts are taken while the step runs, also the first one, which has a part or all of the prompt."""
    driver = drive(max_num_batched_tokens=64)
    from ttft_otel.hooks import vllm_fields

    vllm_fields.get_facts(driver.scheduler).overlaps = overlapping
    driver.add("gone", tokens=tokens)
    step = driver.begin_step()
    driver.clock.tick(3_000)
    abort(driver, "gone")
    assert_nothing_kept()
    driver.clock.tick(3_000)
    driver.end_step(step)
    driver.step()
    assert_nothing_kept()

    # With another one that waits: what follows is still told of it.
    driver.add("first", tokens=tokens, answer=3)
    driver.add("second", tokens=200, answer=3)
    step = driver.begin_step()
    driver.clock.tick(3_000)
    abort(driver, "first")
    driver.end_step(step)
    driver.run_until_answered("second")
    while driver.scheduler.requests:
        driver.step()
    cut, _ = driver.read("second")
    # Beside few tokens of the first one its own first chunk has room at once.
    assert bool(cut.held) == (tokens > 8)
    assert_nothing_kept()


def test_schedule_raises(drive: MakeDriver) -> None:
    """An error of vLLM's own in schedule() or update_from_output() is passed on, and nothing is kept."""
    driver = drive(max_num_seqs=1)
    driver.add("first", answer=30)
    driver.step()
    driver.add("second")
    driver.step()
    policy, driver.scheduler.policy = driver.scheduler.policy, None
    waiting_queue, driver.scheduler.waiting = driver.scheduler.waiting, None
    with pytest.raises((AttributeError, TypeError)):
        driver.scheduler.schedule()
    driver.scheduler.policy, driver.scheduler.waiting = policy, waiting_queue
    with pytest.raises((AttributeError, TypeError)):
        driver.scheduler.update_from_output(driver.begin_step().output, None)
    abort(driver, "first", "second")
    driver.step()
    assert_nothing_kept()


def test_long_ids(core: FakeEngineCore) -> None:
    """The IDs of requests that have ended, which clients choose, are kept only in part: at most 1 MB."""
    core.add(make_request("waiter"))
    for number in range(300):
        name = f"{number:03d}" + "x" * ID_CHARS
        other = make_request(name, 50, traced=False)
        other.num_output_tokens = 5
        core.add(other)
        core.update(core.schedule(new=(name,), tokens={name: 50}))
        core.update(core.schedule(tokens={name: 1}))
        core.free(name)
    holders = CORE.held.log.holders
    kept = [*(each.request_id for each in holders.holders), *(each[0] for each in holders.ended)]
    kept += [*holders.started, *(key[0] for key in holders.open)]
    assert len(kept) > 40
    assert sum(map(len, kept)) <= 1 << 20
    core.free("waiter")
    assert_nothing_kept()


class VllmRequest(SimpleNamespace):
    """One that a weak reference can point to."""

    __hash__ = object.__hash__


def test_requests_are_not_kept(core: FakeEngineCore) -> None:
    """Where nobody tells of a request's end, what we keep of it is small: not its prompt, nor its images."""
    core.add(VllmRequest(**vars(make_request("a"))))
    core.schedule(("a",), {"a": 4})
    gone = weakref.ref(core.requests["a"])
    CORE.awaiting.clear()
    assert CORE.held.unanswered
    del core.requests["a"]
    gc.collect()

    assert gone() is None
