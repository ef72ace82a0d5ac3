# SPDX-License-Identifier: Apache-2.0
"""Databases of older releases are rewritten when `serve` opens them; nothing in them is lost."""

from __future__ import annotations

import json
import resource
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sample_records
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.store import database_schema
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.report.store.span_store import SpanStore

SCHEMA_1 = """
CREATE TABLE traces (
  trace_id TEXT PRIMARY KEY, seen_ns INTEGER NOT NULL, spans INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX traces_seen ON traces (seen_ns);
CREATE TABLE spans (
  trace_id TEXT NOT NULL, span_id TEXT NOT NULL, parent_id TEXT NOT NULL, name TEXT NOT NULL,
  kind INTEGER NOT NULL, start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL,
  service TEXT NOT NULL, scope TEXT NOT NULL, status INTEGER NOT NULL, message TEXT NOT NULL,
  attributes TEXT NOT NULL, resource TEXT NOT NULL, dropped INTEGER NOT NULL,
  trunk INTEGER NOT NULL,
  PRIMARY KEY (trace_id, span_id)
) WITHOUT ROWID;
CREATE TABLE requests (
  trace_id TEXT NOT NULL, number INTEGER NOT NULL, request_id TEXT NOT NULL,
  start_ns INTEGER NOT NULL, model TEXT NOT NULL, roles TEXT NOT NULL,
  ttft_us INTEGER NOT NULL, error TEXT NOT NULL, pending INTEGER NOT NULL,
  PRIMARY KEY (trace_id, number)
) WITHOUT ROWID;
CREATE INDEX requests_start ON requests (start_ns);
CREATE INDEX requests_id ON requests (request_id);
PRAGMA user_version=1;
"""


def write_schema_1(path: Path, spans: list[StoredSpan]) -> None:
    """A database as the first release wrote it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript(SCHEMA_1)
        for span in spans:
            db.execute(
                "INSERT OR IGNORE INTO traces VALUES (?, ?, 4)", (span.trace_id, time.time_ns())
            )
            db.execute(
                "INSERT INTO spans VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    *(span.trace_id, span.span_id, span.parent_id, span.name, span.kind),
                    *(span.start_ns, span.end_ns, span.service, span.scope, span.status),
                    *(span.message, json.dumps(span.attributes), json.dumps(span.resource)),
                    *(span.dropped, int(span.is_ttft_span)),
                ),
            )


# Of schemas 2 and 3.
REQUESTS = """
CREATE TABLE requests (
  id INTEGER PRIMARY KEY, trace INTEGER NOT NULL, number INTEGER NOT NULL,
  request_id TEXT NOT NULL, start_ns INTEGER NOT NULL, model TEXT NOT NULL, roles TEXT NOT NULL,
  ttft_us INTEGER NOT NULL, error TEXT NOT NULL, pending INTEGER NOT NULL
);
CREATE INDEX requests_trace ON requests (trace);
CREATE INDEX requests_start ON requests (start_ns);
CREATE INDEX requests_id ON requests (request_id) WHERE request_id<>'';
"""

SCHEMA_2 = f"""{REQUESTS}
CREATE TABLE traces (
  id INTEGER PRIMARY KEY AUTOINCREMENT, trace_id BLOB NOT NULL UNIQUE,
  seen_ms INTEGER NOT NULL, spans INTEGER NOT NULL
);
CREATE TABLE shared (
  id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, content BLOB NOT NULL,
  spans INTEGER NOT NULL
);
CREATE TABLE spans (
  id INTEGER PRIMARY KEY, trace INTEGER NOT NULL, span_id BLOB NOT NULL, parent_id BLOB NOT NULL,
  name TEXT NOT NULL, kind INTEGER NOT NULL, start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL,
  status INTEGER NOT NULL, message TEXT NOT NULL, attributes BLOB NOT NULL,
  resource INTEGER NOT NULL, scope INTEGER NOT NULL, dropped INTEGER NOT NULL,
  trunk INTEGER NOT NULL
);
CREATE UNIQUE INDEX spans_trace ON spans (trace, span_id);
PRAGMA user_version=2;
"""


def write_schema_2(path: Path, spans: list[StoredSpan]) -> None:
    """A database as releases wrote it that stored what spans share once."""
    encode = msgspec.msgpack.Encoder().encode
    now_ms = time.time_ns() // 1_000_000
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript(SCHEMA_2)

        def find(table: str, column: str, value: bytes, others: tuple[object, ...]) -> int:
            """The number of a row, which is added if it is missing."""
            db.execute(
                f"INSERT OR IGNORE INTO {table} VALUES (NULL, ?, {','.join('?' * len(others))})",
                (value, *others),
            )
            row = db.execute(f"SELECT id FROM {table} WHERE {column}=?", (value,)).fetchone()
            return int(row[0])

        for span in spans:
            trace = find("traces", "trace_id", bytes.fromhex(span.trace_id), (now_ms, 4))
            resource, scope = encode(span.resource), encode(span.scope)
            shared = [find("shared", "digest", each, (each, 1)) for each in (resource, scope)]
            attributes = encode(span.attributes) if span.attributes else b""
            db.execute(
                "INSERT INTO spans VALUES (NULL,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    *(trace, bytes.fromhex(span.span_id), bytes.fromhex(span.parent_id)),
                    *(span.name, span.kind, span.start_ns, span.end_ns, span.status),
                    *(span.message, attributes, *shared, span.dropped, int(span.is_ttft_span)),
                ),
            )


SCHEMA_3 = f"""{REQUESTS}
CREATE TABLE traces (
  id INTEGER PRIMARY KEY AUTOINCREMENT, trace_id BLOB NOT NULL UNIQUE,
  seen_ms INTEGER NOT NULL, spans INTEGER NOT NULL, trunks INTEGER NOT NULL
);
CREATE TABLE shared (
  id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, content BLOB NOT NULL,
  chunks INTEGER NOT NULL
);
CREATE TABLE chunks (
  id INTEGER PRIMARY KEY, trace INTEGER NOT NULL, resource INTEGER NOT NULL,
  scope INTEGER NOT NULL, spans INTEGER NOT NULL, trunks INTEGER NOT NULL,
  span_ids BLOB NOT NULL, content BLOB NOT NULL
);
CREATE INDEX chunks_trace ON chunks (trace);
PRAGMA user_version=3;
"""


def write_schema_3(path: Path, spans: list[StoredSpan]) -> None:
    """A database as releases wrote it that had all IDs in the content: spans in OTLP's bytes, and lists."""
    encode = msgspec.msgpack.Encoder().encode
    now_ms = time.time_ns() // 1_000_000
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript(SCHEMA_3)
        shared: dict[bytes, int] = {}
        traces: dict[str, int] = {}
        for number, span in enumerate(spans):
            trace = traces.setdefault(span.trace_id, len(traces) + 1)
            for each in (encode(span.resource), encode(span.scope)):
                shared.setdefault(each, len(shared) + 1)
            parent = bytes.fromhex(span.parent_id)
            # As it came, except for the values of large ones.
            item = encode_raw_span(span)
            if number % 2:
                item = (
                    *(parent, span.name, span.kind, span.start_ns, span.end_ns, span.status),
                    *(span.message, span.attributes, span.dropped),
                )
            db.execute(
                "INSERT INTO chunks VALUES (NULL,?,?,?,1,?,?,?)",
                (
                    *(trace, shared[encode(span.resource)], shared[encode(span.scope)]),
                    *(int(span.is_ttft_span), bytes.fromhex(span.span_id), encode([item])),
                ),
            )
        db.executemany(
            "INSERT INTO shared VALUES (?,?,?,1)",
            [(number, content, content) for content, number in shared.items()],
        )
        db.executemany(
            "INSERT INTO traces VALUES (?,?,?,4,1)",
            [(number, bytes.fromhex(name), now_ms) for name, number in traces.items()],
        )


