# SPDX-License-Identifier: Apache-2.0
"""What nobody should do: strange answers, traces and flags cost one clear sentence, never a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread

import pytest

from bench.conftest import RunBench, invoke_bench
from bench.scripted_server import ServerScript, run_scripted_server
from lab.http_servers import HttpServerThread, SilentHandler

ABSENT_SERVER = "--url http://127.0.0.1:1 --model m"
TRACE_ROW = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}


@contextmanager
def serve_events(*events: bytes, discovery_response: bytes = b"") -> Iterator[str]:
    """A server whose every stream is these events, up to the end of the connection.

    discovery_response: what it says to the small completion before the load.
    """

    class EventsHandler(SilentHandler):
        protocol_version = "HTTP/1.0"

        def do_POST(self) -> None:
            body = self.read_body()
            stream = b"".join(b"data: %b\n\n" % each for each in events)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(discovery_response if b"return_token_ids" in body else stream)

    with HttpServerThread(EventsHandler) as server:
        yield server.url


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices": [{"text": "a"}], "usage": 3}',
        b'{"choices": [{"text": 5}], "usage": {"prompt_tokens": "x", "completion_tokens": true}}',
        b'{"choices": ["x", {"text": "a"}], "usage": {"prompt_tokens_details": [1]}}',
        b'{"choices": [{"delta": "a", "text": "a"}], "usage": {"completion_tokens": -1}}',
    ],
)
def test_types(bench: RunBench, event: bytes) -> None:
    """A field of another type than expected in a server's answer is treated as missing."""
    with serve_events(event, b"[DONE]") as url:
        found = bench("--url", url, "--model m --concurrency 1 --requests 2")

    run = found["targets"][0]["runs"][0]
    assert run["succeeded"] == 2
    assert [each["input_tokens"] for each in run["requests"]] == [None, None]
    assert [each["output_tokens"] for each in run["requests"]] == [1, 1]


def test_unfinished() -> None:
    """A stream that closes without [DONE] counts as cut off, although HTTP reports no error."""
    with serve_events(b'{"choices": [{"text": "a"}]}') as url:
        words = ("--url", url, "--model m --concurrency 1 --requests 1 --json")
        result = invoke_bench(*words)

    target = json.loads(result.stdout)["targets"][0]
    assert target["runs"][0]["failures"] == {"cut off": 1}
    assert target["summary"]["explanation"].startswith("No request succeeded")


def test_finished(bench: RunBench) -> None:
    """A finish reason ends a stream, too."""
    with serve_events(b'{"choices": [{"text": "a", "finish_reason": "length"}]}') as url:
        found = bench("--url", url, "--model m --concurrency 1 --requests 1")

    assert found["targets"][0]["runs"][0]["succeeded"] == 1


def test_wordless(bench: RunBench) -> None:
    """When the server does not say how many tokens a word has, a chat gets one word for each token."""
    told = b'{"usage": {"prompt_tokens": 0}, "choices": [{}]}'
    with serve_events(
        b'{"choices": [{"delta": {"content": "a"}}]}', b"[DONE]", discovery_response=told
    ) as url:
        words = "--api chat --concurrency 1 --requests 1"
        found = bench("--url", url, "--model m", words)

    assert found["targets"][0]["runs"][0]["succeeded"] == 1


def test_uncounted() -> None:
    """A server that reports no usage has no prompt tokens per second, instead of 0."""
    with run_scripted_server(ServerScript(reports_usage=False)) as server:
        said = invoke_bench("--url", server.url, "--concurrency 1 --requests 1").output

    assert "counted as events" in " ".join(said.split()) and "tokens/s in" not in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"[]", "no question"),
        (b'[{"conversations": [{"from": "human"}]}]', "form of ShareGPT"),
        (b"\xde\xad\n", ":1: not a line"),
        (json.dumps(TRACE_ROW | {"input_length": 3.5}).encode(), ":1: timestamp, delay"),
        (json.dumps(TRACE_ROW | {"timestamp": float("nan")}).encode(), ":1: timestamp, delay"),
        (json.dumps(TRACE_ROW | {"output_length": -1}).encode(), ":1: timestamp, delay"),
        (json.dumps(TRACE_ROW | {"hash_ids": "abc"}).encode(), ":1: input_length"),
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


@pytest.mark.parametrize("limit", ["ttft=nan", "ttft=0", "ttft=-1", "ttft=inf", "ttft", "x=1"])
def test_limit(limit: str) -> None:
    """A limit that no request could keep, or none could miss, is a mistake."""
    result = invoke_bench(ABSENT_SERVER, "--rate 1 --slo", limit)

    assert result.exit_code == 2 and "--slo needs NAME=MS" in result.output


@pytest.mark.parametrize(
    "header", ["a: b\nc: d", "a: \u2603", "a b: c", ": c", "Content-Length: 3", "connection: x"]
)
def test_header(header: str) -> None:
    """A header that would break each request, or be another one, is refused, its value not shown."""
    result = invoke_bench(ABSENT_SERVER, "--rate 1 --header", header)

    assert result.exit_code == 2 and "--header" in result.output
    assert "\u2603" not in result.output
