# SPDX-License-Identifier: Apache-2.0
"""Records of sample requests, and the spans that the exporter makes of them; for the report's tests."""

from __future__ import annotations

import io
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from msgspec import structs
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from rich.console import Console

from ttft_otel.exporter import span_batch as exporter
from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Attributes, Call, HeldBy, Piece, Record, Server, Ttft
from ttft_otel.model.stages import Role
from ttft_otel.report.assemble.request_assembly import assemble_requests
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_server import ReportServer
from ttft_otel.report.report_types import Request, StoredSpan
from ttft_otel.report.store.database_reader import RequestFilter, StoredTrace, open_reader
from ttft_otel.report.store.span_store import SpanStore

ENCODE_US = {
    "receive": 900,
    "preprocess": 14_200,
    "ipc": 410,
    "encoder.queue": 5_300,
    "dispatch": 2_150,
    "encoder.compute": 41_700,
    "ec.transfer": 1_900,
    "output": 600,
    "egress": 120,
}
DECODE_US = {
    "receive": 700,
    "preprocess": 11_800,
    "ipc": 380,
    "prefill.queue": 9_400,
    "ec.transfer": 3_300,
    "dispatch": 2_400,
    "prefill.compute": 63_250,
    "prefill.stall": 4_100,
    "sample": 1_450,
    "output": 820,
    "egress": 140,
}
HOP_US = 640


def make_random_id(digits: int) -> str:
    """A random id."""
    return f"{random.getrandbits(digits * 4) | 1:0{digits}x}"


