# SPDX-License-Identifier: Apache-2.0
"""Spans that are stored as they came read as if they had been decoded at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import sample_records
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.store import span_chunks
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.report.store.span_store import SpanStore


def read_stored(path: Path, trace_id: str) -> list[StoredSpan]:
    with open_reader(path) as db:
        trace = db.find_trace(trace_id)
    return sorted(trace.spans, key=lambda span: span.span_id) if trace else []


def decode_sorted(data: bytes) -> list[StoredSpan]:
    return sorted(otlp_decoder.decode_export(data).spans, key=lambda span: span.span_id)


def build_foreign_export(values: int) -> ExportTraceServiceRequest:
    """Spans of somebody else, with links, events and values of all kinds; `values` attributes each."""
    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    pair = group.resource.attributes.add()
    pair.key, pair.value.string_value = "service.name", "other"
    for number in range(1, 4):
        span = group.scope_spans.add().spans.add()
        span.trace_id, span.span_id = b"t" * 16, bytes([number]) * 8
        # All zeros are no parent that is missing: some senders write them.
        span.parent_span_id = (b"", bytes(8), b"\x01" * 8)[number - 1]
        span.start_time_unix_nano, span.end_time_unix_nano = number, number - 1
        span.kind, span.status.code, span.status.message = 5, 2, "no"
        span.events.add().name = "event"
        span.links.add().trace_id = b"l" * 16
        for place in range(values):
            add_value(span, place)
    return message


def add_value(span: Span, place: int) -> None:
    value = span.attributes.add(key=f"key{place}").value
    match place % 6:
        case 0:
            value.string_value = "text" * 10
        case 1:
            value.int_value = -place
        case 2:
            value.double_value = float("nan")
        case 3:
            value.bool_value = True
        case 4:
            value.array_value.values.add().string_value = "\x01"
        case 5:
            value.bytes_value = b"bytes"


@pytest.mark.parametrize("values", [0, 12, 300], ids=["bare", "usual", "too many"])
def test_foreign_spans(store: SpanStore, values: int) -> None:
    """Spans of others read alike, small ones that are kept as they came and large ones that are cut."""
    data = build_foreign_export(values).SerializeToString()
    assert (len(data) > 3 * span_chunks.MAX_RAW_BYTES) is (values == 300)
    chunks = otlp_decoder.chunk_export(data).chunks
    # What nothing shows is not kept either.
    assert not [
        chunk for chunk in chunks if b"event" in chunk.content or b"l" * 16 in chunk.content
    ]
    store.add_chunks(chunks).result(10)
    expected = decode_sorted(data)
    assert read_stored(store.path, (b"t" * 16).hex()) == expected
    assert {span.dropped for span in expected} == {max(0, values - 256)}


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_own_spans(tmp_path: Path, size: int) -> None:
    """A request through router and servers reads alike, in however many exports and order its spans come."""
    made = sample_records.make_spans(sample_records.make_routed_records("r1", encoders=2))
    whole = encode_spans(made).SerializeToString()
    store = SpanStore(tmp_path / "spans.db")
    for start in reversed(range(0, len(made), size)):
        data = encode_spans(made[start : start + size]).SerializeToString()
        for _ in range(2):  # the second time as after a lost answer
            store.add_chunks(otlp_decoder.chunk_export(data).chunks).result(10)
    store.close()
    assert store.counts["stored"] == store.counts["duplicate"] == len(made)
    expected = decode_sorted(whole)
    assert read_stored(store.path, expected[0].trace_id) == expected
    request = sample_records.read_request(store.path)
    assert [leg.role for leg in request.legs] == ["encode", "encode", "prefill_decode"]
    assert request.closed and not request.pending
    with open_reader(store.path) as db:
        assert db.count_rows() == {"traces": 1, "spans": len(made), "requests": 1}


def test_partly_known(store: SpanStore) -> None:
    """Of an export with new and known spans, and one that is in it twice, each is stored once."""
    message = encode_spans(sample_records.make_spans([sample_records.make_short_record()]))
    spans = message.resource_spans[0].scope_spans[0].spans
    expected = decode_sorted(message.SerializeToString())
    first = ExportTraceServiceRequest()
    first.CopyFrom(message)
    del first.resource_spans[0].scope_spans[0].spans[1:]
    spans.append(spans[1])
    for export in (first, message):
        chunks = otlp_decoder.chunk_export(export.SerializeToString()).chunks
        assert store.add_chunks(chunks).result(10) == 0
    assert store.counts == {"stored": 3, "duplicate": 2, "evicted_traces": 0}
    assert read_stored(store.path, expected[0].trace_id) == expected
    with open_reader(store.path) as db:
        assert len(db.list_latest(RequestFilter())) == 1
