# SPDX-License-Identifier: Apache-2.0
"""Limits of what a sender can make the database hold: bytes for each byte received, traces, age."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import sample_records
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from ttft_otel.model.names import keys, span_names
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.store import database_schema, retention, span_store
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.report.store.span_store import SpanStore

MAX_GROWTH = 5  # bytes of the file for each byte received
EXPORTS = 4
SPANS = 2000
FIXED_BYTES = 128 << 10  # of an empty database, and of pages that are not full yet


def make_id(number: int, size: int) -> bytes:
    """An ID that does not follow its predecessor in an index."""
    return (number * 0x9E3779B97F4A7C15 % (1 << 8 * size) or 1).to_bytes(size, "big")


def add_span(scope: ScopeSpans, number: int, trace: int) -> Span:
    """The smallest span that is stored."""
    span = scope.spans.add()
    span.trace_id, span.span_id = make_id(trace + 1, 16), make_id(number + 1, 8)
    return span


def make_one_span_traces(message: ExportTraceServiceRequest, start: int) -> None:
    """Each span a trace of its own: the largest share of what is not in the span."""
    scope = message.resource_spans.add().scope_spans.add()
    for number in range(start, start + SPANS):
        add_span(scope, number, number)


def make_repeated_resource(message: ExportTraceServiceRequest, start: int) -> None:
    """One large resource and scope name above many small spans."""
    group = message.resource_spans.add()
    for number in range(12):
        pair = group.resource.attributes.add()
        pair.key, pair.value.string_value = f"text{number}", "r" * 4096
    scope = group.scope_spans.add()
    scope.scope.name = "s" * 4096
    for number in range(start, start + SPANS):
        add_span(scope, number, start)


def make_many_scopes(message: ExportTraceServiceRequest, start: int) -> None:
    """One large resource above many scopes of one span."""
    group = message.resource_spans.add()
    pair = group.resource.attributes.add()
    pair.key, pair.value.string_value = "service.name", "r" * 4096
    for number in range(start, start + SPANS):
        scope = group.scope_spans.add()
        scope.scope.name = f"scope {number}"
        add_span(scope, number, start)


def make_ttft_spans(message: ExportTraceServiceRequest, start: int) -> None:
    """Spans that are requests, the shortest ones."""
    scope = message.resource_spans.add().scope_spans.add()
    scope.scope.name = span_names.SCOPE
    for number in range(start, start + SPANS):
        span = add_span(scope, number, number)
        span.name = span_names.TTFT
        pair = span.attributes.add()
        pair.key, pair.value.int_value = keys.TOTAL_US, 1


def make_long_request_ids(message: ExportTraceServiceRequest, start: int) -> None:
    """Requests whose ID is just too long for a page of an index."""
    make_ttft_spans(message, start)
    for number, span in enumerate(message.resource_spans[0].scope_spans[0].spans):
        pair = span.attributes.add()
        pair.key, pair.value.string_value = keys.REQUEST_ID, f"{start + number:08}" + "i" * 1000


def make_page_breakers(message: ExportTraceServiceRequest, start: int) -> None:
    """Attributes for which a table by its primary key alone takes two pages each."""
    scope = message.resource_spans.add().scope_spans.add()
    for number in range(start, start + SPANS):
        pair = add_span(scope, number, start).attributes.add()
        pair.key, pair.value.string_value = "k", "v" * 1000


def make_control_characters(message: ExportTraceServiceRequest, start: int) -> None:
    """Texts that JSON would store six times as long, plain and within a list."""
    scope = message.resource_spans.add().scope_spans.add()
    for number in range(start, start + SPANS):
        span = add_span(scope, number, start)
        pair = span.attributes.add()
        pair.key, pair.value.string_value = "plain", "\x01" * 400
        pair = span.attributes.add()
        pair.key = "list"
        pair.value.array_value.values.add().string_value = "\x01" * 400


HOSTILE = (
    make_one_span_traces,
    make_repeated_resource,
    make_many_scopes,
    make_ttft_spans,
    make_long_request_ids,
    make_page_breakers,
    make_control_characters,
)


@pytest.mark.parametrize("fill", HOSTILE)
def test_growth(tmp_path: Path, fill: Callable[[ExportTraceServiceRequest, int], None]) -> None:
    """The file grows by no more than five bytes for each byte received, whatever the spans look like."""
    store = SpanStore(tmp_path / "spans.db", max_traces=1_000_000)
    received = 0
    for export in range(EXPORTS):
        message = ExportTraceServiceRequest()
        fill(message, export * SPANS)
        data = message.SerializeToString()
        received += len(data)
        store.add_chunks(otlp_decoder.chunk_export(data).chunks).result(60)
    store.close()
    assert store.counts["stored"] == EXPORTS * SPANS
    stored = store.path.stat().st_size
    assert stored <= MAX_GROWTH * received + FIXED_BYTES, f"{stored / received:.1f} times"


def test_shared_rows_end(tmp_path: Path) -> None:
    """A resource is stored once, and goes with the last of its spans."""
    store = SpanStore(tmp_path / "spans.db", max_traces=3)
    for number in range(6):
        record = sample_records.make_short_record(request_id=f"r{number}")
        sample_records.store_records(store, [record])
    deadline = time.monotonic() + 20
    with closing(sqlite3.connect(store.path)) as db:

        def count(table: str) -> int:
            return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

        while count("chunks") > 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (count("chunks"), count("shared")) == (3, 2)  # a resource and a scope
        assert db.execute("SELECT sum(chunks) FROM shared").fetchone()[0] == 6
    store.close()


def watch_traces(path: Path, stop: threading.Event, sizes: list[int]) -> None:
    """Note how many traces a reader sees."""
    while not stop.is_set():
        with open_reader(path) as db:
            sizes.append(db.count_rows()["traces"])


def test_number_holds_always(tmp_path: Path) -> None:
    """No reader ever sees more than the traces to keep, though one export brings many times as many."""
    store = SpanStore(tmp_path / "spans.db", max_traces=100)
    message = ExportTraceServiceRequest()
    for part in range(3):
        make_one_span_traces(message, part * SPANS)
    spans = otlp_decoder.decode_export(message.SerializeToString()).spans
    assert len(spans) > span_store.MAX_TRANSACTION_SPANS
    stop, sizes = threading.Event(), list[int]()
    watcher = threading.Thread(target=watch_traces, args=(store.path, stop, sizes))
    watcher.start()
    assert store.add(spans).result(60) == 0
    stop.set()
    watcher.join()
    store.close()
    with open_reader(store.path) as db:
        assert db.count_rows() == {"traces": 100, "spans": 100, "requests": 0}
        assert db.find_trace(make_id(len(spans), 16).hex()), "the newest are left"
    assert max(sizes) <= 100
    assert store.counts["evicted_traces"] == len(spans) - 100


def test_age_holds_while_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too old goes although nothing else arrives, and its pages go back to the file system."""
    monkeypatch.setattr(span_store, "RETENTION_INTERVAL_S", 0.05)
    monkeypatch.setattr(retention, "MAX_PURGED_SPANS", 500)
    store = SpanStore(tmp_path / "spans.db", max_age_hours=1.5 / 3600)
    message = ExportTraceServiceRequest()
    make_page_breakers(message, 0)
    store.add(otlp_decoder.decode_export(message.SerializeToString()).spans).result(60)
    deadline = time.monotonic() + 30
    pages = 1
    with closing(sqlite3.connect(store.path)) as db:
        while time.monotonic() < deadline:
            left = db.execute("SELECT count(*) FROM chunks").fetchone()[0]
            pages = db.execute("PRAGMA page_count").fetchone()[0]
            if not left and pages < 50:
                break
            time.sleep(0.05)
    assert not left and pages < 50
    with open_reader(store.path) as reader:
        assert reader.count_rows() == {"traces": 0, "spans": 0, "requests": 0}
    assert store.counts["evicted_traces"] == 1 and store.last_error == ""
    store.close()


