# SPDX-License-Identifier: Apache-2.0
"""Random and malformed requests get no 5xx that the router made, and leave no traceback in its log."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attack.test_json_bodies import make_body
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as some

from router import raw_http

FLEETS = {
    "mono": ("--backend",),
    "E+PD": ("--encoder", "--backend"),
    "P/D": ("--prefill", "--decode"),
    "E+P+D": ("--encoder", "--prefill", "--decode"),
}
MODES = {"P/D": "off", "E+P+D": "strip"}

USUAL_PATHS = some.sampled_from(
    "/v1/chat/completions /v1/completions /v1/responses /v1/messages /v1/embeddings".split()
)
PATHS = some.sampled_from(
    "/v1/models /v1/ /v1 / * // /health /metrics /openapi.json /ttft_report/x /ttft_report/ "
    "/ttft_report/%00%ff /v1/../metrics /v1/%2e%2e/metrics //v1//chat/completions "
    "/v1/chat/completions/ /v1/chat/completions?a=%zz&b=%00 /v1/chat%2Fcompletions /v1/x#y /v1/é "
    "http://other/v1/completions /v1/\\..\\x /v1/completions;a=1 /v1/%f0%28%8c%bc".split()
) | some.text(max_size=40).map(lambda text: "/v1/" + re.sub(r"[\s\x00-\x1f]", "", text))
METHODS = some.sampled_from("GET HEAD PUT DELETE OPTIONS TRACE CONNECT X".split())

TRACE = "0af7651916cd43dd8448eb211c80319c"
USUAL_VALUES = some.sampled_from(
    [
        *("", "1", "-1", "nan", "x" * 300, "x" * 20_000, "é", ",,,", "a=b; c", "a=1,b=%20", "a\tb"),
        *("application/json", "application/json; charset=utf-7", "text/plain", "gzip", "identity"),
        *("close", "keep-alive", "x-mood, te", "trailers", "Bearer \xff", "k=" + "v" * 600),
        *(f"00-{TRACE}-b7ad6b7169203331-01", f"ff-{TRACE}-b7ad6b7169203331-01", f"00-{TRACE}"),
        *(f"00-{'0' * 32}-{'0' * 16}-00", f"cc-{TRACE}-b7ad6b7169203331-01-more", "00-" + "z" * 52),
    ]
)
VALUES = some.sampled_from(
    ["\x7f", "\x01", "\x00", "chunked", "upgrade", "100-continue", "websocket", "h2c"]
) | some.text(some.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=30)
USUAL_NAMES = some.sampled_from(
    "traceparent tracestate baggage x-request-id x-ttft-timing x-ttft-leg content-encoding connection "
    "te cookie accept-encoding authorization user-agent range if-none-match x-forwarded-for "
    "proxy-connection trailer date server-timing x-odd".split()
)
NAMES = some.sampled_from(["expect", "upgrade", "content-type", "host"]) | some.from_regex(
    r"[!#$%&'*+.^_`|~0-9a-z-]{1,12}", fullmatch=True
).filter(lambda name: name not in ("content-length", "transfer-encoding"))

MESSAGES = some.sampled_from(
    [
        '[{"role": "user", "content": "x"}]',
        '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]',
        '[{"content": [{"type": "image_url", "image_url": null}, {"type": 3, "audio_url": []}, 1]}]',
        '[{"content": [{"type": "video_url", "video_url": {"url": "data:,%ff"}}]}, null, [], "x"]',
        '[{"role": "user", "content": [{"type": "image", "source": {"data": "AA"}}, 1, "x"]}]',
        '[{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}, 1]}]}]',
        '[{"role": "user", "content": [{"type": "input_image", "image_url": "data:,\\ud800"}]}]',
        '[{"type": "function_call_output", "output": [{"type": "input_image", "image_url": "a"}]}]',
    ]
)
# What vLLM's models may take and what they may not (test_json_bodies.py), and what is no JSON at all.
BODIES = some.one_of(
    some.integers(0, 1 << 32).map(lambda number: make_body(random.Random(number))[1]),
    MESSAGES.map(lambda text: b'{"model": "tiny", "messages": %b}' % text.encode()),
    some.binary(max_size=60),
)


@some.composite
def draw_request(draw: some.DrawFn) -> bytes:
    """The bytes of one request: framed as HTTP wants it, and anything else inside."""
    body = draw(BODIES)
    wild = not draw(some.integers(0, 4))
    names, values = (NAMES | USUAL_NAMES, VALUES) if wild else (USUAL_NAMES, USUAL_VALUES)
    headers = draw(some.lists(some.tuples(names, values), max_size=5))
    method = draw(METHODS) if wild and draw(some.booleans()) else "POST"
    path = draw(PATHS if draw(some.integers(0, 4)) == 1 else USUAL_PATHS)
    lines = [f"{method} {path} HTTP/1.1", "host: localhost"]
    if not wild:
        lines.append("content-type: application/json")
    if draw(some.booleans()):
        lines.append("x-mood: echo")
    lines += [f"{name}: {value}" for name, value in headers]
    if draw(some.booleans()):
        lines.append(f"content-length: {len(body)}")
    else:
        lines.append("transfer-encoding: chunked")
        cut = draw(some.integers(0, len(body)))
        body = b"".join(raw_http.encode_chunk(part) for part in (body[:cut], body[cut:]) if part)
        body += b"0\r\n\r\n"
    front = "\r\n".join(lines).encode("utf-8", "surrogatepass")
    return front + b"\r\n\r\n" + body


def send_bytes(url: str, data: bytes) -> bytes:
    """What comes back until the answer is whole, the connection ends or a second passes."""
    host, port = url.removeprefix("http://").split(":")
    response = b""
    with socket.create_connection((host, int(port)), 10) as sock, contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR) if data.startswith(b"CONNECT") else None
        while not raw_http.is_complete(response):
            sock.settimeout(1.0 if response or b"HTTP/1.1" not in data else 10.0)
            piece = sock.recv(65536)
            if not piece:
                break
            response = (response + piece).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            if data.startswith(b"HEAD") and b"\r\n\r\n" in response:
                break
    return response


@contextlib.contextmanager
def run_fleet(
    fleet: str, log: Path, *more_flags: str
) -> Iterator[tuple[str, raw_http.RawInstance]]:
    """A router's process before an instance that answers everything, in a thread's loop."""
    ready, ended = threading.Event(), asyncio.Event()
    running: list[tuple[str, raw_http.RawInstance]] = []
    loop = asyncio.new_event_loop()

    async def serve_until_ended() -> None:
        async with raw_http.run_instance() as one:
            flags = [word for flag in FLEETS[fleet] for word in (flag, one.url)]
            flags += more_flags
            if fleet in MODES:
                flags += ["--first-token", MODES[fleet]]
            traced = {"TTFT_OTEL": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": one.url}
            async with raw_http.run_router_process(*flags, log=log, **traced) as router:
                running.append((router.url, one))
                ready.set()
                await ended.wait()

    failed: list[BaseException] = []

    def run_loop() -> None:
        try:
            loop.run_until_complete(serve_until_ended())
        except BaseException as error:  # noqa: BLE001 - the test's own thread raises it below
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run_loop)
    thread.start()
    try:
        assert ready.wait(60) and not failed, failed
        yield running[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(60)
        loop.close()
    assert not failed, failed


def repeatable_examples(number: int, first: int) -> Callable[[Any], Any]:
    """A decorator: `number` examples, the same ones in each run, which begin with the seed `first`."""
    bounds = {"max_examples": number, "database": None, "deadline": None}
    own = settings(**bounds, suppress_health_check=list(HealthCheck))
    return lambda check: seed(first)(own(check))


@pytest.mark.parametrize(
    ("fleet", "number"),
    [("E+P+D", 30), *(pytest.param(each, 500, marks=pytest.mark.full) for each in FLEETS)],
)
def test_no_5xx_of_its_own(fleet: str, number: int, tmp_path: Path) -> None:
    """Random paths, headers and bodies: the instance never fails, so nothing may be a 5xx."""
    log = tmp_path / "stderr"

    with run_fleet(fleet, log) as (url, one):

        @repeatable_examples(number, list(FLEETS).index(fleet))
        @given(draw_request())
        def check_response(data: bytes) -> None:
            got = send_bytes(url, data)
            assert raw_http.parse_status(got) < 500, got[:500]
            assert got, "no answer"

        check_response()
        assert raw_http.parse_status(send_bytes(url, raw_http.encode_request())) == 200
        assert one.mood_counts.total() > number // 10  # what is no JSON is refused on the way
        text = send_bytes(url, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n").decode()
    assert "ttft_otel_hook_errors_total{" not in text
    assert "Traceback" not in log.read_text()
