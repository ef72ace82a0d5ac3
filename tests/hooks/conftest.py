# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the hooks' tests; each test starts and ends without unfinished requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tracing_fakes

from hooks.device.accelerated_runners import wrap_accelerated_classes
from hooks.fakes import WRAPPED_METHODS, FakeEngineCore, import_from_vllm
from hooks.process import CORE, PATCHER, count_state, drop_state, put_back_classes, wrap_copy
from ttft_otel.tracing import recorder


@pytest.fixture
def core(nothing_patched: None, clock: tracing_fakes.FakeClock) -> Iterator[FakeEngineCore]:
    """A fake engine core; checks that no state of its requests is left."""
    yield wrap_copy(FakeEngineCore, WRAPPED_METHODS)(clock)
    assert not (CORE.awaiting or CORE.freed or CORE.is_updating), count_state()


@pytest.fixture(scope="session")
def real_scheduler() -> Any:
    """The driver's module, which imports vLLM."""
    return import_from_vllm("tests.hooks.real_scheduler")[0]


@pytest.fixture
def drive(
    real_scheduler: Any, nothing_patched: None, clock: tracing_fakes.FakeClock
) -> Iterator[Callable[..., Any]]:
    """Makes a wrapped scheduler with the limits that the test names."""
    real_scheduler.wrap_scheduler()
    yield lambda **limits: real_scheduler.SchedulerDriver(clock, **limits)


@pytest.fixture(autouse=True)
def no_state() -> Iterator[None]:
    """Every test starts as a new process does, without any request or step."""
    _drop_state()
    yield
    _drop_state()


def _drop_state() -> None:
    recorder.awaiting_traces.clear()
    recorder.unended_requests.clear()
    drop_state()


@pytest.fixture(scope="module")
def kinds() -> Iterator[dict[str, Any]]:
    """Both runners with the hooks around them; the classes are put back afterwards."""
    before = dict(PATCHER.installed)
    yield wrap_accelerated_classes()
    put_back_classes()
    PATCHER.installed.clear()
    PATCHER.installed.update(before)
