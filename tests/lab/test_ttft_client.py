# SPDX-License-Identifier: Apache-2.0
"""The measuring client against a real socket that answers as slowly as the test says."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
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


@contextmanager
def run_scripted_server(*script: tuple[float, bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that plays (pause in seconds, bytes) to each connection; its URL, and requests."""
    listener, requests = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def play_script(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # a caller who hangs up is fine
            requests.append(read_request(connection))
            for pause, data in script:
                time.sleep(pause)
                connection.sendall(data)

    def start_script(connection: socket.socket) -> None:
        threading.Thread(target=play_script, args=(connection,), daemon=True).start()

    serving = threading.Thread(
        target=accept_connections, args=(listener, start_script), daemon=True
    )
    serving.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        serving.join()


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


def test_stream() -> None:
    """TTFT ends at the first body data that is no keep-alive comment, not at the headers or the last byte."""
    script = [
        (0.05, HEAD + encode_chunk(b": ping\n\n")),
        (0.1, encode_chunk(encode_token_event("a"))),
        (0.1, encode_chunk(encode_token_event("b")) + b"0\r\n\r\n"),
    ]
    with run_scripted_server(*script) as (url, requests):
        answer = ttft_client.send_timed_request(url, headers={"traceparent": "00-1-2-01"})
    sent = requests[0].lower()

    assert answer.client_ttft_us is not None
    assert 150_000 <= answer.client_ttft_us < 240_000
    assert 250_000 <= answer.total_us < 400_000
    assert ("r1", 200, "ab") == (answer.request_id, answer.status, answer.text)
    assert {"receive": 0.25, "encoder.compute": 12.5} == answer.server_timing
    assert len(answer.events) == 2
    assert b"traceparent: 00-1-2-01" in sent and b"x-request-id: " in sent


def test_plain() -> None:
    """A plain answer has a text and a total, but no time to first token."""
    body = b'{"choices": [{"message": {"content": "yes"}}]}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with run_scripted_server((0, head % len(body) + body)) as (url, _):
        answer = ttft_client.send_timed_request(url, stream=False)

    assert ("yes", None) == (answer.text, answer.client_ttft_us)


@pytest.mark.parametrize("script", [[(5.0, HEAD)], [(0, HEAD), (5.0, b"")]])
def test_abort(script: list[tuple[float, bytes]]) -> None:
    """The client hangs up on time, before the headers or in the middle of the body."""
    with run_scripted_server(*script) as (url, _):
        answer = ttft_client.send_timed_request(url, abort_s=0.1)

    assert answer.aborted
    # The time to connect is in abort_s.
    assert 90_000 <= answer.total_us < 1_000_000


def test_together() -> None:
    """Many questions are under way at once, and the answers come in order."""
    token = encode_chunk(encode_token_event("a")) + b"0\r\n\r\n"
    with run_scripted_server((0.2, HEAD + token)) as (url, _):
        began = time.monotonic()
        answers = ttft_client.send_timed_requests(url, [ttft_client.TimedRequest()] * 8)

    assert time.monotonic() - began < 1.0
    assert ["a"] * 8 == [answer.text for answer in answers]


def test_pieces() -> None:
    """An event that comes in two pieces has the time of the second; entries without a duration are zero."""
    events = ttft_client.split_events([(1_000, b"data: a"), (5_000, b"\n\ndata: b\n\n")], 0)

    assert (ttft_client.TimedEvent(5, "a"), ttft_client.TimedEvent(5, "b")) == events
    assert {"a": 0.0, "b": 1.5} == ttft_client.parse_timing('a, b;desc="x";dur=1.5')
    assert {} == ttft_client.parse_timing("")
