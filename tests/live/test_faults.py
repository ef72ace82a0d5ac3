# SPDX-License-Identifier: Apache-2.0
"""When something around a server fails, clients get what plain vLLM gives, and traces arrive again; however a
server ends, its records arrive. Ways that need no vLLM (SIGTERM, Ctrl-C, process groups): tests/exporter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from lab import ttft_client
from lab.ttft_client import TimedRequest
from tests.live.bench import LiveDeployment, read_breakdown, read_metric
from tests.live.conftest import DeploymentDeck, is_running
from ttft_otel.model import stages
from ttft_otel.model.names import metric_names

MAX_WAIT_S = 30.0
HEADERS = {
    "traceparent": ("", "x", "00-0-0-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é" * 200),
    "tracestate": ("a=" + "b" * 2000, "=,=,,"),
    "baggage": ("%%%", "k=v" * 3000),
    "x-request-id": ("", "a" * 5000, "<script>"),
    "x-ttft-timing": ("yes", "1, 1"),
    "x-ttft-leg": ("nobody", "encode"),
}


def list_exporters(server_pid: int) -> list[int]:
    """Exporter processes that belong to the processes of this server's session."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            line = (entry / "cmdline").read_bytes().split(b"\0")
            if b"ttft_otel.exporter" in line:
                host = int(line[line.index(b"ttft_otel.exporter") + 3])
                if host == server_pid or os.getsid(host) == server_pid:
                    found.append(int(entry.name))
    return found


def does_trace_arrive(bench: LiveDeployment, url: str) -> bool:
    """Send requests until the trace of one of them is in the receiver; False after the time limit."""
    deadline = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < deadline:
        _, trace = bench.send_traced(url, max_tokens=1)
        for _ in range(20):
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                if bench.get_json(f"/api/trace/{trace}")["spans"]:
                    return True
    return False


@pytest.mark.untimed
@pytest.mark.parametrize("name", HEADERS)
def test_malformed_headers_change_nothing_for_the_client(epd: LiveDeployment, name: str) -> None:
    """With any value of a header that we read, the answer equals the one without that header."""
    for url in (epd.front_url, epd.fleet.get_url("prefill_decode")):
        plain = ttft_client.send_timed_request(url, max_tokens=4)
        for value in HEADERS[name]:
            raw = value.encode("utf-8").decode("latin-1")
            answer = ttft_client.send_timed_request(url, max_tokens=4, headers={name: raw})
            assert (answer.status, answer.text) == (200, plain.text), (name, value[:40])


@pytest.mark.untimed
def test_a_killed_exporter_is_replaced(epd: LiveDeployment) -> None:
    """After SIGKILL to prefill_decode's exporter requests are answered, and a new exporter sends the next
    traces.
    """
    server = epd.fleet.servers["prefill_decode"]
    assert does_trace_arrive(epd, server.url)
    before = list_exporters(server.pid)
    assert before

    for pid in before:
        os.kill(pid, signal.SIGKILL)
    answer = epd.send_request(server.url, max_tokens=2)

    assert answer.status == 200
    assert read_breakdown(answer)[stages.UNATTRIBUTED] == 0
    assert does_trace_arrive(epd, server.url)
    assert not set(before) & set(list_exporters(server.pid))


@pytest.mark.untimed
def test_an_absent_receiver_costs_spans_and_nothing_else(epd: LiveDeployment) -> None:
    """Without a receiver answers are as before; when it is back, traces arrive without a restart."""
    receiver = epd.fleet.servers["receiver"]
    receiver.stop()
    try:
        for answer in ttft_client.send_timed_requests(
            epd.front_url, [TimedRequest(max_tokens=2)] * 12
        ):
            assert answer.status == 200
    finally:
        receiver.start().wait_until_ready()

    assert does_trace_arrive(epd, epd.fleet.get_url("prefill_decode"))


@pytest.mark.untimed
def test_aborted_requests_leave_no_state(epd: LiveDeployment) -> None:
    """After 100 clients hung up at different moments, no request awaits its first token."""
    url = epd.fleet.get_url("prefill_decode")
    for start in range(0, 100, 20):
        many = [
            TimedRequest(prompt=f"abort {start + n}", words=300, abort_s=0.002 + 0.004 * n)
            for n in range(20)
        ]
        ttft_client.send_timed_requests(url, many)
    values, deadline = [1.0], time.monotonic() + MAX_WAIT_S
    while sum(values) and time.monotonic() < deadline:
        time.sleep(0.5)
        values = read_metric(url, metric_names.PENDING)
        assert values, "the server shows no pending requests on /metrics"

    assert sum(values) == 0
    assert read_breakdown(epd.send_request(url, max_tokens=1))[stages.UNATTRIBUTED] == 0


@pytest.mark.untimed
def test_failing_requests_are_traced_with_their_status(epd: LiveDeployment) -> None:
    """A request that gets 400 has plain vLLM's body, an error span, and the stage in which it ended."""
    answer, trace = epd.send_traced(extra={"temperature": "hot"})
    spans = epd.wait_for_trace(trace, lambda found: sum(s["name"] == "ttft" for s in found) >= 2)

    assert answer.status == 400
    assert b"temperature" in answer.body
    for span in spans:
        if span["name"] == "ttft":
            assert span["attributes"]["error.type"] == "400"
            assert span["attributes"]["ttft.died_in"]


def test_a_killed_process_tree_loses_no_record(newer: LiveDeployment, deck: DeploymentDeck) -> None:
    """After SIGKILL to every process of a streaming server, its ttft spans are in the receiver."""
    server = newer.fleet.servers["prefill_decode"]
    # Hung up after the first token: the ttft half of the record is on its way by then.
    traces = [newer.send_traced(max_tokens=2)[1] for _ in range(8)]
    born = list_exporters(server.pid)
    assert born

    server.kill()

    for trace in traces:
        assert newer.fetch_ttft(trace)
    deadline = time.monotonic() + 10
    while any(map(is_running, map(str, born))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(is_running, map(str, born)))
    deck.stop_running()
