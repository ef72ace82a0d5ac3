# SPDX-License-Identifier: Apache-2.0
"""No single request of a client holds the router up for the others, whatever is in it."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import pytest
from router.control.test_client_connection import encode_post

from attack.honest_streams import HONEST_STREAMS, RunningStreams, run_streams
from attack.watched_process import INJECTED_STALL_S, WatchedRouter, run_watched_process

MEGA = 1 << 20
MARKED_BODY = b'{"model": "tiny", "stream": true, "messages": []}'
CHAT_CONTENT = b'{"model": "tiny", "messages": [{"role": "user", "content": %b}]}'


def fill_field(name: bytes, before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    """A POST whose field `name` is about `size` bytes of `unit` between `before` and `after`."""
    value = before + unit * (size // len(unit)) + after
    return encode_post(b'{"model": "tiny", "max_tokens": 1, "%b": %b}' % (name, value))


def number_keys(size: int, before: bytes = b"") -> bytes:
    """A JSON object of about `size` bytes that begins with `before` and has nothing but many keys."""
    return b"{%b%b}" % (before, b",".join(b'"k%d":1' % each for each in range(size // 11)))


# What HTTP itself is abused for.
HTTP_KINDS: Mapping[str, Callable[[], bytes]] = {
    "equal headers": lambda: encode_post(b"{}", *["x-a: b"] * 60_000),
    "many headers": lambda: encode_post(b"{}", *[f"x-{number}: b" for number in range(60_000)]),
    "as many headers as allowed": lambda: encode_post(MARKED_BODY, *["x-a: " + "b" * 200] * 250),
    "a long header": lambda: b"POST /v1/completions HTTP/1.1\r\nx: " + b"a" * 22 * MEGA,
    "a header in pieces": lambda: b"POST /v1/completions HTTP/1.1\r\n" + b"x:\r\n" * 500_000,
    "a long target": lambda: b"POST /v1/" + b"a" * 4 * MEGA,
    "a target of dots": lambda: encode_post(path="/v1" + "/.." * 2500),
    "connection words": lambda: encode_post(MARKED_BODY, "connection: " + "a," * 30_000),
    "upgrades": lambda: encode_post(b"", "connection: upgrade", "upgrade: h2c") * 4000,
    "pipelined": lambda: encode_post(path="/v1/embeddings") * 4000,
    "pipelined GETs": lambda: b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20_000,
    "trailers": lambda: encode_post(b"0\r\n" + b"a: b\r\n" * 200_000, "transfer-encoding: chunked"),
    "tiny chunks": lambda: encode_post(
        b"1\r\n \r\n" * 300_000 + b"0\r\n\r\n", "transfer-encoding: chunked"
    ),
    "empty lines": lambda: b"\r\n" * 500_000,
    "tracestate": lambda: encode_post(MARKED_BODY, f"tracestate: {'a=b,' * 15_000}"),
}
# What JSON is abused for: sizes of a large body, and those that are just not one yet.
JSON_KINDS: Mapping[str, Callable[[], bytes]] = {
    "a large image": lambda: encode_post(
        CHAT_CONTENT
        % (
            b'[{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}]'
            % (b"A" * 60 * MEGA)
        )
    ),
    "a large text": lambda: fill_field(b"input", b'"', b"word ", b'"', 40 * MEGA),
    "escapes": lambda: fill_field(b"input", b'"', b"\\n", b'"', 24 * MEGA),
    "escaped quotes": lambda: fill_field(b"input", b'"', b'\\"', b'"', 24 * MEGA),
    "a long model": lambda: encode_post(b'{"model": "%b"}' % (b"\xc3\xa4" * 12 * MEGA)),
    "a long model of escapes": lambda: encode_post(b'{"model": "%b"}' % (b"\\n" * 12 * MEGA)),
    "numbers": lambda: fill_field(b"input", b"[", b"1,", b"1]", 24 * MEGA),
    "as many numbers as allowed": lambda: fill_field(b"prompt", b"[", b"1,", b"1]", 7 * MEGA),
    "numbers as temperature": lambda: fill_field(b"temperature", b"[", b"1,", b"1]", 7 * MEGA),
    "empty lists": lambda: fill_field(b"input", b"[", b"[],", b"1]", 24 * MEGA),
    "empty texts": lambda: fill_field(b"stop", b"[", b'"",', b'""]', 24 * MEGA),
    "few empty texts": lambda: fill_field(b"stop", b"[", b'"",', b'""]', MEGA // 2),
    "spaces": lambda: fill_field(b"input", b"", b" ", b"1", 60 * MEGA),
    "one name again and again": lambda: fill_field(b"input", b"1", b',"":1', b"", 24 * MEGA),
    "many keys": lambda: encode_post(number_keys(24 * MEGA)),
    "many keys to be stripped": lambda: encode_post(
        number_keys(24 * MEGA, b'"kv_transfer_params":1,')
    ),
    "some keys to be stripped": lambda: encode_post(
        number_keys(MEGA // 2, b'"kv_transfer_params":1,')
    ),
    "keys to be stripped inside": lambda: encode_post(
        b'{"vllm_xargs":%b}' % number_keys(MEGA // 2, b'"kv_transfer_params":1,')
    ),
    "empty parts": lambda: encode_post(CHAT_CONTENT % (b"[" + b"{}," * 8 * MEGA + b"{}]")),
    "some empty parts": lambda: encode_post(CHAT_CONTENT % (b"[" + b"{}," * 80_000 + b"{}]")),
    "few empty parts": lambda: encode_post(CHAT_CONTENT % (b"[" + b"{}," * 20_000 + b"{}]")),
    "empty messages": lambda: fill_field(b"messages", b"[", b"{},", b"{}]", MEGA // 2),
    "lists in lists": lambda: encode_post(b'{"model":' + b"[" * 24 * MEGA),
    "maps in maps": lambda: encode_post(b'{"model":' + b'{"a":' * 5 * MEGA),
    "NaN at the end": lambda: fill_field(b"input", b"[", b"1,", b"NaN]", 24 * MEGA),
    "no text at the end": lambda: fill_field(b"input", b'"', b"a", b'\xff"', 40 * MEGA),
    "no object": lambda: encode_post(b" " * 40 * MEGA + b"1"),
}


MAX_STALL_S = 0.05
MAX_STALL_TO_CONTROL = 5.0
# A large body is copied between kernel, router and kernel, and a core that is shared copies slower.
MAX_STALL_TO_COPY = 5.0
# What a request does to the router it does each time; a busy machine's noise it does not.
MAX_TRIALS = 4
CONTROL_S = 0.3
FIRST_BYTE_S = 4.0  # for what takes long, and for what gets no answer
QUIET_S = 0.2
KINDS = {**HTTP_KINDS, **JSON_KINDS}
SUITE_KINDS = (
    "a large image",
    "escaped quotes",
    "as many numbers as allowed",
    "empty texts",
    "many keys to be stripped",
    "some keys to be stripped",
    "few empty parts",
    "lists in lists",
    "NaN at the end",
)
MAX_GAP_RATIO = 2.0
PERCENTILE = 0.99
MIN_ROUNDS, MAX_ROUNDS = 3, 7
# Of those, the ones in which more of a body is read where there are several legs.
DIVIDED_KINDS = ("a large image", "escaped quotes", "many keys to be stripped", "few empty parts")
# Of each sort one that costs the router most; all kinds have their stall measured above.
KINDS_BESIDE_STREAMS = ("a large image", "escaped quotes", "pipelined")


def send_until_quiet(url: str, data: bytes) -> None:
    """Send `data` and read what comes until the router ends the connection or says nothing more."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock, contextlib.suppress(OSError):
        sock.settimeout(60)
        with contextlib.suppress(ConnectionError):  # it may have answered and closed
            sock.sendall(data)
        sock.settimeout(FIRST_BYTE_S)
        while sock.recv(1 << 16):
            sock.settimeout(QUIET_S)


