# SPDX-License-Identifier: Apache-2.0
"""The OTLP receiver with the SDK's exporters and with broken senders, and what these can make it keep."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import status_pb2
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.sdk.trace.export import SpanExporter
from sample_records import (
    DECODE_US,
    ENCODE_US,
    RunningServer,
    encode_records,
    export_records,
    fetch_any_status,
    fetch_json,
    fill_database,
    make_grpc_exporter,
    make_http_exporter,
    make_leg_record,
    make_routed_records,
    make_short_record,
    make_spans,
)

from ttft_otel.model.names import keys, span_names
from ttft_otel.report import report_server as report_server_code
from ttft_otel.report.assemble import request_assembly
from ttft_otel.report.receive import otlp_decoder, receiver
from ttft_otel.report.receive.otlp_decoder import MAX_ATTRIBUTES, MAX_EXPORT_SPANS, MAX_JSON_VALUES
from ttft_otel.report.receive.receiver import MAX_BODY_BYTES, BodyBudget, StoreUnavailableError
from ttft_otel.report.store import database_schema
from ttft_otel.report.store.database_reader import open_reader
from ttft_otel.report.store.span_store import ChunkInserter, SpanStore
from ttft_otel.tracing import guard

PROTOBUF = "application/x-protobuf"
EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def post_traces(
    served: RunningServer, data: bytes | Iterator[bytes], kind: str = PROTOBUF, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """POST to /v1/traces; status, headers, body."""
    sent = {"Content-Type": kind} | {name.replace("_", "-"): v for name, v in headers.items()}
    return fetch_any_status(urllib.request.Request(f"{served.http}/v1/traces", data, sent))


@pytest.mark.parametrize("make_exporter", [make_grpc_exporter, make_http_exporter])
def test_exporters(
    report_server: RunningServer, make_exporter: Callable[[RunningServer], SpanExporter]
) -> None:
    """Whatever an SDK exporter sends is on disk when it hears of success, field by field."""
    sent = export_records(make_exporter(report_server), make_routed_records("r1", encoders=2))
    with open_reader(report_server.path) as db:
        trace = db.find_trace(f"{sent[0].context.trace_id:032x}")
    assert trace is not None
    sent_by_id = {f"{span.context.span_id:016x}": span for span in sent}
    assert {span.span_id for span in trace.spans} == sent_by_id.keys()
    for span in trace.spans:
        origin = sent_by_id[span.span_id]
        times = (origin.start_time, origin.end_time)
        assert (span.name, span.start_ns, span.end_ns) == (origin.name, *times)
        assert span.attributes == dict(origin.attributes or {})
        assert span.parent_id == (f"{origin.parent.span_id:016x}" if origin.parent else "")
        assert span.service == origin.resource.attributes["service.name"]


def test_report(report_server: RunningServer) -> None:
    """/ttft_report answers with the original names, by role and combined, and closes."""
    fill_database(report_server.path, *make_routed_records("r1"))
    status, report = fetch_json(report_server, "/ttft_report/r1")
    assert status == 200
    assert set(report["by_role"]) == {"encode", "prefill_decode", "router"}
    for entry in (*report["by_role"].values(), report["combined"]):
        total = sum(round(ms * 1000) for ms in entry["stages"].values())
        assert total + round(entry["unattributed_ms"] * 1000) == round(entry["ttft_ms"] * 1000)
    combined = report["combined"]
    assert combined["enc_compute_time_ms"] == ENCODE_US["encoder.compute"] / 1000
    assert combined["emb_cache_transfer_time_ms"] == 5.2
    status, unknown = fetch_json(report_server, "/ttft_report/nobody")
    assert (status, unknown["error"], unknown["request"]) == (404, "unknown_request", "nobody")


def test_json(report_server: RunningServer) -> None:
    """OTLP/JSON has hex ids, int64 as text, fields that we do not know, and a JSON answer."""
    span = {
        "traceId": "5B8EFFF798038103D269B633813FC60C",
        "spanId": "EEE19B7EC3C1B174",
        "parentSpanId": "EEE19B7EC3C1B173",
        "name": "I'm a server span",
        "startTimeUnixNano": "1544712660000000000",
        "endTimeUnixNano": "1544712661000000000",
        "kind": 2,
        "attributes": [{"key": "my.attr", "value": {"intValue": "17"}}],
        "fieldOfTheFuture": 1,
    }
    body = {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "x"}, "spans": [span]}]}]}
    status, headers, answer = post_traces(
        report_server, json.dumps(body).encode(), "application/json"
    )
    assert (status, headers["content-type"], json.loads(answer)) == (200, "application/json", {})
    with open_reader(report_server.path) as db:
        trace = db.find_trace("5b8efff798038103d269b633813fc60c")
    assert trace is not None
    assert trace.spans[0].attributes == {"my.attr": 17}
    assert trace.spans[0].parent_id == "eee19b7ec3c1b173"


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"\xff\xff\xff", ""),
        (b"no gzip at all", "gzip"),
        (gzip.compress(b"", mtime=0)[:-3], "gzip"),
        (gzip.compress(b"", mtime=0) * 100, "gzip"),
        (b"", "br"),
        (b"{", ""),
        (b"[]", ""),
        (b'{"resourceSpans": 3}', ""),
        (b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"xyz"}]}]}]}', ""),
        (b"[" * 100_000, ""),
        (b'{"resourceSpans":[' + b"{}," * MAX_JSON_VALUES + b"{}]}", ""),
    ],
)
def test_malformed(report_server: RunningServer, data: bytes, encoding: str) -> None:
    """A body that is not OTLP gets 400 with a google.rpc.Status in the sender's own encoding."""
    json_kind = data[:1] in (b"{", b"[")
    kind = "application/json" if json_kind else PROTOBUF
    status, headers, answer = post_traces(report_server, data, kind, Content_Encoding=encoding)
    assert (status, headers["content-type"]) == (400, kind)
    if json_kind:
        assert json.loads(answer)["code"] == 3
    else:
        assert status_pb2.Status.FromString(answer).message


