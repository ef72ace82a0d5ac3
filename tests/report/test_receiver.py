# SPDX-License-Identifier: Apache-2.0
"""The receiver, as real exporters and as broken senders see it."""

from __future__ import annotations

import gzip
import json
import socket
import sqlite3
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import trips
from google.rpc import status_pb2
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from trips import Served

from ttft_otel import guard
from ttft_otel.report import assemble, receiver
from ttft_otel.report.body import LIMIT
from ttft_otel.report.otlp import ATTRIBUTES
from ttft_otel.report.query import Wanted, reader

PROTOBUF = "application/x-protobuf"
METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def over_grpc(served: Served) -> SpanExporter:
    """The SDK's gRPC exporter, packed."""
    return GrpcExporter(
        endpoint=served.grpc, insecure=True, compression=grpc.Compression.Gzip, timeout=30
    )


def over_http(served: Served) -> SpanExporter:
    """The SDK's HTTP exporter, packed."""
    url = f"{served.http}/v1/traces"
    return HttpExporter(endpoint=url, compression=Compression.Gzip, timeout=30)


def plain_http(served: Served) -> SpanExporter:
    """The SDK's HTTP exporter as vLLM's child uses it by default."""
    return HttpExporter(endpoint=f"{served.http}/v1/traces", timeout=30)


def post(
    served: Served, data: bytes | Iterator[bytes], kind: str = PROTOBUF, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """POST to /v1/traces; status, headers, body."""
    sent = {"Content-Type": kind} | {name.replace("_", "-"): v for name, v in headers.items()}
    request = urllib.request.Request(f"{served.http}/v1/traces", data, sent)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def get(served: Served, path: str) -> tuple[int, Any]:
    """GET JSON."""
    try:
        with urllib.request.urlopen(f"{served.http}{path}", timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("door", [over_grpc, over_http, plain_http])
def test_exporters(served: Served, door: Callable[[Served], SpanExporter]) -> None:
    """Whatever an SDK exporter sends is on disk when it hears of success, field by field."""
    records = trips.routed("r1", encoders=2)
    sent = trips.spans(records)
    exporter = door(served)
    assert exporter.export(sent) is SpanExportResult.SUCCESS
    exporter.shutdown()
    with reader(served.path) as db:
        trace = db.trace(records[0].trace_id)
    assert trace is not None
    assert {span.span_id for span in trace.spans} == {f"{s.context.span_id:016x}" for s in sent}
    theirs = {f"{span.context.span_id:016x}": span for span in sent}
    for span in trace.spans:
        one = theirs[span.span_id]
        assert span.attributes == dict(one.attributes or {})
        assert (span.name, span.start_ns, span.end_ns) == (one.name, one.start_time, one.end_time)
        assert span.parent_id == (f"{one.parent.span_id:016x}" if one.parent else "")
        assert span.service == one.resource.attributes["service.name"]


def test_report(served: Served) -> None:
    """/ttft_report answers with the original names, by role and combined, and closes."""
    exporter = plain_http(served)
    exporter.export(trips.spans(trips.routed("r1")))
    exporter.shutdown()
    status, report = get(served, "/ttft_report/r1")
    assert status == 200
    assert set(report["by_role"]) == {"encode", "prefill_decode", "router"}
    for entry in (*report["by_role"].values(), report["combined"]):
        total = sum(round(ms * 1000) for ms in entry["stages"].values())
        assert total + round(entry["unattributed_ms"] * 1000) == round(entry["ttft_ms"] * 1000)
    combined = report["combined"]
    assert combined["enc_compute_time_ms"] == trips.ENCODE["encoder.compute"] / 1000
    assert combined["emb_cache_transfer_time_ms"] == 5.2
    status, unknown = get(served, "/ttft_report/nobody")
    assert (status, unknown["error"], unknown["request"]) == (404, "unknown_request", "nobody")


def test_json(served: Served) -> None:
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
    status, headers, answer = post(served, json.dumps(body).encode(), "application/json")
    assert (status, headers["content-type"], json.loads(answer)) == (200, "application/json", {})
    with reader(served.path) as db:
        trace = db.trace("5b8efff798038103d269b633813fc60c")
    assert trace is not None
    assert trace.spans[0].attributes == {"my.attr": 17}
    assert trace.spans[0].parent_id == "eee19b7ec3c1b173"


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"\xff\xff\xff", ""),
        (b"no gzip at all", "gzip"),
        (gzip.compress(b"")[:-3], "gzip"),
        (b"", "br"),
        (b"{", ""),
        (b"[]", ""),
        (b'{"resourceSpans": 3}', ""),
        (b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"xyz"}]}]}]}', ""),
        (b"[" * 100_000, ""),
    ],
)
def test_malformed(served: Served, data: bytes, encoding: str) -> None:
    """A body that is not OTLP gets 400 with a google.rpc.Status in the sender's own encoding."""
    json_kind = data[:1] in (b"{", b"[")
    kind = "application/json" if json_kind else PROTOBUF
    status, headers, answer = post(served, data, kind, Content_Encoding=encoding)
    assert (status, headers["content-type"]) == (400, kind)
    if json_kind:
        assert json.loads(answer)["code"] == 3
    else:
        assert status_pb2.Status.FromString(answer).message


