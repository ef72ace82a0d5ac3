# SPDX-License-Identifier: Apache-2.0
"""What nobody should do: strange answers, traces and flags cost one clear sentence, never a run."""

from __future__ import annotations

import json
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread

import pytest

from bench.conftest import invoke_bench
from bench.scripted_server import ServerScript, run_scripted_server

ABSENT_SERVER = "--url http://127.0.0.1:1 --model m"
TRACE_ROW = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"[]", "no question"),
        (b'[{"conversations": [{"from": "human"}]}]', "form of ShareGPT"),
        (b"\xde\xad\n", ":1: not a line"),
        (json.dumps(TRACE_ROW | {"input_length": 3.5}).encode(), "`$.input_length`"),
        (json.dumps(TRACE_ROW | {"timestamp": float("nan")}).encode(), ":1: not a line"),
        (json.dumps(TRACE_ROW | {"delay": -1}).encode(), "`$.delay`"),
        (json.dumps(TRACE_ROW | {"output_length": True}).encode(), "`$.output_length`"),
        (
            json.dumps(TRACE_ROW | {"timestamp": None}).encode(),
            ":1: neither a timestamp nor a delay",
        ),
        (json.dumps(TRACE_ROW | {"hash_ids": "abc"}).encode(), "`$.hash_ids`"),
        (json.dumps(TRACE_ROW | {"input_length": 513}).encode(), ":1: input_length"),
        (
            f"{json.dumps(TRACE_ROW | {'timestamp': 5})}\n{json.dumps(TRACE_ROW)}".encode(),
            ":2: earlier than the line before",
        ),
    ],
)
def test_trace(tmp_path: Path, content: bytes, says: str) -> None:
    """A trace that cannot be played is refused with its line and why, before anything is sent."""
    trace = tmp_path / "trace"
    trace.write_bytes(content)
    result = invoke_bench(ABSENT_SERVER, trace)

    assert result.exit_code == 1
    assert says in " ".join(result.output.split())


def test_steering() -> None:
    """A server that does not speak HTTP is named; its bytes, which may control a terminal, are not shown."""

    class SteeringHandler(StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.wfile.write(b"\x1b[2J\x07\r\n\r\n")

    with ThreadingTCPServer(("127.0.0.1", 0), SteeringHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        result = invoke_bench("--url", f"http://127.0.0.1:{server.server_address[1]}", "--rate 1")
        server.shutdown()

    assert result.exit_code == 1 and "names no model" in result.output
    assert not {"\x1b", "\x07"} & set(result.output)


@pytest.mark.parametrize("flag", ["--output", "--csv"])
def test_nowhere(tmp_path: Path, flag: str) -> None:
    """Results that could not be written are known before the load, not after it."""
    with run_scripted_server(ServerScript()) as server:
        result = invoke_bench("--url", server.url, "--rate 1", flag, tmp_path / "no" / "file")
        notes = server.fetch_notes()

    assert result.exit_code == 2 and "cannot be written" in result.output
    assert not notes


def test_full() -> None:
    """With the disk full the results are on the terminal all the same."""
    with run_scripted_server(ServerScript()) as server:
        words = "--concurrency 1 --requests 1 --output /dev/full"
        result = invoke_bench("--url", server.url, words)

    assert result.exit_code == 1
    assert "Latency" in result.output and "No space left on device" in result.output
