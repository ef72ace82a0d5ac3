# SPDX-License-Identifier: Apache-2.0
"""A real `serve` on free loopback ports, and stores in a temporary folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_records import RunningServer

from ttft_otel.report.breakdown_source import ServeOptions
from ttft_otel.report.report_server import ReportServer, run_server
from ttft_otel.report.store.span_store import SpanStore


@pytest.fixture
def start_report_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Start servers with any options; all have ended, and joined, after the test."""
    running: list[tuple[threading.Thread, ReportServer]] = []

    def start_server(**options: Any) -> RunningServer:
        path = options.pop("path", tmp_path / f"spans{len(running)}.db")
        ready = threading.Event()
        servers: list[ReportServer] = []

        def note_started(server: ReportServer) -> None:
            servers.append(server)
            ready.set()

        chosen = ServeOptions(path, **{"http_port": 0, "grpc_port": 0, **options})
        thread = threading.Thread(target=run_server, args=(chosen, note_started))
        thread.start()
        assert ready.wait(20)
        (server,) = servers
        running.append((thread, server))
        return RunningServer(
            server, f"http://127.0.0.1:{server.http_port}", f"127.0.0.1:{server.grpc_port}", path
        )

    yield start_server
    for thread, server in running:
        server.close()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def report_server(start_report_server: Callable[..., RunningServer]) -> RunningServer:
    """One server with the default options."""
    return start_report_server()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SpanStore]:
    """One store without a server."""
    made = SpanStore(tmp_path / "spans.db")
    yield made
    made.close()
