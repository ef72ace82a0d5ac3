# SPDX-License-Identifier: Apache-2.0
"""Breakdowns behind a proxy that takes Server-Timing away: a real router's process still has them."""

from __future__ import annotations

import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.conftest import Bench
from bench.server import Script, serving
from ttft_otel import names
from ttft_otel.lab import ports

SECONDS = 120  # a process takes its time to start where others are busy


@contextmanager
def routed(backend: str, **env: str) -> Iterator[str]:
    """Our router in front of a server; its URL."""
    url = f"http://127.0.0.1:{(port := ports.free())}"
    words = ["router", "--backend", backend, "--port", str(port)]
    quiet = {names.ENV_ENDPOINT: "http://127.0.0.1:9", **env}
    with subprocess.Popen(
        [sys.executable, "-m", "ttft_otel.cli", *words],
        env={**os.environ, **quiet},
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait(f"{url}/readyz", process)
            yield url
        finally:
            process.kill()


def wait(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until a URL answers 200."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


@contextmanager
def stripped(url: str) -> Iterator[str]:
    """A proxy that passes everything on but Server-Timing; its URL."""
    host, _, port = url.removeprefix("http://").partition(":")

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            """One connection, both ways."""
            with socket.create_connection((host, int(port))) as other:
                threading.Thread(target=pump, args=(self.request, other), daemon=True).start()
                pump(other, self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Relay) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def pump(one: socket.socket, other: socket.socket) -> None:
    """Bytes from one to the other; a header line of ours gets a name that nobody knows."""
    try:
        while data := one.recv(65536):
            other.sendall(data.replace(b"server-timing:", b"x-not-for-you:"))
    except OSError:
        pass  # either side may close first


def test_proxied(bench: Bench) -> None:
    """Every request's breakdown is the router's report, and adds up to the client's TTFT."""
    with (
        serving(Script(first=[30.0], queue=[10.0], tokens=2)) as server,
        routed(server.url) as router,
        stripped(router) as proxy,
    ):
        found = bench("--url", proxy, "--concurrency", 2, "--requests", 8)["targets"][0]

    rows = found["runs"][0]["requests"]
    assert found["summary"]["breakdowns"] == 8
    for row in rows:
        assert sum(row["stages_ms"].values()) == pytest.approx(row["ttft_ms"], abs=0.01)
        assert row["stages_ms"]["mono.prefill.queue"] == 10.0
        assert "router.hop.mono" in row["stages_ms"]


def test_untold(bench: Bench) -> None:
    """A router with tracing off has no reports: three requests are asked for, and no stage is made up."""
    with (
        serving(Script(first=[5.0], tokens=1, traced=False)) as server,
        routed(server.url, **{names.ENV_ON: "0"}) as router,
    ):
        found = bench("--url", router, "--concurrency", 2, "--requests", 8)["targets"][0]

    assert found["summary"]["breakdowns"] == 0
    assert "/ttft_report" in found["summary"]["explanation"]
