# SPDX-License-Identifier: Apache-2.0
"""Whatever breaks around us, the client gets what plain vLLM gives, and the traces come back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from tests.live.bench import Bench, breakdown
from ttft_otel import names, stages
from ttft_otel.lab import client
from ttft_otel.lab.client import Question

PATIENCE = 30.0
HEADERS = {
    "traceparent": ("", "x", "00-0-0-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é" * 200),
    "tracestate": ("a=" + "b" * 2000, "=,=,,"),
    "baggage": ("%%%", "k=v" * 3000),
    "x-request-id": ("", "a" * 5000, "<script>"),
    "x-ttft-timing": ("yes", "1, 1"),
    "x-ttft-leg": ("nobody", "encode"),
}


def exporters(server_pid: int) -> list[int]:
    """Our exporter processes that serve the processes of this server's session."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            line = (entry / "cmdline").read_bytes().split(b"\0")
            if b"ttft_otel.exporter" in line:
                host = int(line[line.index(b"ttft_otel.exporter") + 3])
                if host == server_pid or _session(host) == server_pid:
                    found.append(int(entry.name))
    return found


def _session(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return 0


def arrives(bench: Bench, url: str) -> bool:
    """Send requests until one of them is found in the receiver."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        trace = os.urandom(16).hex()
        bench.ask(url, max_tokens=1, headers={names.TRACEPARENT: f"00-{trace}-{'c' * 16}-01"})
        for _ in range(20):
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                if bench.get(f"/api/trace/{trace}")["spans"]:
                    return True
    return False


@pytest.mark.parametrize("name", HEADERS)
def test_malformed_headers_change_nothing_for_the_client(epd: Bench, name: str) -> None:
    """Any value of a header that we read: the answer is the one without it."""
    for url in (epd.front, epd.fleet.url("prefill_decode")):
        plain = client.ask(url, max_tokens=4)
        for value in HEADERS[name]:
            raw = value.encode("utf-8").decode("latin-1")
            answer = client.ask(url, max_tokens=4, headers={name: raw})
            assert (answer.status, answer.text) == (200, plain.text), (name, value[:40])


def test_a_killed_exporter_is_replaced(epd: Bench) -> None:
    """SIGKILL to PD's exporter: answers go on, a new exporter brings the next traces."""
    server = epd.fleet.servers["prefill_decode"]
    assert arrives(epd, server.url)
    before = exporters(server.pid)
    assert before

    for pid in before:
        os.kill(pid, signal.SIGKILL)
    answer = epd.ask(server.url, max_tokens=2)

    assert answer.status == 200
    assert breakdown(answer)[stages.UNATTRIBUTED] == 0
    assert arrives(epd, server.url)
    assert not set(before) & set(exporters(server.pid))


def test_an_absent_receiver_costs_spans_and_nothing_else(epd: Bench) -> None:
    """Receiver stopped: every answer as before; started again: traces arrive without a restart."""
    receiver = epd.fleet.servers["receiver"]
    receiver.stop()
    try:
        for answer in client.ask_all(epd.front, [Question(max_tokens=2)] * 12):
            assert answer.status == 200
    finally:
        receiver.start().wait()

    assert arrives(epd, epd.fleet.url("prefill_decode"))


def test_two_hundred_aborted_requests_leave_no_state(epd: Bench) -> None:
    """Clients that hang up at any moment: nothing awaits a first token afterwards."""
    url = epd.fleet.url("prefill_decode")
    for start in range(0, 200, 20):
        many = [
            Question(prompt=f"abort {start + n}", words=300, abort_s=0.002 + 0.004 * n)
            for n in range(20)
        ]
        client.ask_all(url, many)
    deadline = time.monotonic() + PATIENCE
    while pending(epd) and time.monotonic() < deadline:
        time.sleep(0.5)

    assert pending(epd) == 0
    assert breakdown(epd.ask(url, max_tokens=1))[stages.UNATTRIBUTED] == 0


def pending(bench: Bench) -> float:
    """The server's own count of requests of ours that await a first token."""
    with urllib.request.urlopen(bench.fleet.url("prefill_decode") + "/metrics") as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("ttft_otel_pending")]
    assert lines, "no ttft_otel_pending on /metrics"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_failing_requests_are_traced_with_their_status(epd: Bench) -> None:
    """A 400 gets plain vLLM's body, an error span, and the stage it died in."""
    trace = "fa" * 16
    header = {names.TRACEPARENT: f"00-{trace}-{'c' * 16}-01"}

    answer = client.ask(epd.front, headers=header, extra={"temperature": "hot"})
    spans = epd.trace(trace, lambda found: sum(s["name"] == "ttft" for s in found) >= 2)

    assert answer.status == 400
    assert b"temperature" in answer.body
    for span in spans:
        if span["name"] == "ttft":
            assert span["attributes"]["error.type"] == "400"
            assert span["attributes"]["ttft.died_in"]
