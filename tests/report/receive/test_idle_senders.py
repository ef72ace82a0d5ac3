# SPDX-License-Identifier: Apache-2.0
"""What a sender can make the receiver keep: connections, exports without an end, memory."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter
from sample_records import (
    RunningServer,
    export_records,
    make_grpc_exporter,
    make_http_exporter,
    make_routed_records,
)

from ttft_otel.model.names import keys, span_names
from ttft_otel.report import report_server as report_server_code
from ttft_otel.report.receive import otlp_decoder, receiver
from ttft_otel.report.receive.receiver import MAX_BODY_BYTES, BodyBudget, StoreUnavailableError
from ttft_otel.report.store import database_schema
from ttft_otel.report.store.span_store import ChunkInserter, SpanStore

EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
IDLE = 64  # senders; eight were enough to stop the receiver
HEAD = (
    b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"
    b"Content-Length: %d\r\n\r\n"
)


def open_senders(served: RunningServer, begun: bytes, count: int) -> list[socket.socket]:
    """Connections on which `begun` was sent."""
    senders = []
    for _ in range(count):
        sender = socket.create_connection(("127.0.0.1", served.server.http_port), timeout=20)
        sender.sendall(begun)
        senders.append(sender)
    return senders


def count_open(senders: list[socket.socket]) -> int:
    """How many of them have got neither an answer nor an end."""
    waiting = 0
    for sender in senders:
        sender.setblocking(False)
        try:
            sender.recv(1)
        except BlockingIOError:
            waiting += 1
    return waiting


@contextlib.contextmanager
def idle_posts(served: RunningServer) -> Iterator[Callable[[], int]]:
    """HTTP senders of a head without a body; gives how many still wait for an answer."""
    senders = open_senders(served, HEAD % 9, IDLE)

    yield lambda: count_open(senders)
    for sender in senders:
        sender.close()


@contextlib.contextmanager
def idle_calls(served: RunningServer) -> Iterator[Callable[[], int]]:
    """gRPC calls without a message; gives how many still wait. The oldest ones have given way."""
    released = threading.Event()

    def send_nothing() -> Iterator[bytes]:
        released.wait(60)
        yield from ()

    channels = [
        grpc.insecure_channel(served.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(4)
    ]
    calls = [
        channel.stream_unary(EXPORT_METHOD).future(send_nothing())
        for channel in channels
        for _ in range(IDLE // 4)
    ]
    time.sleep(0.5)  # until the calls have reached the server
    yield lambda: sum(not call.done() for call in calls)
    released.set()
    for call in calls:
        call.exception(20)
    for channel in channels:
        channel.close()


@pytest.mark.parametrize(
    ("idle", "make"),
    [
        (idle_posts, make_http_exporter),
        (idle_calls, make_grpc_exporter),
        pytest.param(idle_posts, make_grpc_exporter, marks=pytest.mark.full),
        pytest.param(idle_calls, make_http_exporter, marks=pytest.mark.full),
    ],
)
def test_idle_senders(
    report_server: RunningServer,
    idle: Callable[..., contextlib.AbstractContextManager[Callable[[], int]]],
    make: Callable[..., SpanExporter],
) -> None:
    """An export succeeds while many senders have begun one and send nothing."""
    with idle(report_server) as count_waiting:
        assert count_waiting() > 8
        export_records(make(report_server), make_routed_records("r1"))
        assert count_waiting() > 8, "the export only came through when the others had ended"


def test_half_bodies(report_server: RunningServer) -> None:
    """Unfinished bodies that fill the receiver's memory are dropped for a complete export."""
    count = 2 * receiver.BodyBudget().max_bytes // MAX_BODY_BYTES
    senders: list[socket.socket] = []
    for _ in range(count):
        with contextlib.suppress(OSError):  # the receiver may have given up on it already
            senders += open_senders(
                report_server, HEAD % MAX_BODY_BYTES + b"x" * (MAX_BODY_BYTES * 3 // 4), 1
            )
    export_records(make_http_exporter(report_server), make_routed_records("r1"))
    for sender in senders:
        sender.close()


def test_budget() -> None:
    """The largest unfinished body is dropped first, of equal ones the oldest; complete ones are kept."""
    budget = BodyBudget(max_bytes=100)
    with budget.open_body() as complete, budget.open_body() as old, budget.open_body() as young:
        budget.extend_body(complete, b"c" * 50)
        budget.complete_body(complete)
        budget.extend_body(old, b"o" * 20)
        budget.extend_body(young, b"y" * 20)
        with budget.open_body() as small:
            budget.extend_body(small, b"s" * 15)
            assert (old.has_given_way, young.has_given_way) == (True, False)
            with pytest.raises(StoreUnavailableError):
                budget.extend_body(old, b"o")
            with pytest.raises(StoreUnavailableError):  # the largest is the one that wants to grow
                budget.extend_body(small, b"s" * 30)
            assert budget.counted_bytes == 70
        assert bytes(young.data) == b"y" * 20
    assert budget.counted_bytes == 0


@pytest.mark.parametrize("begun", [b"", b"POST /v1/tra"])
def test_half_heads(
    report_server: RunningServer, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    """A connection that sends no request is closed; one that sends them now and then is kept."""
    monkeypatch.setattr(report_server_code, "MAX_WAIT_S", 1.0)
    (kept,) = open_senders(report_server, b"", 1)
    (idle,) = open_senders(report_server, begun, 1)
    closed = threading.Event()
    watcher = threading.Thread(target=lambda: (idle.recv(1), closed.set()))
    watcher.start()
    for _ in range(100):
        kept.sendall(b"GET /stages.css HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(65536).startswith(b"HTTP/1.1 200")
        if closed.wait(0.3):
            break
    assert closed.is_set()
    watcher.join()
    idle.close()
    kept.close()


def test_many_connections(report_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit idle connections are closed, and a new one is served."""
    monkeypatch.setattr(report_server_code, "MAX_CONNECTIONS", 10)
    with contextlib.ExitStack() as stack:
        senders = [stack.enter_context(sender) for sender in open_senders(report_server, b"", 30)]
        deadline = time.monotonic() + 20
        while count_open(senders) > 10 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert count_open(senders) == 10
        export_records(make_http_exporter(report_server), make_routed_records("r1"))


SPANS = 4000
MAX_LISTING_KIB = 40 << 10
MAX_KNOWN_BYTES = 3 << 20
# The most that a span in OTLP's own bytes can become when it is parsed: empty attributes, two bytes each.
EMPTY_ATTRIBUTES = (otlp_decoder.MAX_RAW_BYTES - 200) // 2

LIST_REQUESTS = """
import resource, sys
from pathlib import Path
from ttft_otel.report.store.database_reader import RequestFilter, open_reader

def list_requests(path):
    with open_reader(Path(path)) as db:
        return db.list_latest(RequestFilter())

small, large = sys.argv[1:]
assert len(list_requests(small)) == 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(list_requests(large)) == 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def build_export(first: int, count: int, attributes: int = 0, trace: int = 1) -> bytes:
    """Spans of ours in one trace, of which number 1 is a `ttft` span."""
    message = ExportTraceServiceRequest()
    scope = message.resource_spans.add().scope_spans.add()
    scope.scope.name = span_names.SCOPE
    for number in range(first, first + count):
        span = scope.spans.add(name="prefill" if number > 1 else span_names.TTFT)
        span.trace_id, span.span_id = trace.to_bytes(16, "big"), number.to_bytes(8, "big")
        if number == 1:
            span.attributes.add(key=keys.TOTAL_US).value.int_value = 1
        else:
            for _ in range(attributes):
                span.attributes.add()
    return message.SerializeToString()


def write_database(path: Path, attributes: int) -> Path:
    """One trace with one request and many other spans."""
    store = SpanStore(path)
    for first in range(1, SPANS, 500):
        chunks = otlp_decoder.chunk_export(build_export(first, 500, attributes)).chunks
        store.add_chunks(chunks).result(60)
    store.close()
    assert store.counts["stored"] == SPANS
    return path


@pytest.mark.full
def test_listing(tmp_path: Path) -> None:
    """Other spans of a trace, however large they are in memory, cost the listing of its request nothing."""
    paths = [write_database(tmp_path / f"{size}.db", size) for size in (0, EMPTY_ATTRIBUTES)]
    assert paths[1].stat().st_size > 2 * SPANS * EMPTY_ATTRIBUTES, "they are not kept as they came"
    grown = subprocess.run(
        [sys.executable, "-c", LIST_REQUESTS, *map(str, paths)], stdout=subprocess.PIPE, check=True
    )
    # 72 MB for each thousand of them, when they were parsed.
    assert int(grown.stdout) < MAX_LISTING_KIB


def test_inserting(tmp_path: Path) -> None:
    """A transaction that adds to many large traces has the spans' IDs of one of them at a time."""
    traces = 12
    connection, _ = database_schema.open_for_writing(tmp_path / "spans.db", 1 << 30)
    for trace in range(1, traces + 1):
        chunks = otlp_decoder.chunk_export(build_export(1, SPANS, trace=trace)).chunks
        ChunkInserter(connection, 1).insert_chunks(chunks)
    added = [
        chunk
        for trace in range(1, traces + 1)
        for chunk in otlp_decoder.chunk_export(build_export(SPANS + 1, 1, trace=trace)).chunks
    ]
    tracemalloc.start()
    inserter = ChunkInserter(connection, 1)
    refused = inserter.insert_chunks(added)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    connection.close()

    assert inserter.counts["stored"] == traces and not any(refused)
    assert peak < MAX_KNOWN_BYTES  # IDs of all traces take three times that
