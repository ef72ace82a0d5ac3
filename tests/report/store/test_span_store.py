# SPDX-License-Identifier: Apache-2.0
"""The span store: repeated exports change nothing, size and age are limited, readers do not wait."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sample_records import (
    make_routed_records,
    make_short_record,
    make_spans,
    make_stored_spans,
    read_request,
    store_records,
)

from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.store import database_schema, span_store
from ttft_otel.report.store import span_store as module
from ttft_otel.report.store.database_reader import open_reader
from ttft_otel.report.store.span_store import SpanStore, StoreUnavailableError


def test_endless_trace(store: SpanStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace beyond its bound is refused span by span, counted, and told to the sender."""
    monkeypatch.setattr(span_store, "MAX_TRACE_SPANS", 10)
    spans = make_stored_spans(make_routed_records("r1"))
    assert store.add(spans).result(10) == len(spans) - 10
    assert store.counts["refused"] == len(spans) - 10


def test_readers(store: SpanStore) -> None:
    """Two readers see whole commits while a writer writes, and never wait for it."""
    batches = [make_stored_spans(make_routed_records(f"r{number}")) for number in range(40)]
    stop = threading.Event()

    def read() -> list[dict[str, int]]:
        sizes = []
        while not stop.is_set():
            with open_reader(store.path) as db:
                sizes.append(db.count_rows())
        return sizes

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for done in [store.add(batch) for batch in batches]:
                done.result(20)
        finally:
            stop.set()
    sizes = [each for reader in readers for each in reader.result()]
    assert sizes and all(each["spans"] == len(batches[0]) * each["traces"] for each in sizes)


