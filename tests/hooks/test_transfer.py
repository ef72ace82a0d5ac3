# SPDX-License-Identifier: Apache-2.0
"""Encoder-cache connectors of any class: how long a request waited for an item."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ttft_otel import testing
from ttft_otel.breakdown import CACHE
from ttft_otel.carrier import Journey
from ttft_otel.hooks import transfer, worker, wrap

from .runners import Connector


@pytest.fixture
def connector(fresh: None, clock: testing.Clock) -> Iterator[Any]:
    """A connector of a class of its own, as its factory hands it out."""
    made = type("Mine", (Connector,), {})(clock)
    transfer.created(None, made)
    yield made


def test_wait(connector: Any, clock: testing.Clock) -> None:
    """From the first no to the first yes the request waits for its item."""
    journey = Journey(1)
    request = SimpleNamespace(_ttft=journey)
    for _ in range(3):
        assert not connector.ensure_cache_available(request, 0)
        clock.tick(100)
    connector.available = True
    connector.ensure_cache_available(request, 0)
    connector.ensure_cache_available(request, 0)

    assert journey.waits == [CACHE, 1_000_000, 1_000_300]


def test_no_wait(connector: Any) -> None:
    """An item that is there at once is no wait."""
    journey = Journey(1)
    connector.available = True
    connector.ensure_cache_available(SimpleNamespace(_ttft=journey), 0)

    assert not journey.waits


def test_untraced(connector: Any) -> None:
    """A request that is not traced is not looked at."""
    assert not connector.ensure_cache_available(SimpleNamespace(), 0)


def test_outside_a_step(connector: Any, clock: testing.Clock) -> None:
    """Loads outside a measured step just happen."""
    connector.start_load_caches()
    connector.save_caches()

    assert clock.at == 1_000_080
    assert not worker.opened


def test_roles(connector: Any) -> None:
    """The worker knows from the connector what it can lose."""
    assert worker.roles == {"producer", "consumer"}


def test_older_class(fresh: None) -> None:
    """A class without wait or publishing is wrapped as far as it goes."""

    class Old:
        def save_caches(self) -> str:
            return "saved"

    made = Old()
    transfer.created(None, made)

    assert made.save_caches() == "saved"
    assert wrap.active("transfer.save")
    assert not wrap.active("transfer.wait")


def test_created_twice(connector: Any, clock: testing.Clock) -> None:
    """Scheduler's side and worker's side of one class in one process: wrapped once."""
    transfer.created(None, connector)
    transfer.created(None, type(connector)(clock))

    assert all(len(patches) == 1 for patches in wrap.installed.values())