def test_oversize(report_server: RunningServer) -> None:
    """Too large as sent, a gzip bomb of a few kilobytes, a body without a length: 413, and it lives on.

    What a browser's form can send without asking is refused: 415.
    """
    assert post_traces(report_server, b"{}", "text/plain")[0] == 415
    assert post_traces(report_server, b"\0" * (MAX_BODY_BYTES + 1))[0] == 413
    bomb = gzip.compress(b"\0" * (MAX_BODY_BYTES * 8))
    assert len(bomb) < MAX_BODY_BYTES // 50
    assert post_traces(report_server, bomb, Content_Encoding="gzip")[0] == 413
    assert post_traces(report_server, iter([b"\0" * (1 << 20)] * 17))[0] == 413
    with pytest.raises(OSError):  # and one without an end is not listened to for ever
        post_traces(report_server, iter([b"\0" * (1 << 20)] * 200))
    assert fetch_json(report_server, "/healthz")[1]["received"]["large"] >= 3


def call_grpc(served: RunningServer, data: bytes, is_packed: bool = False) -> grpc.StatusCode:
    """Raw gRPC Export; its status."""
    packed = grpc.Compression.Gzip if is_packed else grpc.Compression.NoCompression
    with grpc.insecure_channel(served.grpc) as channel:
        try:
            channel.unary_unary(EXPORT_METHOD)(data, timeout=30, compression=packed)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_grpc_refusals(report_server: RunningServer) -> None:
    """gRPC: nonsense is INVALID_ARGUMENT, too much, packed or not, RESOURCE_EXHAUSTED."""
    assert call_grpc(report_server, b"\xff\xff\xff") is grpc.StatusCode.INVALID_ARGUMENT
    big = b"\0" * (MAX_BODY_BYTES + 1)
    for is_packed in (False, True):
        assert call_grpc(report_server, big, is_packed) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert call_grpc(report_server, b"") is grpc.StatusCode.OK


def check_partial(served: RunningServer, data: bytes, refused: int, reason: str) -> None:
    """An export of which some spans are refused, for a reason that the answer tells."""
    status, _, answer = post_traces(served, data)
    partial = ExportTraceServiceResponse.FromString(answer).partial_success
    assert (status, partial.rejected_spans) == (200, refused)
    assert reason in partial.error_message


def test_partial(report_server: RunningServer) -> None:
    """A span without ids is refused alone; the others are stored, and the answer counts."""
    message = encode_spans(make_spans([make_leg_record("mono", DECODE_US, request_id="good")]))
    spans = message.resource_spans[0].scope_spans[0].spans
    spans.add(name="no ids")
    late = spans.add()
    late.CopyFrom(spans[0])
    late.end_time_unix_nano = 2**64 - 1
    check_partial(report_server, message.SerializeToString(), 2, "trace id")
    late.end_time_unix_nano, late.parent_span_id = 1, b"x" * 100_000
    check_partial(report_server, message.SerializeToString(), 2, "trace id")
    assert fetch_json(report_server, "/ttft_report/good")[0] == 200