def test_lower_limit(tmp_path: Path) -> None:
    """A start with a lower limit of bytes removes the oldest traces, and the file never grows beyond it."""
    path = tmp_path / "spans.db"
    store = SpanStore(path)
    message = ExportTraceServiceRequest()
    for part in range(EXPORTS):
        make_one_span_traces(message, part * SPANS)
    chunks = otlp_decoder.chunk_export(message.SerializeToString()).chunks
    for start in range(0, EXPORTS * SPANS, 50):
        store.add_chunks(chunks[start : start + 50]).result(60)
    store.close()
    limit = path.stat().st_size // 2

    store = SpanStore(path, max_bytes=limit)
    assert path.stat().st_size <= limit
    removed = store.counts["evicted_traces"]
    assert 0 < removed < EXPORTS * SPANS
    with open_reader(path) as db:
        assert db.count_rows()["traces"] == EXPORTS * SPANS - removed
        # The newest are left.
        assert [
            bool(db.find_trace(make_id(number, 16).hex())) for number in (1, EXPORTS * SPANS)
        ] == [0, 1]
    for start in range(0, EXPORTS * SPANS, 50):
        store.add_chunks(chunks[start : start + 50]).result(60)
    store.close()
    assert path.stat().st_size <= limit
    assert store.counts["evicted_traces"] > removed


def test_pages_freed(tmp_path: Path) -> None:
    """One call gives back as many pages as it may, and the last one all that are left."""
    path = tmp_path / "spans.db"
    connection, _ = database_schema.open_for_writing(path, 1 << 30)
    with closing(connection):
        connection.execute("CREATE TABLE filler (content BLOB)")
        connection.executemany("INSERT INTO filler VALUES (?)", [(bytes(4000),)] * 900)
        connection.execute("DROP TABLE filler")
        free = []
        while retention.shrink_file(connection):
            free.append(connection.execute("PRAGMA freelist_count").fetchone()[0])
    assert len(free) == 2 and free[0] >= 900 - retention.MAX_FREED_PAGES - 1 and free[1] == 0


def test_many_requests_in_a_trace(tmp_path: Path) -> None:
    """A trace of thousands of requests takes no longer to assemble than its bound, and stays readable."""
    store = SpanStore(tmp_path / "spans.db")
    message = ExportTraceServiceRequest()
    make_ttft_spans(message, 0)
    for span in message.resource_spans[0].scope_spans[0].spans:
        span.trace_id = make_id(1, 16)
    store.add(otlp_decoder.decode_export(message.SerializeToString()).spans).result(60)
    store.close()
    with open_reader(store.path) as db:
        assert len(db.list_latest(RequestFilter(last=2000))) <= 1000
        trace = db.find_trace(make_id(1, 16).hex())
    assert trace is not None and len(trace.spans) == SPANS
