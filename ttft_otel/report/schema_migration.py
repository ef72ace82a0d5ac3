# SPDX-License-Identifier: Apache-2.0
"""Rewrite a database of schema 1 or 2 as schema 3, in the transaction of database_schema.py.

Both had a row for each span; schema 1 repeated the resource in it. Requests are assembled again from the
spans.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.request_rows import write_requests
from ttft_otel.report.span_chunks import encode_spans
from ttft_otel.report.span_conversion import SERVICE_NAME
from ttft_otel.report.span_rows import ChunkInserter

_SPAN_COLUMNS: Final = (
    "span_id, parent_id, name, kind, start_ns, end_ns, status, message, attributes, resource, scope, "
    "dropped"
)
_decode: Final = msgspec.msgpack.Decoder().decode


def set_old_tables_aside(connection: sqlite3.Connection) -> None:
    """Rename the old tables, so that those of today can be created."""
    # Names of indexes are unique in the file: the new tables need them. That of spans has none of their
    # names, and is what their traces are read by.
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
    list_traces = _list_traces_1 if version == 1 else _list_traces_2
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
        spans = [
            _build_span(trace_id, row, json.loads(row[8]), json.loads(row[9]), row[10], row[12])
            for row in rows
        ]
        yield seen_ns // 1_000_000, spans


def _list_traces_2(connection: sqlite3.Connection) -> Iterator[tuple[int, list[StoredSpan]]]:
    """The same of schema 2, where IDs are bytes, and what spans share is in rows of its own."""
    shared = {
        number: _decode(content)
        for number, content in connection.execute("SELECT id, content FROM old_shared")
    }
    traces = connection.execute("SELECT id, trace_id, seen_ms FROM old_traces ORDER BY id")
    for number, trace_id, seen_ms in traces.fetchall():
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
