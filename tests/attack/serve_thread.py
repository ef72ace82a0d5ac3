# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel serve` in a thread of the test, which asks its ports as anybody would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from ttft_otel.report.breakdown_source import ServeOptions
from ttft_otel.report.report_server import ReportServer, run_server


@contextmanager
def run_serve(folder: Path, grpc_port: int = -1, **more: Any) -> Iterator[ReportServer]:
    """Serve a database in `folder` on a free port. more: fields of ServeOptions."""
    servers: list[ReportServer] = []
    ready = Event()
    options = ServeOptions(folder / "spans.db", http_port=0, grpc_port=grpc_port, **more)
    thread = Thread(target=run_server, args=(options, lambda it: (servers.append(it), ready.set())))
    thread.start()
    assert ready.wait(30)
    try:
        yield servers[0]
    finally:
        servers[0].close()
        thread.join(30)