def test_content_type(served: Served) -> None:
    """What a browser's form can send without asking is refused: 415."""
    assert post(served, b"{}", "text/plain")[0] == 415


def test_deflate(served: Served) -> None:
    """deflate is understood too."""
    data = encode_spans(trips.spans([trips.leg("mono", trips.DECODE)])).SerializeToString()
    assert post(served, zlib.compress(data), Content_Encoding="deflate")[0] == 200


def test_oversize(served: Served) -> None:
    """Too large as sent, or a gzip bomb of a few kilobytes: 413, and the server lives on."""
    assert post(served, b"\0" * (LIMIT + 1))[0] == 413
    bomb = gzip.compress(b"\0" * (LIMIT * 8))
    assert len(bomb) < LIMIT // 50
    assert post(served, bomb, Content_Encoding="gzip")[0] == 413
    assert get(served, "/healthz")[1]["received"]["large"] == 2


def test_oversize_chunked(served: Served) -> None:
    """A body without a length is cut off at the bound."""
    chunks = iter([b"\0" * (1 << 20)] * 17)
    assert post(served, chunks)[0] == 413
    with pytest.raises(OSError):  # and one without an end is not listened to for ever
        post(served, iter([b"\0" * (1 << 20)] * 200))
    assert get(served, "/healthz")[0] == 200


def call(
    served: Served, data: bytes, compression: grpc.Compression = grpc.Compression.NoCompression
) -> grpc.StatusCode:
    """Raw gRPC Export; its status."""
    with grpc.insecure_channel(served.grpc) as channel:
        export = channel.unary_unary(METHOD)
        try:
            export(data, timeout=30, compression=compression)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_grpc_refusals(served: Served) -> None:
    """gRPC: nonsense is INVALID_ARGUMENT, too much, packed or not, RESOURCE_EXHAUSTED."""
    assert call(served, b"\xff\xff\xff") is grpc.StatusCode.INVALID_ARGUMENT
    big = b"\0" * (LIMIT + 1)
    assert call(served, big) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert call(served, big, grpc.Compression.Gzip) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert call(served, b"") is grpc.StatusCode.OK


def test_partial(served: Served) -> None:
    """A span without ids is refused alone; the others are stored, and the answer counts."""
    message = encode_spans(trips.spans([trips.leg("mono", trips.DECODE, request_id="good")]))
    spans = message.resource_spans[0].scope_spans[0].spans
    bad = spans.add()
    bad.name = "no ids"
    late = spans.add()
    late.CopyFrom(spans[0])
    late.end_time_unix_nano = 2**64 - 1
    status, _, answer = post(served, message.SerializeToString())
    partial = ExportTraceServiceResponse.FromString(answer).partial_success
    assert (status, partial.rejected_spans) == (200, 2)
    assert "trace id" in partial.error_message
    assert get(served, "/ttft_report/good")[0] == 200


@pytest.mark.parametrize("door", [over_grpc, over_http])
def test_locked(served: Served, door: Callable[[Served], SpanExporter]) -> None:
    """A database locked by someone else loses nothing: the exporter is told to try again."""
    lock = sqlite3.connect(served.path, isolation_level=None, check_same_thread=False)
    lock.execute("BEGIN IMMEDIATE")
    status, headers, answer = post(served, encode_spans([]).SerializeToString())
    assert status == 200  # nothing to write
    sent = trips.spans(trips.routed("locked"))
    release = threading.Timer(3.5, lambda: lock.execute("ROLLBACK"))
    release.start()
    exporter = door(served)
    assert exporter.export(sent) is SpanExportResult.SUCCESS
    exporter.shutdown()
    release.join()
    lock.close()
    health = get(served, "/healthz")[1]
    assert health["stored"]["spans"] == len(sent)
    assert health["store"]["failed_batches"] >= 1
    assert health["received"]["retry"] >= 1


