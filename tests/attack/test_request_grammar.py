# SPDX-License-Identifier: Apache-2.0
"""Requests of every grammar on raw sockets: answers belong to their requests, and nothing stays behind."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as some
from router import raw_http
from router.proxy.test_endpoint_soak import repeatable_examples, run_fleet

CHAT: Final = "/v1/chat/completions"
FLAGS: Final = ("--head-timeout", "0.5", "--body-timeout", "0.5", "--max-headers", "40")
QUIET_S: Final = 0.05  # without a byte for so long, the router has said what it has to say
MARK: Final = re.compile(rb"mark-[0-9]+")
MAX_ANSWER_S: Final = 20.0  # of a busy machine
CONCURRENT_CONNECTIONS: Final = 8  # of one example; so many clients the router keeps apart
EXAMPLES: Final = (
    pytest.param(200, id="some"),
    pytest.param(50_000, id="50000", marks=(pytest.mark.full, pytest.mark.timeout(7200))),
)


@dataclass(frozen=True)
class Request:
    """One request of a connection: its bytes, and the mark in its body, b"" if it has none of its own."""

    data: bytes
    mark: bytes


def encode_body(mark: bytes, size: int, is_stream: bool) -> bytes:
    """A JSON body with its mark, which the instance echoes."""
    stream = b', "stream": true' if is_stream else b""
    return b'{"model": "tiny", "user": "%b"%b, "input": "%b"}' % (mark, stream, b"x" * size)


@some.composite
def draw_request(draw: some.DrawFn, number: int) -> Request:
    """A request that may be right or wrong in each of its parts."""
    mark = b"mark-%d" % number
    body = encode_body(mark, draw(some.sampled_from([0, 0, 10, 3000])), draw(some.booleans()))
    lines = [
        draw(
            some.sampled_from(
                [*[f"POST {CHAT} HTTP/1.1"] * 12, f"POST {CHAT}?a=b HTTP/1.1"]
                + [f"POST {CHAT} HTTP/1.0", f"POST {CHAT} HTTP/3.7", f"post {CHAT} HTTP/1.1"]
                + [f"POST http://other{CHAT} HTTP/1.1", "GET /healthz HTTP/1.1", "POST * HTTP/1.1"]
                + [f"CONNECT {CHAT} HTTP/1.1", "OPTIONS * HTTP/1.1", f" POST  {CHAT} HTTP/1.1"]
                + ["PRI * HTTP/2.0", "POST /v1/../x HTTP/1.1", f"POST {CHAT}", ""]
            )
        ),
        "host: localhost",
        "content-type: application/json",
        "x-mood: echo",
    ]
    lines += draw(
        some.lists(
            some.sampled_from(
                ["connection: close", "connection: keep-alive", "connection: x-mood"]
                + ["connection: upgrade\r\nupgrade: h2c", "connection: Upgrade, HTTP2-Settings"]
                + ["upgrade: websocket", "expect: 100-continue", "te: trailers", "trailer: x-late"]
                + ["x-empty:", "x-odd : a", " folded", "x-\x00: a", "x: \xff", "x: a\rb", "x" * 90]
                + ["x-many: a\r\n" * 60 + "x: a", "content-length: 1", "transfer-encoding: gzip"]
            ),
            max_size=2,
        )
    )
    framing = draw(some.sampled_from(["length", "length", "length", "chunks", "chunks", "none"]))
    if framing == "length":
        shift = draw(some.sampled_from([*[0] * 10, 1, -1]))
        lines.append(f"content-length: {draw(some.sampled_from([*['', '', '', '+', '0']]))}")
        lines[-1] += str(len(body) + shift)
    elif framing == "chunks":
        lines.append("transfer-encoding: chunked")
        cuts = sorted(draw(some.lists(some.integers(1, len(body)), max_size=3)))
        pieces = [body[low:high] for low, high in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        note = draw(some.sampled_from([b"", b"", b";a=b", b" ", b"\x00"]))
        body = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), note, piece) for piece in pieces if piece)
        late = b"x-late: a\r\nauthorization: Bearer x\r\n"
        trailers = draw(some.sampled_from([b"", b"", b"", late, b"x: a\r\n" * 60]))
        body += (
            draw(some.sampled_from([b"0\r\n", b"0\r\n", b"00\r\n", b"-0\r\n"])) + trailers + b"\r\n"
        )
    end = draw(some.sampled_from([*["\r\n"] * 8, "\n"]))
    return Request(end.join([*lines, "", ""]).encode("latin-1") + body, mark)


# What the strategy above does not draw.
MALFORMED = (
    b"\r\n\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,  # TLS
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1e3\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"POST /v1/completions HTTP/1.1\r\nho st: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n" + b"x: a\r\n" * 20_000 + b"\r\n",
    b"POST /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST http://[/v1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
)

# Its requests, where their bytes are cut into pieces, and how it ends.
Connection: TypeAlias = tuple[list[Request], list[int], str]


@some.composite
def draw_connection(draw: some.DrawFn) -> Connection:
    """Requests of one connection, where their bytes are cut into pieces, and how it ends."""
    number = draw(some.integers(0, 1 << 40))
    requests = [
        draw(draw_request(number * 8 + index)) for index in range(draw(some.integers(1, 4)))
    ]
    size = sum(len(each.data) for each in requests)
    cuts = sorted(set(draw(some.lists(some.integers(1, size), max_size=4))))
    ending = draw(some.sampled_from(["read", "read", "half", "cut", "leave"]))
    return requests, cuts, ending


def exchange_bytes(
    url: str, data: bytes, cuts: list[int], ending: str, first_byte_s: float = QUIET_S
) -> bytes:
    """Send `data` in pieces; what comes back until the end, or nothing more for QUIET_S.

    first_byte_s: how long the first byte may take.
    half: the client ends its half at the end. cut: without the last bytes. leave: it reads nothing.
    """
    host, port = url.removeprefix("http://").split(":")
    if ending == "cut":
        data = data[:-7]
    response = b""
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for low, high in zip([0, *cuts], [*cuts, len(data)], strict=True):
            sock.sendall(data[low:high])
        if ending == "half":
            sock.shutdown(socket.SHUT_WR)
        sock.settimeout(first_byte_s)
        while ending != "leave" and (piece := sock.recv(65536)):
            response += piece
            sock.settimeout(QUIET_S)
    return response


def split_answers(response: bytes) -> list[tuple[int, bytes]]:
    """Status and rest of each answer; heads begin where the router writes one, never within a body."""
    parts = re.split(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n", response)
    assert not parts[0], parts[0][:200]
    found = zip(parts[1::2], parts[2::2], strict=True)
    return [(int(status), rest) for status, rest in found if status != b"100"]


def check_answers(requests: list[Request], answers: list[tuple[int, bytes]]) -> None:
    """Fail unless the answers of a connection are those of its own requests, each once and in their order."""
    assert all(status < 500 for status, _ in answers), answers
    sent = [each.mark for each in requests]
    told = [mark for _, rest in answers for mark in dict.fromkeys(MARK.findall(rest))]
    assert told == [mark for mark in sent if mark in told], "in order, and nobody else's"
    assert len(told) == len(set(told)), "once"


@pytest.mark.parametrize("number", EXAMPLES)
def test_request_grammar(number: int, tmp_path: Path) -> None:
    """No 5xx of ours, each answer is of its own request and in order, and nothing is under way at the end."""
    log = tmp_path / "stderr"
    with (
        run_fleet("mono", log, *FLAGS) as (url, one),
        ThreadPoolExecutor(CONCURRENT_CONNECTIONS) as clients,
    ):

        def run_connection(drawn: Connection) -> bytes:
            requests, cuts, ending = drawn
            data = b"".join(each.data for each in requests)
            return exchange_bytes(url, data, [cut for cut in cuts if cut < len(data) - 7], ending)

        @repeatable_examples(number // CONCURRENT_CONNECTIONS, 7)
        @given(some.tuples(*[draw_connection()] * CONCURRENT_CONNECTIONS))
        def check_connections(drawn: tuple[Connection, ...]) -> None:
            for (requests, _, _), response in zip(
                drawn, clients.map(run_connection, drawn), strict=True
            ):
                check_answers(requests, split_answers(response))

        check_connections()
        for data in MALFORMED:
            assert raw_http.parse_status(exchange_bytes(url, data, [], "read")) < 500, data[:80]
        deadline_s = time.monotonic() + 10
        while (in_flight := read_in_flight(url)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert in_flight == 0
        # How many are served depends on when clients leave; some must be.
        assert one.mood_counts["echo"] > number // 16
        assert raw_http.parse_status(ask(url, raw_http.encode_request())) == 200
    text = log.read_text()
    assert "Traceback" not in text and "Invalid HTTP" not in text


def ask(url: str, data: bytes) -> bytes:
    """The answer to one whole request, however late it begins."""
    return exchange_bytes(url, data, [], "read", MAX_ANSWER_S)


def read_in_flight(url: str) -> float:
    """Requests under way, as /metrics tells them."""
    text = ask(
        url, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    ).decode()
    found = re.search(r"^ttft_otel_router_requests_in_flight (\S+)", text, re.MULTILINE)
    assert found, text[:200]
    return float(found[1])