def encode_raw_span(span: StoredSpan) -> Any:
    """OTLP's bytes of a span."""
    raw = Span(name=span.name, kind=span.kind, dropped_attributes_count=span.dropped)  # type: ignore[arg-type]
    raw.trace_id, raw.span_id = bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id)
    raw.parent_span_id = bytes.fromhex(span.parent_id)
    raw.start_time_unix_nano, raw.end_time_unix_nano = span.start_ns, span.end_ns
    raw.status.code, raw.status.message = span.status, span.message  # type: ignore[assignment]
    for key, value in span.attributes.items():
        kind = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
        setattr(raw.attributes.add(key=key).value, kind[type(value)], value)
    return raw.SerializeToString()


WRITERS = (write_schema_1, write_schema_2, write_schema_3)


def make_spans_of_two() -> list[StoredSpan]:
    """All spans of two requests through router and servers."""
    return sample_records.make_stored_spans(
        [*sample_records.make_routed_records("r1"), *sample_records.make_routed_records("r2")]
    )


@pytest.mark.parametrize("write_database", WRITERS)
def test_old_schema(
    tmp_path: Path, write_database: Callable[[Path, list[StoredSpan]], None]
) -> None:
    """An old database is rewritten when `serve` opens it; nothing in it is lost."""
    path = tmp_path / "spans.db"
    spans = make_spans_of_two()
    write_database(path, spans)
    with (
        pytest.raises(database_schema.StoreError, match="start `ttft-otel serve` once"),
        open_reader(path),
    ):
        pass
    connection, _ = database_schema.open_for_writing(path, 1 << 30)
    with closing(connection):
        assert Path(f"{path}-wal").stat().st_size == 0, "the log of the rewriting is left"
    store = SpanStore(path)
    store.add(spans).result(10)
    store.close()
    assert store.counts == {"duplicate": len(spans), "evicted_traces": 0}
    with open_reader(path) as db:
        found = [db.find_trace(trace_id) for trace_id in dict.fromkeys(s.trace_id for s in spans)]
        assert {each.request_id for each in db.list_latest(RequestFilter())} == {"r1", "r2"}
        assert db.count_rows() == {"traces": 2, "spans": len(spans), "requests": 2}
    kept = {span.span_id: span for trace in found if trace for span in trace.spans}
    assert kept == {span.span_id: span for span in spans}
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE name LIKE 'old%'")
        assert tables.fetchall() == []
        # Spans of one trace, resource and scope are one row, however they were stored.
        groups = {(span.trace_id, str(span.resource), span.scope) for span in spans}
        chunks = connection.execute("SELECT count(*) FROM chunks").fetchone()[0]
        assert chunks == len(groups)


@pytest.mark.parametrize("write_database", WRITERS)
def test_full_disk(
    tmp_path: Path, write_database: Callable[[Path, list[StoredSpan]], None]
) -> None:
    """Without room to rewrite an old database it stays as it was, and the error says what is missing."""
    path = tmp_path / "spans.db"
    spans = make_spans_of_two()
    write_database(path, spans)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size // 2, hard))
    try:
        with pytest.raises(database_schema.StoreError, match="disk I/O error; nothing in it has"):
            SpanStore(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store = SpanStore(path)
    store.add(spans).result(10)
    store.close()
    assert store.counts["duplicate"] == len(spans)
