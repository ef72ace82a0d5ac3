# SPDX-License-Identifier: Apache-2.0
"""Every test of the hooks starts and ends with nothing under way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ttft_otel import testing
from ttft_otel.hooks import scheduler, worker

from .fakes import Core, wrapped


@pytest.fixture
def core(fresh: None, clock: testing.Clock) -> Iterator[Core]:
    """An engine core; whatever happens to its requests, nothing of them stays."""
    yield wrapped()(clock)
    scheduler.dead.clear()
    assert not scheduler.running
    assert not scheduler._freed
    assert not scheduler._inside[0]


@pytest.fixture(autouse=True)
def idle() -> Iterator[None]:
    """Every test starts and ends with no step open."""
    worker.roles.clear()
    yield
    worker.roles.clear()
    worker._clock.clear()
    worker.opened.clear()
    worker.bound.clear()
