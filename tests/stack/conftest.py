# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the stack tests: real programs, started once a session on free loopback ports.

`bench` starts any part for a test of its own; `stack` is the shared one, so tests that use it tell their
data apart by service name.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stack.bench import Bench, Collector, Grafana, Prometheus, Stack, Tempo
from tests.stack.filled import Filled, filled_stack
from tests.stack.known import table
from ttft_otel.lab.stack import binaries as found
from ttft_otel.lab.stack import grafana as dashboards
from ttft_otel.lab.stack.binaries import Binaries
from ttft_otel.lab.stack.golang import GoError, GoMissing, Say
from ttft_otel.lab.stack.parts import Addresses


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """A first build takes minutes: before the tests, where no test's time limit counts."""
    needed = any("binaries" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        with contextlib.suppress(GoError):  # the fixture says what is wrong
            found.gather(announce())


def announce() -> Say:
    """Say every twenty seconds what a build is doing."""
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        if time.monotonic() - last > 20:
            last = time.monotonic()
            sys.stderr.write(f"[stack] {line}\n")

    return say


@pytest.fixture(scope="session")
def binaries() -> Binaries:
    """The stack's programs; skipped only where Go and the programs are both missing."""
    try:
        return found.gather(announce())
    except GoMissing as error:
        pytest.skip(f"{error}; then scripts/stack build")


@pytest.fixture(scope="session")
def bench(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Starts parts of the stack; they end with the session, or with a `with` block around them."""
    made = Bench(binaries, tmp_path_factory.mktemp("stack"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def addresses() -> Addresses:
    """The ports of the shared stack."""
    return Addresses.free()


@pytest.fixture(scope="session")
def tempo(bench: Bench, addresses: Addresses) -> Tempo:
    """The shared Tempo."""
    return bench.tempo(addresses)


@pytest.fixture(scope="session")
def prometheus(bench: Bench, addresses: Addresses) -> Prometheus:
    """The shared Prometheus, with our rules."""
    return bench.prometheus(addresses)


@pytest.fixture(scope="session")
def stack(bench: Bench, addresses: Addresses, prometheus: Prometheus, tempo: Tempo) -> Stack:
    """Both, and a collector with collector/config.yaml that is wired to them."""
    return Stack(bench.collector(at=addresses), tempo, prometheus, addresses)


@pytest.fixture(scope="session")
def collector(bench: Bench) -> Callable[..., Collector]:
    """Start a collector: `collector(config, ..., env={...})`; use it in a `with` block, or stop it."""
    return bench.collector


@pytest.fixture(scope="session")
def grafana_home() -> Path | None:
    """An unpacked Grafana, None for the one in GRAFANA_URL; skipped where neither can be found."""
    if os.environ.get("GRAFANA_URL"):
        return None
    home = dashboards.home()
    if home is None:
        pytest.skip(f"no Grafana here; {dashboards.REMEDY}")
    return home


@pytest.fixture(scope="session")
def grafana(bench: Bench, stack: Stack, grafana_home: Path | None) -> Grafana:
    """A Grafana on the shared stack."""
    return bench.grafana(grafana_home, stack.at)


@pytest.fixture(scope="session")
def filled(bench: Bench) -> Iterator[Filled]:
    """A stack of its own, in which nothing is but 2 000 requests whose truth is known."""
    with filled_stack(bench, table()) as found:
        yield found
