# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the whole suite: production's way with errors, a still clock, kept records."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hooks.server import Client, Server

from ttft_otel import guard, recorder, testing
from ttft_otel.hooks import wrap
from ttft_otel.settings import Settings


def pytest_configure() -> None:
    """What the shell gave us and the many processes that tests start should not inherit.

    Started in the background, we ignore Ctrl-C. And where bytecode is not kept, each of a vLLM
    server's processes compiles all that it imports: 32 s instead of 13.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Live tests come last: their servers would idle while others run, and disturb them."""
    items.sort(key=lambda item: "/tests/live/" in item.path.as_posix())


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


@pytest.fixture
def unknown() -> Iterator[None]:
    """A server that has not yet learnt who it is."""
    before = recorder.identity.role, recorder.identity.model
    recorder.identity.role = recorder.identity.model = ""
    yield
    recorder.identity.role, recorder.identity.model = before


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patching code as in a process that has patched nothing."""
    monkeypatch.setattr(wrap, "installed", {})
    monkeypatch.setattr(wrap, "missing", {})
    monkeypatch.setattr(wrap, "out", set())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


@pytest.fixture
def client(
    fresh: None, unknown: None, nothing_left: None, clock: testing.Clock, records: testing.Records
) -> Client:
    """A server of vLLM's shape behind our middleware, and who calls it."""
    return Client(Server(clock), Settings(on=True))
