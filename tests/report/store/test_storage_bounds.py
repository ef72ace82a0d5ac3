# SPDX-License-Identifier: Apache-2.0
"""Limits of what a sender can make the database hold: bytes for each byte received, traces, age."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from sample_records import make_short_record, store_records

from ttft_otel.model.names import keys, span_names
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.store import database_schema, span_store
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.report.store.span_store import SpanStore

MAX_GROWTH = 5  # bytes of the file for each byte received
EXPORTS = 4
SPANS = 2000
FIXED_BYTES = 128 << 10  # of an empty database, and of pages that are not full yet


def make_id(number: int, size: int) -> bytes:
    """An ID that does not follow its predecessor in an index."""
    return (number * 0x9E3779B97F4A7C15 % (1 << 8 * size) or 1).to_bytes(size, "big")


# Attributes for which a table by its primary key alone takes two pages each.
PAGE_BREAKERS = {"is_one_trace": True, "k": "v" * 1000}


TTFT = {"scope": span_names.SCOPE, "name": span_names.TTFT, keys.TOTAL_US: 1}


def make_export(
    start: int = 0,
    count: int = SPANS,
    is_one_trace: bool = False,
    resource: dict[str, Any] | None = None,
    scope: str = "",
    name: str = "",
    **attributes: Any,
) -> bytes:
    """The smallest spans from number `start` on, each a trace of its own or all in one.

    scope: with {} in it each span has its own.
    """
    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    set_values(group.resource.attributes, resource or {}, start)
    for number in range(start, start + count):
        if number == start or "{}" in scope:
            spans = group.scope_spans.add()
            spans.scope.name = scope.format(number)
        trace = start if is_one_trace else number
        span = spans.spans.add(
            trace_id=make_id(trace + 1, 16), span_id=make_id(number + 1, 8), name=name
        )
        set_values(span.attributes, attributes, number)
    return message.SerializeToString()


def set_values(pairs: Any, values: dict[str, Any], number: int) -> None:
    """Attributes; in a text {} becomes the number of the span."""
    for key, value in values.items():
        place = pairs.add(key=key).value
        if isinstance(value, int):
            place.int_value = value
        elif isinstance(value, list):
            place.array_value.values.add().string_value = value[0]
        else:
            place.string_value = value.format(number)


HOSTILE: dict[str, dict[str, Any]] = {
    "the largest share of what is not in the span": {},
    "one large resource and scope name": {
        "is_one_trace": True,
        "resource": {f"text{number}": "r" * 4096 for number in range(12)},
        "scope": "s" * 4096,
    },
    "many scopes of one span": {
        "is_one_trace": True,
        "resource": {"service.name": "r" * 4096},
        "scope": "scope {}",
    },
    "the shortest requests": TTFT,
    "request IDs just too long for a page of an index": {
        **TTFT,
        keys.REQUEST_ID: "{:08}" + "i" * 1000,
    },
    "page breakers": PAGE_BREAKERS,
    "texts that JSON would store six times as long": {
        "is_one_trace": True,
        "plain": "\x01" * 400,
        "list": ["\x01" * 400],
    },
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_growth(tmp_path: Path, kind: str) -> None:
    """The file grows by no more than five bytes for each byte received, whatever the spans look like."""
    store = SpanStore(tmp_path / "spans.db", max_traces=1_000_000)
    received = 0
    for export in range(EXPORTS):
        data = make_export(export * SPANS, **HOSTILE[kind])
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
        record = make_short_record(request_id=f"r{number}")
        store_records(store, [record])
    deadline = time.monotonic() + 20
    with closing(sqlite3.connect(store.path)) as db:

        def count(table: str) -> int:
            return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

        while count("chunks") > 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (count("chunks"), count("shared")) == (3, 2)  # a resource and a scope
        assert db.execute("SELECT sum(chunks) FROM shared").fetchone()[0] == 6
    store.close()


def test_number_holds_always(tmp_path: Path) -> None:
    """No reader ever sees more than the traces to keep, though one export brings many times as many."""
    store = SpanStore(tmp_path / "spans.db", max_traces=100)
    spans = otlp_decoder.decode_export(make_export(count=3 * SPANS)).spans
    assert len(spans) > span_store.MAX_TRANSACTION_SPANS
    stop, sizes = threading.Event(), list[int]()

    def watch() -> None:
        while not stop.is_set():
            with open_reader(store.path) as db:
                sizes.append(db.count_rows()["traces"])

    watcher = threading.Thread(target=watch)
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
    monkeypatch.setattr(database_schema, "MAX_PURGED_SPANS", 500)
    store = SpanStore(tmp_path / "spans.db", max_age_hours=1.5 / 3600)
    store.add_chunks(otlp_decoder.chunk_export(make_export(**PAGE_BREAKERS)).chunks).result(60)
    deadline = time.monotonic() + 30
    left = pages = SPANS
    with closing(sqlite3.connect(store.path)) as db:
        while (left or pages >= 50) and time.monotonic() < deadline:
            time.sleep(0.05)
            left = db.execute("SELECT count(*) FROM chunks").fetchone()[0]
            pages = db.execute("PRAGMA page_count").fetchone()[0]
    assert not left and pages < 50
    with open_reader(store.path) as reader:
        assert reader.count_rows() == {"traces": 0, "spans": 0, "requests": 0}
    assert store.counts["evicted_traces"] == 1 and store.last_error == ""
    store.close()


def test_lower_limit(tmp_path: Path) -> None:
    """A start with a lower limit of bytes removes the oldest traces, and the file never grows beyond it."""
    path, count = tmp_path / "spans.db", EXPORTS * SPANS
    chunks = otlp_decoder.chunk_export(make_export(count=count)).chunks

    def write(store: SpanStore) -> int:
        for start in range(0, count, 50):
            store.add_chunks(chunks[start : start + 50]).result(60)
        store.close()
        return path.stat().st_size

    limit = write(SpanStore(path)) // 2
    store = SpanStore(path, max_bytes=limit)
    assert path.stat().st_size <= limit
    removed = store.counts["evicted_traces"]
    assert 0 < removed < count
    with open_reader(path) as db:
        assert db.count_rows()["traces"] == count - removed
        # The newest are left.
        assert [bool(db.find_trace(make_id(each, 16).hex())) for each in (1, count)] == [0, 1]
    assert write(store) <= limit
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
        while database_schema.shrink_file(connection):
            free.append(connection.execute("PRAGMA freelist_count").fetchone()[0])
    assert len(free) == 2 and free[0] >= 900 - database_schema.MAX_FREED_PAGES - 1 and free[1] == 0


def test_many_requests_in_a_trace(store: SpanStore) -> None:
    """A trace of thousands of requests takes no longer to assemble than its bound, and stays readable."""
    data = make_export(is_one_trace=True, **TTFT)
    store.add_chunks(otlp_decoder.chunk_export(data).chunks).result(60)
    with open_reader(store.path) as db:
        assert len(db.list_latest(RequestFilter(last=2000))) <= 1000
        trace = db.find_trace(make_id(1, 16).hex())
    assert trace is not None and len(trace.spans) == SPANS
