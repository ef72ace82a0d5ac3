# SPDX-License-Identifier: Apache-2.0
"""The measuring client against a real socket that answers as slowly as the test says."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from lab import ttft_client
from lab.free_ports import accept_connections

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"X-Request-Id: r1\r\nServer-Timing: receive;dur=0.25, encoder.compute;dur=12.5\r\n\r\n"
)


def encode_chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def encode_token_event(text: str) -> bytes:
    """One chat event."""
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


class ScriptedServer:
    """A server that plays one script of (pause in seconds, bytes) per connection."""

    def __init__(self, script: Sequence[tuple[float, bytes]]) -> None:
        """Listen; nothing is accepted yet."""
        self.script = script
        self.requests: list[bytes] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def serve_connections(self) -> None:
        """Answer connections until the socket is closed."""
        accept_connections(self.socket, self.start_script)

    def start_script(self, connection: socket.socket) -> None:
        """Play the script to this connection in a thread of its own."""
        threading.Thread(target=self.play_script, args=(connection,), daemon=True).start()

    def play_script(self, connection: socket.socket) -> None:
        """Read one request, then play the script; a caller who hangs up is fine."""
        with connection:
            self.requests.append(read_request(connection))
            for pause, data in self.script:
                time.sleep(pause)
                try:
                    connection.sendall(data)
                except OSError:
                    return


def read_request(connection: socket.socket) -> bytes:
    """The head and the body of one request."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def run_scripted_server(*script: tuple[float, bytes]) -> Iterator[ScriptedServer]:
    """A ScriptedServer for the length of a block."""
    server = ScriptedServer(script)
    thread = threading.Thread(target=server.serve_connections, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.socket.shutdown(socket.SHUT_RDWR)
        server.socket.close()
        thread.join()


class TestAsk:
    """One question."""

    def test_times(self) -> None:
        """TTFT ends at the first body data, not at the headers and not at the last byte."""
        script = [
            (0.05, HEAD),
            (0.1, encode_chunk(encode_token_event("a"))),
            (0.1, encode_chunk(encode_token_event("b")) + b"0\r\n\r\n"),
        ]
        with run_scripted_server(*script) as server:
            answer = ttft_client.send_timed_request(server.url)

        assert answer.client_ttft_us is not None
        assert 150_000 <= answer.client_ttft_us < 240_000
        assert 250_000 <= answer.total_us < 400_000

    def test_content(self) -> None:
        """Text, id and Server-Timing come back parsed."""
        with run_scripted_server(
            (
                0,
                HEAD
                + encode_chunk(encode_token_event("a"))
                + encode_chunk(encode_token_event("b"))
                + b"0\r\n\r\n",
            )
        ) as server:
            answer = ttft_client.send_timed_request(server.url)

        assert ("r1", 200, "ab") == (answer.request_id, answer.status, answer.text)
        assert {"receive": 0.25, "encoder.compute": 12.5} == answer.server_timing

    def test_keepalive(self) -> None:
        """A keep-alive comment before the first token is not the first token."""
        script = [
            (0, HEAD + encode_chunk(b": ping\n\n")),
            (0.1, encode_chunk(encode_token_event("a")) + b"0\r\n\r\n"),
        ]
        with run_scripted_server(*script) as server:
            answer = ttft_client.send_timed_request(server.url)

        assert answer.client_ttft_us is not None and answer.client_ttft_us >= 100_000
        assert 1 == len(answer.events)

    def test_plain(self) -> None:
        """A plain answer has a text and a total, but no time to first token."""
        body = b'{"choices": [{"message": {"content": "yes"}}]}'
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        with run_scripted_server((0, head % len(body) + body)) as server:
            answer = ttft_client.send_timed_request(server.url, stream=False)

        assert ("yes", None) == (answer.text, answer.client_ttft_us)

    @pytest.mark.parametrize("script", [[(5.0, HEAD)], [(0, HEAD), (5.0, b"")]])
    def test_abort(self, script: list[tuple[float, bytes]]) -> None:
        """The client hangs up on time, before the headers or in the middle of the body."""
        with run_scripted_server(*script) as server:
            answer = ttft_client.send_timed_request(server.url, abort_s=0.1)

        assert answer.aborted
        # The time to connect is in abort_s.
        assert 90_000 <= answer.total_us < 1_000_000

    def test_headers(self) -> None:
        """Extra headers are sent, and a request id is made where none is given."""
        with run_scripted_server((0, HEAD + b"0\r\n\r\n")) as server:
            ttft_client.send_timed_request(server.url, headers={"traceparent": "00-1-2-01"})
            sent = server.requests[0].lower()

        assert b"traceparent: 00-1-2-01" in sent
        assert b"x-request-id: " in sent

    def test_together(self) -> None:
        """Many questions are under way at once, and the answers come in order."""
        with run_scripted_server(
            (0.2, HEAD + encode_chunk(encode_token_event("a")) + b"0\r\n\r\n")
        ) as server:
            began = time.monotonic()
            answers = ttft_client.send_timed_requests(server.url, [ttft_client.TimedRequest()] * 8)

        assert time.monotonic() - began < 1.0
        assert ["a"] * 8 == [answer.text for answer in answers]


class TestEvents:
    """Cutting a stream."""

    def test_split(self) -> None:
        """An event that comes in two pieces has the time of the second."""
        events = ttft_client.split_events([(1_000, b"data: a"), (5_000, b"\n\ndata: b\n\n")], 0)

        assert (ttft_client.TimedEvent(5, "a"), ttft_client.TimedEvent(5, "b")) == events

    def test_timing(self) -> None:
        """Server-Timing entries without a duration count as zero."""
        assert {"a": 0.0, "b": 1.5} == ttft_client.parse_timing('a, b;desc="x";dur=1.5')
        assert {} == ttft_client.parse_timing("")
