# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests: production's error handling, a fake clock, records in memory."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import hypothesis
import pytest
import tracing_fakes
from file_schedule import FileScheduling, rank_file
from hooks.process import PATCHER, count_state
from hooks.server import FakeApiServer, FakeClient

from ttft_otel.tracing import guard, recorder
from ttft_otel.tracing.request_trace import identity
from ttft_otel.tracing.settings import Settings

# With --hypothesis-profile quick, as in scripts/test --quick; by default there are a hundred examples.
# Tests that need more or fewer take a multiple of `settings.default.max_examples`.
hypothesis.settings.register_profile("quick", max_examples=20)


def pytest_configure() -> None:
    """Reset what processes started by tests should not inherit from the shell.

    Started in the background, we ignore Ctrl-C. And where bytecode is not kept, each of a vLLM
    server's processes compiles all that it imports: 32 s instead of 13; pytest and each of its
    workers compile all tests anew, 12 s of CPU instead of 5, and vLLM once more.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False  # this process read the variable before we could remove it
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage, and take what is there then out of all later searches.

    Thousands of tests and their modules stay until the end; to look through them again and again was a
    tenth of the run. What tests make themselves is looked through as ever.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, object, object]:
    """Render failures without looking for garbage.

    For that pytest parses sources. Hypothesis has a callback of the garbage collector, in which another
    thread gets its turn; if that one parses, too, as Python 3.11 does to print a traceback, the first one
    ends with "AST constructor recursion depth mismatch", and with it the run (CPython's issue 106905).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    """Called by pytest-xdist, with -n."""
    return FileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Live tests come last: their servers would idle while others run, and disturb them.

    Several processes begin with the files that take longest.
    """
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=lambda item: rank_file(item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: "/tests/live/" in item.path.as_posix())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the time of the tests by folder.

    Seconds of all processes together; tests in several processes take less than that.
    """
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            folder = report.nodeid.partition("::")[0].rpartition("/")[0]
            seconds[folder] += report.duration
            counts[folder] += report.when == "call"
    if not seconds:
        return  # nothing ran, as with --collect-only
    terminalreporter.section("time by folder")
    for folder, spent in seconds.most_common(12):
        terminalreporter.line(f"{spent:7.0f} s  {counts[folder]:5d} tests  {folder}")


@pytest.fixture
def guard_keeps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Catch and count our errors as in production; without this fixture they fail the test."""
    monkeypatch.setenv("TTFT_OTEL_GUARD", "keep")
    guard.error_counts.clear()
    yield
    guard.error_counts.clear()


@pytest.fixture
def clock() -> Iterator[tracing_fakes.FakeClock]:
    """A fake clock that moves only by tick()."""
    with tracing_fakes.frozen_clock() as still:
        yield still


@pytest.fixture
def records() -> Iterator[tracing_fakes.MemorySender]:
    """The records that would have been sent to the exporter."""
    with tracing_fakes.captured_records() as kept:
        yield kept


@pytest.fixture
def no_state_left() -> Iterator[None]:
    """Check that the test leaves no state of its requests behind."""
    yield
    sizes = {
        "recorder.awaiting": len(recorder.awaiting_traces),
        "recorder.unended": len(recorder.unended_requests),
    }
    sizes |= count_state()
    assert not any(sizes.values()), sizes


@pytest.fixture
def blank_identity() -> Iterator[None]:
    """Reset roles.identity to that of a server before its start."""
    known = {name: getattr(identity, name) for name in identity.__slots__}
    identity.__init__()  # type: ignore[misc]
    yield
    for name, value in known.items():
        setattr(identity, name, value)


@pytest.fixture
def nothing_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the patcher of the hooks' tests to that of a process without patches."""
    monkeypatch.setattr(PATCHER, "installed", {})
    monkeypatch.setattr(PATCHER, "disabled", set())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


@pytest.fixture
def client(
    nothing_patched: None,
    blank_identity: None,
    no_state_left: None,
    clock: tracing_fakes.FakeClock,
    records: tracing_fakes.MemorySender,
) -> FakeClient:
    """A client of a vLLM-like ASGI app behind our middleware."""
    return FakeClient(FakeApiServer(clock), Settings(on=True), records)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a check is true; the last assertion speaks for itself."""

    def wait(check: Callable[[], object], seconds: float = 10.0) -> None:
        until = time.monotonic() + seconds
        while not (found := check()) and time.monotonic() < until:
            time.sleep(0.02)
        assert found

    return wait