@pytest.fixture(scope="module")
def streams() -> Iterator[RunningStreams]:
    """Fifty honest streams through `router`; each must come whole, from its first event to its last."""
    with run_streams() as running:
        yield running


@pytest.fixture(scope="module")
def router(streams: RunningStreams) -> Iterator[WatchedRouter]:
    """A router before one instance, with the streams running."""
    with run_watched_process(backends=[streams.instance_url]) as process:
        streams.start_clients(process.url)
        time.sleep(1)
        yield process
        event_counts = streams.end_clients()
        assert len(event_counts) == HONEST_STREAMS
        assert min(event_counts) > 0


@pytest.fixture(scope="module")
def divided_router(streams: RunningStreams) -> Iterator[WatchedRouter]:
    """A router with encoders, prefill and decode instances, where more of a body is read."""
    url = streams.instance_url
    options = {"backends": [], "encoders": [url], "prefills": [url], "decodes": [url]}
    with run_watched_process(**options) as process:
        yield process


def find_stall(process: WatchedRouter, data: bytes) -> str:
    """What `data` did to the router each time it was sent; "" if once it did nothing.

    At most 50 ms in one go are nothing, or five times what the router did without it right before, or
    what five copies of the body cost this process right after.
    """
    stalls = []
    for _ in range(MAX_TRIALS):
        process.take_longest_s()
        time.sleep(CONTROL_S)
        control_s = process.take_longest_s()
        send_until_quiet(process.url, data)
        stall_s, copy_s = process.take_longest_s(), measure_copy(data)
        stalls.append((stall_s, control_s, copy_s))
        limits_s = (MAX_STALL_S, MAX_STALL_TO_CONTROL * control_s, MAX_STALL_TO_COPY * copy_s)
        if stall_s < max(limits_s):
            return ""
    return f"seconds of stall, control and a copy: {stalls}"


