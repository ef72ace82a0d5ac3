# SPDX-License-Identifier: Apache-2.0
"""Rewrite a database of schema 1, 2 or 3 as schema 4, in the transaction of database_schema.py.

Schemas 1 and 2 had a row for each span; schema 1 repeated the resource in it. Schema 3 had the IDs of spans
and parents in the content of chunks. Requests are assembled again from the spans.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.store.request_rows import write_requests
from ttft_otel.report.store.span_chunks import (
    decode_content,
    decode_item,
    decode_shared,
    encode_spans,
    split_ids,
)
from ttft_otel.report.store.span_conversion import SERVICE_NAME, convert_span
from ttft_otel.report.store.span_rows import ChunkInserter

_SPAN_COLUMNS: Final = (
    "span_id, parent_id, name, kind, start_ns, end_ns, status, message, attributes, resource, scope, "
    "dropped"
)
_decode: Final = msgspec.msgpack.Decoder().decode


def set_old_tables_aside(connection: sqlite3.Connection) -> None:
    """Rename the old tables, so that those of today can be created."""
    # Names of indexes are unique in the file: the new tables need them. That of spans in schema 2 has none of
    # their names, and is what their traces are read by.
    for kind, name in connection.execute(
        "SELECT type, name FROM sqlite_master "
        "WHERE name NOT LIKE 'sqlite%' AND (type='table' OR tbl_name<>'spans') ORDER BY type"
    ).fetchall():
        connection.execute(
            f"DROP INDEX {name}" if kind == "index" else f"ALTER TABLE {name} RENAME TO old_{name}"
        )


def copy_old_spans(connection: sqlite3.Connection, version: int) -> None:
    """Copy all spans, in the order in which their traces arrived, and drop the old tables.

    version: schema of the old tables.
    """
    list_traces = {1: _list_traces_1, 2: _list_traces_2, 3: _list_traces_3}[version]
    # Trace by trace, so that memory is that of one trace and not of the database.
    for seen_ms, spans in list_traces(connection):
        # With the old time of arrival: an upgrade must not make old traces young.
        inserter = ChunkInserter(connection, seen_ms)
        inserter.insert_chunks(encode_spans(spans))
        write_requests(connection, inserter.list_touched())
    for (name,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type='table' AND name LIKE 'old\\_%' ESCAPE '\\'"
    ).fetchall():
        connection.execute(f"DROP TABLE {name}")


def _list_traces_1(connection: sqlite3.Connection) -> Iterator[tuple[int, list[StoredSpan]]]:
    """Time of arrival, in Unix milliseconds, and spans of each trace of schema 1."""
    traces = connection.execute("SELECT trace_id, seen_ns FROM old_traces ORDER BY seen_ns")
    for trace_id, seen_ns in traces.fetchall():
        rows = connection.execute(
            f"SELECT {_SPAN_COLUMNS}, service FROM old_spans WHERE trace_id=?", (trace_id,)
        )
        # One dict for equal ones: encode_spans() puts spans of one resource together by its identity.
        resources: dict[str, dict[str, Any]] = {}
        spans = []
        for row in rows:
            if row[9] not in resources:
                resources[row[9]] = json.loads(row[9])
            resource = resources[row[9]]
            spans.append(_build_span(trace_id, row, json.loads(row[8]), resource, row[10], row[12]))
        yield seen_ns // 1_000_000, spans
        # So that the new rows take their pages.
        connection.execute("DELETE FROM old_spans WHERE trace_id=?", (trace_id,))


def _list_traces_2(connection: sqlite3.Connection) -> Iterator[tuple[int, list[StoredSpan]]]:
    """The same of schema 2, where IDs are bytes, and what spans share is in rows of its own."""
    shared = _load_shared(connection)
    for number, trace_id, seen_ms in _list_numbered_traces(connection):
        rows = connection.execute(f"SELECT {_SPAN_COLUMNS} FROM old_spans WHERE trace=?", (number,))
        spans = []
        for row in rows:
            resource, attributes = shared[row[9]], _decode(row[8]) if row[8] else {}
            ids = row[0].hex(), row[1].hex()
            service = str(resource.get(SERVICE_NAME, ""))
            spans.append(
                _build_span(
                    trace_id.hex(), (*ids, *row[2:]), attributes, resource, shared[row[10]], service
                )
            )
        yield seen_ms, spans
        connection.execute("DELETE FROM old_spans WHERE trace=?", (number,))


def _list_traces_3(connection: sqlite3.Connection) -> Iterator[tuple[int, list[StoredSpan]]]:
    """The same of schema 3, where IDs were in the content of chunks."""
    shared = _load_shared(connection)
    connection.execute("CREATE INDEX old_chunks_trace ON old_chunks (trace)")
    for number, trace_id, seen_ms in _list_numbered_traces(connection):
        rows = connection.execute(
            "SELECT span_ids, content, resource, scope FROM old_chunks WHERE trace=?", (number,)
        )
        yield (
            seen_ms,
            [
                _decode_item_3(item, trace_id, span_id, shared[resource], shared[scope])
                for span_ids, content, resource, scope in rows
                for span_id, item in zip(split_ids(span_ids), decode_content(content), strict=True)
            ],
        )
        connection.execute("DELETE FROM old_chunks WHERE trace=?", (number,))


def _decode_item_3(
    item: Any, trace_id: bytes, span_id: bytes, resource: dict[str, Any], scope: str
) -> StoredSpan:
    if isinstance(item, bytes):
        return convert_span(Span.FromString(item), resource, scope)
    parent_id, *values = item
    return decode_item(values, (trace_id, span_id, parent_id), resource, scope)


def _load_shared(connection: sqlite3.Connection) -> dict[int, Any]:
    """Resources and scopes of schema 2 and 3, by their numbers."""
    rows = connection.execute("SELECT id, content FROM old_shared")
    return {number: decode_shared(content) for number, content in rows}


def _list_numbered_traces(connection: sqlite3.Connection) -> list[tuple[int, bytes, int]]:
    """Number, ID and time of arrival of the traces of schema 2 and 3."""
    traces = connection.execute("SELECT id, trace_id, seen_ms FROM old_traces ORDER BY id")
    return traces.fetchall()


def _build_span(
    trace_id: str,
    row: tuple[Any, ...],
    attributes: dict[str, Any],
    resource: dict[str, Any],
    scope: str,
    service: str,
) -> StoredSpan:
    """row: of _SPAN_COLUMNS, its IDs in hex; the other arguments are what it has encoded."""
    span_id, parent_id, name, kind, start_ns, end_ns, status, message = row[:8]
    return StoredSpan(
        *(
            trace_id,
            span_id,
            parent_id,
            name,
            kind,
            start_ns,
            end_ns,
            service,
            scope,
            status,
            message,
        ),
        attributes,
        resource,
        row[11],
    )