def test_overflow(store: SpanStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is too slow a batch is refused at once instead of being queued without limit."""
    lock = sqlite3.connect(store.path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    span = make_stored_spans([make_short_record()])
    waiting = []
    with pytest.raises(StoreUnavailableError, match="wait"):
        waiting.extend(
            store.add(span)
            for _ in range(module.MAX_WAITING_BATCHES + 2 + module.MAX_TRANSACTION_SPANS)
        )
    lock.execute("ROLLBACK")
    lock.close()
    for done in waiting:
        done.exception(20)
    assert store.counts["busy"] == 1


def test_closed(store: SpanStore) -> None:
    """At the end what is queued is written; later batches are refused."""
    done = store.add(make_stored_spans(make_routed_records("r1")))
    store.close()
    store.close()
    assert done.result(0) == 0
    with pytest.raises(StoreUnavailableError):
        store.add([])


def test_schema(tmp_path: Path) -> None:
    """A file of another schema version, of no database, or none at all: each has its own remedy."""
    StoreError = database_schema.StoreError
    for version in (1, 99):
        other = tmp_path / f"{version}.db"
        with closing(sqlite3.connect(other)) as connection:
            connection.execute(f"PRAGMA user_version={version}")
        refusal = f"schema {version}, .* delete the file {other}, or"
        with pytest.raises(StoreError, match=refusal):
            SpanStore(other)
        with pytest.raises(StoreError, match=refusal), open_reader(other):
            pass
    text = tmp_path / "text.db"
    text.write_text("no database " * 1000)
    with pytest.raises(StoreError, match="--db"):
        SpanStore(text)
    with pytest.raises(StoreError, match="is it a ttft-otel database"), open_reader(text):
        pass
    with pytest.raises(StoreError, match="ttft-otel serve"), open_reader(tmp_path / "none.db"):
        pass


def test_private(store: SpanStore) -> None:
    """Nobody else may read the file, nor what SQLite keeps beside it."""
    store_records(store, make_routed_records("r1"))
    files = list(store.path.parent.glob("spans.db*"))
    assert len(files) == 3
    assert not [file for file in files if file.stat().st_mode & 0o077]


def test_default() -> None:
    """The default path follows XDG."""
    get_path, place = database_schema.get_default_path, Path("ttft-otel/spans.db")
    assert get_path({"XDG_STATE_HOME": "/s"}) == Path("/s") / place
    assert get_path({}) == Path.home() / ".local/state" / place


def test_names(store: SpanStore) -> None:
    """A request is found by its id, by its answer's id, and without an id by its trace."""
    named = make_short_record(request_id="my_id")
    nameless = make_short_record(request_id="")
    store_records(store, [named, nameless])
    store.close()
    with open_reader(store.path) as db:
        for name in ("my_id", "chatcmpl-my_id", "cmpl-my_id"):
            found = db.find_request(name)
            assert found is not None and found.trace_id == named.trace_id
        found = db.find_request(nameless.trace_id.upper())
        assert found is not None and found.request_id == nameless.trace_id
        for name in ("", "my%", "chatcmpl-"):
            assert db.find_request(name) is None


def test_duplicate_trunk_numbers(store: SpanStore) -> None:
    """Numbers that no duration can have do not reach the database."""
    (server, trunk, *_) = make_stored_spans([make_short_record()])
    wild = replace(trunk, attributes={**trunk.attributes, "ttft.total_us": 1 << 62})
    store.add([server, wild]).result(10)
    request = read_request(store.path)
    assert request.ttft_us == 0 and not request.closed


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


def check_stored(path: Path, data: bytes) -> list[StoredSpan]:
    """The spans of an export; the database gives the same ones."""
    expected = sorted(otlp_decoder.decode_export(data).spans, key=lambda span: span.span_id)
    with open_reader(path) as db:
        trace = db.find_trace(expected[0].trace_id)
    assert trace and sorted(trace.spans, key=lambda span: span.span_id) == expected
    return expected


@pytest.mark.parametrize("values", [0, 12, 300], ids=["bare", "usual", "too many"])
def test_foreign_spans(store: SpanStore, values: int) -> None:
    """Spans of others read alike, small ones that are kept as they came and large ones that are cut."""
    data = build_foreign_export(values).SerializeToString()
    assert (len(data) > 3 * otlp_decoder.MAX_RAW_BYTES) is (values == 300)
    chunks = otlp_decoder.chunk_export(data).chunks
    # What nothing shows is not kept either.
    content = b"".join(chunk.content for chunk in chunks)
    assert b"event" not in content and b"l" * 16 not in content
    store.add_chunks(chunks).result(10)
    assert {span.dropped for span in check_stored(store.path, data)} == {max(0, values - 256)}


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_own_spans(tmp_path: Path, size: int) -> None:
    """A request through router and servers reads alike, in however many exports and order its spans come."""
    made = make_spans(make_routed_records("r1", encoders=2))
    store = SpanStore(tmp_path / "spans.db")
    for start in reversed(range(0, len(made), size)):
        data = encode_spans(made[start : start + size]).SerializeToString()
        for _ in range(2):  # the second time as after a lost answer
            store.add_chunks(otlp_decoder.chunk_export(data).chunks).result(10)
    store.close()
    assert store.counts["stored"] == store.counts["duplicate"] == len(made)
    check_stored(store.path, encode_spans(made).SerializeToString())
    request = read_request(store.path)
    assert [leg.role for leg in request.legs] == ["encode", "encode", "prefill_decode"]
    assert request.closed and not request.pending
    with open_reader(store.path) as db:
        assert db.count_rows() == {"traces": 1, "spans": len(made), "requests": 1}


def test_partly_known(store: SpanStore) -> None:
    """Of an export with new and known spans, and one that is in it twice, each is stored once."""
    message = encode_spans(make_spans([make_short_record()]))
    spans = message.resource_spans[0].scope_spans[0].spans
    data = message.SerializeToString()
    first = ExportTraceServiceRequest.FromString(data)
    del first.resource_spans[0].scope_spans[0].spans[1:]
    spans.append(spans[1])
    for export in (first, message):
        chunks = otlp_decoder.chunk_export(export.SerializeToString()).chunks
        assert store.add_chunks(chunks).result(10) == 0
    assert store.counts == {"stored": 3, "duplicate": 2, "evicted_traces": 0}
    check_stored(store.path, data)
    read_request(store.path)
