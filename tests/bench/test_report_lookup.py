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

from bench.conftest import RunBench
from bench.scripted_server import ServerScript, run_scripted_server
from lab import free_ports
from ttft_otel.model.names import env_names

START_TIMEOUT_S = 120  # a process takes its time to start where others are busy


@contextmanager
def run_router_process(backend: str, **env: str) -> Iterator[str]:
    """Our router in front of a server; its URL."""
    url = f"http://127.0.0.1:{(port := free_ports.find_free_port())}"
    words = ["router", "--backend", backend, "--port", str(port)]
    quiet = {env_names.OTEL_EXPORTER_OTLP_ENDPOINT: "http://127.0.0.1:9", **env}
    with subprocess.Popen(
        [sys.executable, "-m", "ttft_otel.commands.main", *words],
        env={**os.environ, **quiet},
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_until_ready(f"{url}/readyz", process)
            yield url
        finally:
            process.kill()


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until a URL answers 200."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


@contextmanager
def run_stripping_proxy(url: str) -> Iterator[str]:
    """A proxy that passes everything on but Server-Timing; its URL."""
    host, _, port = url.removeprefix("http://").partition(":")

    class StrippingRelay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            """One connection, both ways."""
            with socket.create_connection((host, int(port))) as other:
                threading.Thread(
                    target=relay_bytes, args=(self.request, other), daemon=True
                ).start()
                relay_bytes(other, self.request)

    class StrippingServer(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with StrippingServer(("127.0.0.1", 0), StrippingRelay) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def relay_bytes(source: socket.socket, destination: socket.socket) -> None:
    """Bytes from one to the other; a header line of ours gets a name that nobody knows."""
    try:
        while data := source.recv(65536):
            destination.sendall(data.replace(b"server-timing:", b"x-not-for-you:"))
    except OSError:
        pass  # either side may close first


def test_proxied(bench: RunBench) -> None:
    """Every request's breakdown is the router's report, and adds up to the client's TTFT."""
    with (
        run_scripted_server(
            ServerScript(first_token_ms=[30.0], queue_ms=[10.0], token_count=2)
        ) as server,
        run_router_process(server.url) as router,
        run_stripping_proxy(router) as proxy,
    ):
        found = bench("--url", proxy, "--concurrency 2 --requests 8")["targets"][0]

    rows = found["runs"][0]["requests"]
    assert found["summary"]["breakdowns"] == 8
    for row in rows:
        assert sum(row["stages_ms"].values()) == pytest.approx(row["ttft_ms"], abs=0.01)
        assert row["stages_ms"]["mono.prefill.queue"] == 10.0
        assert "router.hop.mono" in row["stages_ms"]


def test_untold(bench: RunBench) -> None:
    """A router with tracing off has no reports: three requests are asked for, and no stage is made up."""
    with (
        run_scripted_server(
            ServerScript(first_token_ms=[5.0], token_count=1, sends_timing=False)
        ) as server,
        run_router_process(server.url, **{env_names.TTFT_OTEL: "0"}) as router,
    ):
        found = bench("--url", router, "--concurrency 2 --requests 8")["targets"][0]

    assert found["summary"]["breakdowns"] == 0
    assert "/ttft_report" in found["summary"]["explanation"]
