# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the whole suite: production's way with errors, a still clock, kept records."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ttft_otel import guard, testing


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our errors are caught and counted, as in production; without it they fail the test."""
    monkeypatch.setenv("TTFT_OTEL_GUARD", "keep")
    guard.errors.clear()
    yield
    guard.errors.clear()


@pytest.fixture
def clock() -> Iterator[testing.Clock]:
    """Time stands still until the test moves it."""
    with testing.frozen() as still:
        yield still


@pytest.fixture
def records() -> Iterator[testing.Records]:
    """What would have gone to the exporter."""
    with testing.captured() as kept:
        yield kept


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Whatever the test did to its requests, no state of them stays behind."""
    yield
    assert not any(testing.sizes().values()), testing.sizes()