def make_leg_record(
    role: Role,
    lengths: Mapping[str, int],
    trace_id: str = "",
    parent: str = "",
    start_ns: int = 0,
    request_id: str = "r1",
    outermost: bool = True,
    lost: int = 300,
    error: str = "",
    died: str = "",
    tail: int = 50_000,
    model: str = "tiny-vl",
) -> Record:
    """One server's record; `lost` microseconds at its end are unattributed."""
    pieces, at = [], 0
    for name, length in lengths.items():
        pieces.append(Piece("stage", name, at, at + length))
        if name == "preprocess":
            pieces.append(Piece("part", "media", at, at + length // 3))
            pieces.append(Piece("part", "tokenize", at + length // 3, at + length // 2))
        at += length
    identity: Attributes = {keys.MODEL: model, keys.PROVIDER: "vllm", keys.STREAMING: True}
    end = at + lost
    return Record(
        version=1,
        trace_id=trace_id or make_random_id(32),
        span_id=make_random_id(16),
        parent_id=parent,
        flags=1,
        state="",
        start_ns=start_ns or time.time_ns(),
        role=role,
        outermost=outermost,
        service=stages.SERVICE_NAMES[role],
        request_id=request_id,
        attributes=identity,
        ttft=Ttft(
            span_id=make_random_id(16),
            name=span_names.ENCODE if role == "encode" else span_names.TTFT,
            start=0,
            end=end,
            stages=dict(lengths),
            unattributed=lost,
            clamped=0,
            pieces=tuple(pieces),
            error=error,
            died=died,
        ),
        server=Server("POST /v1/chat/completions", end + tail, 500 if error else 200),
    )


def scale_stages(lengths: Mapping[str, int], factor: float) -> dict[str, int]:
    """The same stages, longer or shorter."""
    return {name: round(length * factor) for name, length in lengths.items()}


def make_routed_records(
    request_id: str = "r1",
    factor: float = 1.0,
    encoders: int = 1,
    start_ns: int = 0,
    trace_id: str = "",
    model: str = "tiny-vl",
) -> list[Record]:
    """A request through router, encoder(s) and prefill-decode; the router's record comes last."""
    trace_id = trace_id or make_random_id(32)
    start_ns = start_ns or time.time_ns()
    records: list[Record] = []
    calls: list[Call] = []
    parts = {"router.receive": 350, "router.route": 120}
    at, lost = sum(parts.values()), 0
    for role, base, many in (("encode", ENCODE_US, encoders), ("prefill_decode", DECODE_US, 1)):
        for number in range(many):
            call_id = make_random_id(16)
            record = make_leg_record(
                role,  # type: ignore[arg-type]
                scale_stages(base, factor * (1 - 0.2 * number)),
                trace_id,
                call_id,
                start_ns + (at + HOP_US // 2) * 1000,
                request_id,
                outermost=False,
                tail=0 if role == "encode" else 240_000,
                model=model,
            )
            assert record.server is not None
            end = at + record.server.end + HOP_US
            calls.append(Call(call_id, f"POST {role}", role, at, end, 200))
            records.append(record)
        # The first one is the slowest.
        slowest = records[-many].ttft
        assert slowest is not None
        parts[f"router.hop.{role}"] = HOP_US
        parts |= {f"{role}.{name}": us for name, us in slowest.stages.items()}
        lost += slowest.unattributed
        at += slowest.end + HOP_US
    parts["router.egress"] = 90
    router = make_leg_record(
        "router", parts, trace_id, "", start_ns, request_id, lost=lost, tail=245_000, model=model
    )
    return [*records, structs.replace(router, calls=tuple(calls))]


def make_held_records() -> tuple[Record, Record]:
    """A request that holds, and one that came 1 ms later and is held by it and by an untraced one."""
    holder = make_leg_record("mono", DECODE_US, start_ns=10**18)
    held = make_leg_record("mono", DECODE_US, start_ns=10**18 + 1_000_000)
    assert held.ttft is not None
    links = (
        HeldBy(6_000, 512, "prefill", "engine-1", holder.trace_id, holder.span_id),
        HeldBy(3_000, 4, "decode", "engine-2"),
    )
    pieces = tuple(
        structs.replace(piece, held_by=links) if piece.name == "prefill.queue" else piece
        for piece in held.ttft.pieces
    )
    return holder, structs.replace(held, ttft=structs.replace(held.ttft, pieces=pieces))


def make_short_record(**fields: Any) -> Record:
    """The record of a request alone on a server, which took 5 us."""
    return make_leg_record("mono", {"sample": 5}, **fields)


def make_spans(records: Sequence[Record]) -> list[ReadableSpan]:
    """The exporter's own spans of these records."""
    return [
        span
        for record in records
        for span in exporter.build_spans(record, Resource.create({"service.name": record.service}))
    ]


def encode_records(records: Sequence[Record]) -> bytes:
    """The same spans as an export."""
    return encode_spans(make_spans(records)).SerializeToString()


def make_stored_spans(records: Sequence[Record]) -> list[StoredSpan]:
    """The same spans as the receiver decodes them."""
    return otlp_decoder.decode_export(encode_records(records)).spans


def assemble_trace(spans: Sequence[StoredSpan]) -> StoredTrace:
    """The trace of these spans, as the store would give it."""
    parents = {span.span_id: span.parent_id for span in spans}
    trunks = [span for span in spans if span.is_ttft_span]
    requests = assemble_requests(spans[0].trace_id, trunks, parents)
    return StoredTrace(spans[0].trace_id, tuple(spans), tuple(requests))


def assemble_records(
    records: Sequence[Record], lost: frozenset[str] = frozenset()
) -> tuple[Request, ...]:
    """Assemble what is left of these records' spans when some span ids never came."""
    spans = [span for span in make_stored_spans(records) if span.span_id not in lost]
    return assemble_trace(spans).requests


def change_spans(
    records: Sequence[Record], role: str, attributes: Attributes, **resource: str
) -> list[StoredSpan]:
    """The stored spans of these records; the `ttft` spans of a role have more attributes."""
    return [
        replace(
            span,
            attributes=span.attributes | attributes,
            resource=span.resource | {name.replace("_", "."): v for name, v in resource.items()},
        )
        if span.is_ttft_span and span.attributes[keys.ROLE] == role
        else span
        for span in make_stored_spans(records)
    ]


def capture_text(show: Callable[[Console], object]) -> str:
    """What is printed to a wide terminal."""
    out = io.StringIO()
    show(Console(file=out, width=200))
    return out.getvalue()


def store_records(store: SpanStore, records: Sequence[Record]) -> None:
    """Put their spans into a store; they are on disk afterwards."""
    assert store.add(make_stored_spans(records)).result(60) == 0


def fill_database(path: Path, *records: Record, spans: Sequence[StoredSpan] = ()) -> Path:
    """Put the spans of records, and others, into the database `path`; a new one where there is none."""
    store = SpanStore(path)
    assert store.add([*make_stored_spans(records), *spans]).result(60) == 0
    store.close()
    return path


def read_request(path: Path) -> Request:
    """The only request of a database."""
    with open_reader(path) as reader:
        (request,) = reader.list_latest(RequestFilter())
    return request


def fetch_any_status(request: str | urllib.request.Request) -> tuple[int, dict[str, str], bytes]:
    """Send a request; status, headers and body of the answer, also of one that is an error."""
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


class RunningServer(NamedTuple):
    """A running server."""

    server: ReportServer
    http: str  #: base URL of the page and of OTLP/HTTP
    grpc: str  #: target of OTLP/gRPC
    path: Path  #: of the database


def fetch_page(served: RunningServer, path: str) -> tuple[int, str, dict[str, str]]:
    """GET a page: status, text and headers."""
    status, headers, body = fetch_any_status(f"{served.http}{path}")
    return status, body.decode(), headers


def fetch_json(served: RunningServer, path: str) -> tuple[int, Any]:
    """GET JSON."""
    status, text, _ = fetch_page(served, path)
    return status, json.loads(text)


def make_grpc_exporter(served: RunningServer) -> SpanExporter:
    """The SDK's gRPC exporter, packed."""
    return GrpcExporter(
        endpoint=served.grpc, insecure=True, compression=grpc.Compression.Gzip, timeout=30
    )


def make_http_exporter(served: RunningServer) -> SpanExporter:
    """The SDK's HTTP exporter, packed."""
    url = f"{served.http}/v1/traces"
    return HttpExporter(endpoint=url, compression=Compression.Gzip, timeout=30)


def export_records(exporter: SpanExporter, records: Sequence[Record]) -> list[ReadableSpan]:
    """Export the spans of these records, which must succeed."""
    sent = make_spans(records)
    assert exporter.export(sent) is SpanExportResult.SUCCESS
    exporter.shutdown()
    return sent