def measure_copy(data: bytes) -> float:
    """CPU seconds of one copy of `data` in this process."""
    began_s = time.process_time()
    copied = bytes(bytearray(data))
    took_s = time.process_time() - began_s
    assert len(copied) == len(data)
    return took_s / 2


def mark_kinds(kinds: Iterable[str], always: Collection[str]) -> list[Any]:
    """Those of `always`, and the others for --full: they differ in what is repeated."""
    return [pytest.param(kind, marks=() if kind in always else pytest.mark.full) for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("kind", mark_kinds(KINDS, (*SUITE_KINDS, *HTTP_KINDS)))
def test_a_request_does_not_hold_the_router_up(router: WatchedRouter, kind: str) -> None:
    """No kind of request holds the event loop for long while fifty streams run."""
    assert not find_stall(router, KINDS[kind]())


@pytest.mark.slow
@pytest.mark.parametrize("kind", mark_kinds(JSON_KINDS, DIVIDED_KINDS))
def test_json_does_not_hold_up_what_has_legs(divided_router: WatchedRouter, kind: str) -> None:
    """The same for a router with encoders, prefill and decode, which reads more of a body."""
    assert not find_stall(divided_router, JSON_KINDS[kind]())


@pytest.mark.slow
def test_a_stall_is_seen(router: WatchedRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement itself: a stall that is made on purpose is found, with its length."""

    def make_stall(url: str, data: bytes) -> None:
        router.make_stall()

    monkeypatch.setitem(globals(), "send_until_quiet", make_stall)
    router.take_longest_s()
    router.make_stall()
    assert router.take_longest_s() >= INJECTED_STALL_S
    assert find_stall(router, b"")


def compute_percentile(streams: RunningStreams) -> float:
    """Of the seconds between two events of a stream, since the last call."""
    return sorted(gaps := streams.take_gaps_s())[int(PERCENTILE * len(gaps))]


def compare_gaps(streams: RunningStreams, disturb: Callable[[], None]) -> float:
    """How many times as long the gaps of the streams are while `disturb` runs as right before it.

    The median of pairs, as many as it takes to tell it from MAX_GAP_RATIO: the quiet half of a pair lasts
    as long as the disturbed one, and a neighbour on the machine is there in both.
    """
    ratios: list[float] = []
    while len(ratios) < MAX_ROUNDS:
        streams.take_gaps_s()
        start_s = time.monotonic()
        disturb()
        disturbed = compute_percentile(streams)
        time.sleep(time.monotonic() - start_s)
        ratios.append(disturbed / compute_percentile(streams))
        if len(ratios) >= MIN_ROUNDS and (
            max(ratios) < MAX_GAP_RATIO or min(ratios) > MAX_GAP_RATIO
        ):
            break
    return statistics.median(ratios)


@pytest.mark.full
@pytest.mark.slow
def test_streams_keep_their_pace(router: WatchedRouter, streams: RunningStreams) -> None:
    """The 99th percentile of the time between two events is less than twice that of the quiet run."""
    requests = [KINDS[kind]() for kind in KINDS_BESIDE_STREAMS]

    def send_all() -> None:
        for data in requests:
            send_until_quiet(router.url, data)

    assert compare_gaps(streams, send_all) < MAX_GAP_RATIO


@pytest.mark.full
@pytest.mark.slow
def test_a_lost_pace_is_seen(router: WatchedRouter, streams: RunningStreams) -> None:
    """A loop that is held up again and again makes the gaps more than twice as long."""

    def hold_up() -> None:
        for _ in range(3):
            router.make_stall()
            time.sleep(0.05)

    assert compare_gaps(streams, hold_up) > MAX_GAP_RATIO
