# SPDX-License-Identifier: Apache-2.0
"""A real `serve` on free loopback ports, and stores in a temporary folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trips import Served

from ttft_otel.report.server import Doors, Options, run
from ttft_otel.report.store import Store


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start servers with any options; all have ended, and joined, after the test."""
    running: list[tuple[threading.Thread, Doors]] = []

    def start(**options: Any) -> Served:
        path = options.pop("path", tmp_path / f"spans{len(running)}.db")
        ready = threading.Event()
        found: list[Doors] = []

        def started(doors: Doors) -> None:
            found.append(doors)
            ready.set()

        chosen = Options(path, **{"http_port": 0, "grpc_port": 0, **options})
        thread = threading.Thread(target=run, args=(chosen, started))
        thread.start()
        assert ready.wait(20)
        running.append((thread, found[0]))
        return Served(found[0], path)

    yield start
    for thread, doors in running:
        doors.close()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """One server with the default options."""
    return serve()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """One store without a server."""
    made = Store(tmp_path / "spans.db")
    yield made
    made.close()