def test_locked(
    start_report_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database locked by someone else loses nothing: the exporter is told to try again."""
    monkeypatch.setattr(database_schema, "BUSY_S", 0.3)
    report_server = start_report_server()
    lock = sqlite3.connect(report_server.path, isolation_level=None, check_same_thread=False)
    lock.execute("BEGIN IMMEDIATE")
    nothing = encode_spans([]).SerializeToString()
    assert post_traces(report_server, nothing)[0] == 200  # nothing to write
    release = threading.Timer(1.0, lambda: lock.execute("ROLLBACK"))
    release.start()
    sent = export_records(make_http_exporter(report_server), make_routed_records("locked"))
    release.join()
    lock.close()
    health = fetch_json(report_server, "/healthz")[1]
    assert health["stored"]["spans"] == len(sent)
    assert health["store"]["failed_batches"] >= 1
    assert health["received"]["retry"] >= 1


def test_disk_full(start_report_server: Callable[..., RunningServer]) -> None:
    """A full disk is 503 with Retry-After, UNAVAILABLE over gRPC, and shown in /healthz."""
    full = start_report_server(max_bytes=15 * 4096)
    data = encode_records([one for n in range(30) for one in make_routed_records(f"r{n}")])
    status, headers, answer = post_traces(full, data)
    assert (status, headers["retry-after"]) == (503, "2")
    assert "full" in status_pb2.Status.FromString(answer).message
    assert call_grpc(full, data) is grpc.StatusCode.UNAVAILABLE
    status, health = fetch_json(full, "/healthz")
    assert status == 503 and "full" in health["trouble"]
    assert post_traces(full, encode_records([make_leg_record("mono", DECODE_US)]))[0] == 200
    assert fetch_json(full, "/healthz")[0] == 200


def test_values(report_server: RunningServer) -> None:
    """Every kind of attribute arrives as JSON can hold it, within bounds; what is cut is counted."""
    message = encode_spans(make_spans([make_short_record()]))
    span = message.resource_spans[0].scope_spans[0].spans[0]
    del span.attributes[:]

    def add(key: str) -> AnyValue:
        pair = span.attributes.add()
        pair.key = key
        return pair.value

    add("none")
    add("nan").double_value = float("nan")
    add("bytes").bytes_value = b"\x01\xff"
    add("long").string_value = "x" * 100_000
    add("list").array_value.values.add().int_value = 1
    pair = add("map").kvlist_value.values.add()
    pair.key, pair.value.bool_value = "k", True
    for number in range(MAX_ATTRIBUTES):
        add(f"more{number}").int_value = number
    assert post_traces(report_server, message.SerializeToString())[0] == 200
    trace = fetch_json(report_server, f"/api/trace/{span.trace_id.hex()}")[1]
    (stored_span,) = [each for each in trace["spans"] if each["span_id"] == span.span_id.hex()]
    attributes = stored_span["attributes"]
    assert (attributes["none"], attributes["nan"], attributes["bytes"]) == ("", "nan", "01ff")
    assert (attributes["list"], attributes["map"]) == ("[1]", '{"k": true}')
    assert len(attributes["long"]) == 4096
    assert (len(attributes), stored_span["dropped"]) == (MAX_ATTRIBUTES, 6)


def test_api(report_server: RunningServer) -> None:
    """The API lists, filters and sums up; an unknown trace is 404, a lost database 503."""
    fill_database(report_server.path, *make_routed_records("r1"))
    (listed,) = fetch_json(report_server, "/api/requests?role=encode&min_ttft_ms=1")[1]
    assert (listed["request_id"], listed["closed"]) == ("r1", True)
    assert fetch_json(report_server, "/api/requests?min_ttft_ms=1e9")[1] == []
    assert fetch_json(report_server, "/api/requests?min_ttft_ms=nan&last=-4")[1] != []
    assert fetch_json(report_server, "/api/summary")[1]["count"] == 1
    assert fetch_json(report_server, "/api/trace/00")[0] == 404
    away = report_server.path.rename(report_server.path.with_suffix(".away"))
    assert fetch_json(report_server, "/api/requests")[0] == 503
    away.rename(report_server.path)


def test_slow(report_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that never ends is given up after a time."""
    monkeypatch.setattr(receiver, "MAX_READ_S", 0.3)
    with socket.create_connection(
        ("127.0.0.1", report_server.server.http_port), timeout=10
    ) as slow:
        slow.sendall(
            b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            b"Content-Type: application/x-protobuf\r\n\r\nx"
        )
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_our_own_error(report_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours while writing is temporary to the sender; the writer keeps running."""
    monkeypatch.setenv("TTFT_OTEL_GUARD", "keep")
    data = encode_records([make_short_record()])
    with monkeypatch.context() as patched:
        patched.setattr(request_assembly, "assemble_requests", lambda *_: 1 / 0)
        assert post_traces(report_server, data)[0] == 503
    assert post_traces(report_server, data)[0] == 200
    assert guard.error_counts.pop("store") == 1


def test_many_spans(report_server: RunningServer) -> None:
    """Of one export a bounded number of spans is stored; the answer tells how many were not."""
    message = ExportTraceServiceRequest()
    spans = message.resource_spans.add().scope_spans.add().spans
    for number in range(MAX_EXPORT_SPANS + 7):
        spans.add(trace_id=b"t" * 16, span_id=(number + 1).to_bytes(8, "big"))
    check_partial(report_server, message.SerializeToString(), 7, str(MAX_EXPORT_SPANS))


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
