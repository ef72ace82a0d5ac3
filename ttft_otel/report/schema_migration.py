# SPDX-License-Identifier: Apache-2.0
"""Rewrite a database of schema 1 as schema 2, in the transaction of database_schema.py.

Schema 1 repeated the resource in every span. Requests are assembled again from the spans.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Final

from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.request_rows import write_requests
from ttft_otel.report.span_rows import SpanInserter, encode_spans

_OLD_TABLES: Final = ("traces", "spans", "requests")
_OLD_INDEXES: Final = ("traces_seen", "requests_start", "requests_id")
_OLD_COLUMNS: Final = (
    "span_id, parent_id, name, kind, start_ns, end_ns, service, scope, status, message, attributes, "
    "resource, dropped"
)


def set_old_tables_aside(connection: sqlite3.Connection) -> None:
    """Rename the tables of schema 1, so that those of schema 2 can be created."""
    for index in _OLD_INDEXES:
        # Names of indexes are unique in the file: the new tables need them.
        connection.execute(f"DROP INDEX {index}")
    for table in _OLD_TABLES:
        connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")


def copy_old_spans(connection: sqlite3.Connection) -> None:
    """Copy all spans, in the order in which their traces arrived, and drop the old tables."""
    traces = connection.execute("SELECT trace_id, seen_ns FROM old_traces ORDER BY seen_ns")
    for trace_id, seen_ns in traces.fetchall():
        # Trace by trace, so that memory is that of one trace and not of the database.
        rows = connection.execute(
            f"SELECT {_OLD_COLUMNS} FROM old_spans WHERE trace_id=?", (trace_id,)
        )
        values = ((*row[:10], json.loads(row[10]), json.loads(row[11]), row[12]) for row in rows)
        spans = [StoredSpan(trace_id, *each) for each in values]
        # With the old time of arrival: an upgrade must not make old traces young.
        inserter = SpanInserter(connection, seen_ns // 1_000_000)
        for row in encode_spans(spans):
            inserter.insert_row(row)
        inserter.finish()
        write_requests(connection, inserter.touched)
    for table in _OLD_TABLES:
        connection.execute(f"DROP TABLE old_{table}")
