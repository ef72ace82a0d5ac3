# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the stack tests: real programs, on free loopback ports.

`bench` starts any part for a test of its own; `front` is a collector between sinks, for a file; `filled` is a
stack for two files (file_schedule.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.otlp_sinks import QUICK_FLUSH_CONFIG, MetricSink, SpanSink
from lab.stack import binaries as found
from lab.stack import grafana_server as dashboards
from lab.stack.binaries import StackBinaries
from lab.stack.go_builds import GoBuildError, GoMissingError
from lab.stack.stack_parts import COLLECTOR_CONFIG
from tests.build_progress import make_announcer
from tests.stack.filled_stack import FilledStack, filled_stack
from tests.stack.known_requests import build_known_requests
from tests.stack.otlp_requests import PUSH_S, CollectorFront
from tests.stack.running_stack import StackStarter, obtain_tool


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Build the stack's programs before the first test: it takes minutes, which no test's limit allows.

    A module that needs others names them in BUILT_TOOLS.
    """
    needed = any("binaries" in getattr(item, "fixturenames", ()) for item in session.items)
    others = {
        tool: None
        for item in session.items
        for tool in getattr(getattr(item, "module", None), "BUILT_TOOLS", ())
    }
    if needed and not session.config.option.collectonly:
        with contextlib.suppress(GoBuildError):  # the fixture says what is wrong
            found.gather_binaries(make_announcer("stack"))
            for tool in others:
                obtain_tool(tool)


@pytest.fixture(scope="session")
def binaries() -> StackBinaries:
    """The stack's programs; skipped only where Go and the programs are both missing."""
    try:
        return found.gather_binaries(make_announcer("stack"))
    except GoMissingError as error:
        pytest.skip(f"{error}; then scripts/stack build")


@pytest.fixture(scope="session")
def bench(
    binaries: StackBinaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StackStarter]:
    """Starts parts of the stack; they end with the session, or with a `with` block around them."""
    made = StackStarter(binaries, tmp_path_factory.mktemp("stack"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def grafana_home() -> Path | None:
    """An unpacked Grafana; None when GRAFANA_URL names a running one. Skips where neither exists."""
    if os.environ.get("GRAFANA_URL"):
        return None
    home = dashboards.find_grafana_home()
    if home is None:
        pytest.skip(f"no Grafana here; {dashboards.GRAFANA_REMEDY}")
    return home


@pytest.fixture(scope="session")
def filled(bench: StackStarter) -> Iterator[FilledStack]:
    """A separate stack that holds exactly 2 000 requests whose figures are known."""
    with filled_stack(bench, build_known_requests()) as found:
        yield found


@contextlib.contextmanager
def open_sinks() -> Iterator[tuple[SpanSink, MetricSink]]:
    """What stands in Tempo's and Prometheus's place, for the length of a block."""
    spans, metrics = SpanSink(), MetricSink()
    yield spans, metrics
    metrics.close()
    spans.stop()


@pytest.fixture
def sinks() -> Iterator[tuple[SpanSink, MetricSink]]:
    """New sinks for each test: those who use them count what arrives."""
    with open_sinks() as made:
        yield made


@pytest.fixture(scope="module")
def front(bench: StackStarter) -> Iterator[CollectorFront]:
    """The configuration as it is, for a file; tests tell their spans apart by name or service."""
    with open_sinks() as (spans, metrics):
        # Many tests wait for a push.
        env = {**spans.env, **metrics.env, "TTFT_METRICS_INTERVAL": f"{PUSH_S:.1f}s"}
        with bench.start_collector(COLLECTOR_CONFIG, QUICK_FLUSH_CONFIG, env=env) as collector:
            yield CollectorFront(collector, spans, metrics)