def test_disk_full(serve: Callable[..., Served]) -> None:
    """A full disk is 503 with Retry-After, UNAVAILABLE over gRPC, and shown in /healthz."""
    full = serve(limit=15 * 4096)
    data = encode_spans(
        trips.spans([one for n in range(30) for one in trips.routed(f"r{n}")])
    ).SerializeToString()
    status, headers, answer = post(full, data)
    assert (status, headers["retry-after"]) == (503, "2")
    assert "full" in status_pb2.Status.FromString(answer).message
    assert call(full, data) is grpc.StatusCode.UNAVAILABLE
    status, health = get(full, "/healthz")
    assert status == 503 and "full" in health["trouble"]
    small = trips.spans([trips.leg("mono", trips.DECODE)])
    assert post(full, encode_spans(small).SerializeToString())[0] == 200
    assert get(full, "/healthz")[0] == 200


def test_rebinding(served: Served) -> None:
    """On loopback a foreign Host header is refused, so no web page can read through DNS."""
    request = urllib.request.Request(f"{served.http}/api/requests", headers={"Host": "evil.test"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    with caught.value:
        assert caught.value.code == 400


def test_late_router(served: Served) -> None:
    """Legs first, router last, then all of it again: one request, the router's numbers."""
    records = trips.routed("late")
    for record in records:
        data = encode_spans(trips.spans([record])).SerializeToString()
        assert post(served, data)[0] == 200
        with reader(served.path) as db:
            (request,) = db.latest(Wanted())
        assert request.pending is (record.role != "router")
    assert post(served, data)[0] == 200
    with reader(served.path) as db:
        (request,) = db.latest(Wanted())
    assert request.roles == ("router", "encode", "prefill_decode")
    assert records[-1].ttft is not None and request.ttft_us == records[-1].ttft.end
    assert request.closed


def test_values(served: Served) -> None:
    """Every kind of attribute arrives as JSON can hold it, within bounds; what is cut is counted."""
    message = encode_spans(trips.spans([trips.leg("mono", {"sample": 5})]))
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
    for number in range(ATTRIBUTES):
        add(f"more{number}").int_value = number
    assert post(served, message.SerializeToString())[0] == 200
    trace = get(served, f"/api/trace/{span.trace_id.hex()}")[1]
    (found,) = [each for each in trace["spans"] if each["span_id"] == span.span_id.hex()]
    have = found["attributes"]
    assert (have["none"], have["nan"], have["bytes"]) == ("", "nan", "01ff")
    assert (have["list"], have["map"]) == ("[1]", '{"k": true}')
    assert len(have["long"]) == 4096
    assert (len(have), found["dropped"]) == (ATTRIBUTES, 6)


def test_api(served: Served) -> None:
    """The API lists, filters and sums up; an unknown trace is 404, a lost database 503."""
    assert post(served, encode_spans(trips.spans(trips.routed("r1"))).SerializeToString())[0] == 200
    (one,) = get(served, "/api/requests?role=encode&min_ttft_ms=1")[1]
    assert (one["request_id"], one["closed"]) == ("r1", True)
    assert get(served, "/api/requests?min_ttft_ms=1e9")[1] == []
    assert get(served, "/api/requests?min_ttft_ms=nan&last=-4")[1] != []
    assert get(served, "/api/summary")[1]["count"] == 1
    assert get(served, "/api/trace/00")[0] == 404
    served.path.rename(served.path.with_suffix(".away"))
    assert get(served, "/api/requests")[0] == 503
    served.path.with_suffix(".away").rename(served.path)


def test_slow(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that never ends is given up, so that it holds no place for ever."""
    monkeypatch.setattr(receiver, "READ_S", 0.3)
    with socket.create_connection(("127.0.0.1", served.doors.http), timeout=10) as slow:
        slow.sendall(
            b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            b"Content-Type: application/x-protobuf\r\n\r\nx"
        )
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_our_own_error(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours while writing is told to the sender as temporary; the writer lives on."""
    monkeypatch.setenv("TTFT_OTEL_GUARD", "keep")
    data = encode_spans(trips.spans([trips.leg("mono", {"sample": 5})])).SerializeToString()
    with monkeypatch.context() as broken:
        broken.setattr(assemble, "requests", lambda *_: 1 / 0)
        assert post(served, data)[0] == 503
    assert post(served, data)[0] == 200
    assert guard.errors.pop("store") == 1
