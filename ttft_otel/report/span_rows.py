# SPDX-License-Identifier: Apache-2.0
"""Spans as rows of the database: span_store.py encodes and inserts them, database_reader.py reads them.

What many spans repeat (resource, scope name) is one row of the table `shared`, which counts the spans that
refer to it and goes with the last of them.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from ttft_otel.report.report_types import StoredSpan

MAX_TRACE_SPANS: Final = 20_000  # spans of one trace; more are refused and counted
MAX_TRACE_TRUNKS: Final = 1000  # `ttft` and `encode` spans of one trace that are read
SPAN_COLUMNS: Final = (
    "span_id, parent_id, name, kind, start_ns, end_ns, status, message, attributes, dropped"
)
SERVICE_NAME: Final = "service.name"  # OpenTelemetry's name
_DIGEST_BYTES: Final = 16
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode
_EMPTY: Final = _encode({})


class SpanRow(NamedTuple):
    """One span. values: of SPAN_COLUMNS after `span_id`. resource, scope: contents of shared rows."""

    trace_id: bytes
    span_id: bytes
    values: tuple[object, ...]
    trunk: int
    resource: bytes
    scope: bytes


def encode_spans(spans: Iterable[StoredSpan]) -> list[SpanRow]:
    """Encode spans. A resource that several of them share is encoded once."""
    # Identity is safe: the spans keep the dicts alive for as long as this runs.
    resources: dict[int, bytes] = {}  # by the identity of the decoder's dict
    rows = []
    for span in spans:
        resource = resources.get(id(span.resource))
        if resource is None:
            resource = resources[id(span.resource)] = _encode(span.resource)
        rows.append(
            SpanRow(
                bytes.fromhex(span.trace_id),
                bytes.fromhex(span.span_id),
                (
                    *(bytes.fromhex(span.parent_id), span.name, span.kind),
                    *(span.start_ns, span.end_ns, span.status, span.message),
                    *(_encode(span.attributes) if span.attributes else b"", span.dropped),
                ),
                int(span.is_ttft_span),
                resource,
                _encode(span.scope),
            )
        )
    return rows


def select_spans(
    connection: sqlite3.Connection,
    trace: int,
    trace_id: str,
    conditions: str = "",
    values: Sequence[object] = (),
    limit: int = MAX_TRACE_SPANS,
) -> list[StoredSpan]:
    """A trace's spans in time order.

    trace: its number in the table `traces`. trace_id: in hex. conditions: further SQL conditions
    ("AND ..."), with `values` for their placeholders.
    """
    shared: dict[int, Any] = {}

    def load_shared(number: int) -> Any:
        if number not in shared:
            row = connection.execute("SELECT content FROM shared WHERE id=?", (number,)).fetchone()
            shared[number] = _decode(row[0])
        return shared[number]

    rows = connection.execute(
        f"SELECT {SPAN_COLUMNS}, resource, scope FROM spans WHERE trace=? {conditions} "
        # Of spans that begin together the longer one is the parent.
        "ORDER BY start_ns, end_ns DESC LIMIT ?",
        (trace, *values, limit),
    ).fetchall()
    spans = []
    for row in rows:
        resource = load_shared(row[10])
        spans.append(
            StoredSpan(
                trace_id=trace_id,
                span_id=row[0].hex(),
                parent_id=row[1].hex(),
                name=row[2],
                kind=row[3],
                start_ns=row[4],
                end_ns=row[5],
                service=str(resource.get(SERVICE_NAME, "")),
                scope=load_shared(row[11]),
                status=row[6],
                message=row[7],
                attributes=_decode(row[8] or _EMPTY),
                resource=resource,
                dropped=row[9],
            )
        )
    return spans


def select_trunks(connection: sqlite3.Connection, trace: int, trace_id: str) -> list[StoredSpan]:
    """The first MAX_TRACE_TRUNKS `ttft` and `encode` spans of a trace, of which requests are made."""
    return select_spans(connection, trace, trace_id, "AND trunk=1", limit=MAX_TRACE_TRUNKS)


def select_parents(connection: sqlite3.Connection, trace: int) -> dict[str, str]:
    """Parent ID by span ID of all spans of a trace, in hex."""
    rows = connection.execute("SELECT span_id, parent_id FROM spans WHERE trace=?", (trace,))
    return {span_id.hex(): parent_id.hex() for span_id, parent_id in rows}


class SpanInserter:
    """Inserts rows within one transaction of the caller; `finish` writes the counts before its COMMIT.

    touched: number of each trace that has got a span, by trace ID.
    """

    def __init__(self, connection: sqlite3.Connection, seen_ms: int) -> None:
        self._run, self._run_many = connection.execute, connection.executemany
        self._seen_ms = seen_ms
        self.touched: dict[bytes, int] = {}
        self._sizes: dict[int, int] = {}  # spans by trace number
        self._shared: dict[bytes, int] = {}
        self._references: Counter[int] = Counter()

    def insert_row(self, row: SpanRow) -> Literal["stored", "duplicate", "refused"]:
        """Insert one span; "refused": its trace is full."""
        trace = self._find_trace(row.trace_id)
        if trace:
            # A client that reuses one trace ID would else make it grow without end.
            if self._sizes[trace] >= MAX_TRACE_SPANS:
                return "refused"
            known = self._run("SELECT 1 FROM spans WHERE trace=? AND span_id=?", (trace, row[1]))
            # Exporters retry what they got no answer for, although it may be stored.
            if known.fetchone():
                return "duplicate"
        else:
            trace = self._add_trace(row.trace_id)
        self._sizes[trace] += 1
        self.touched[row.trace_id] = trace
        shared = (self._find_shared(row.resource), self._find_shared(row.scope))
        # Written once by finish(), not with each span.
        self._references.update(shared)
        self._run(
            f"INSERT INTO spans (trace, {SPAN_COLUMNS}, trunk, resource, scope) "
            "VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (trace, row.span_id, *row.values, row.trunk, *shared),
        )
        return "stored"

    def finish(self) -> None:
        """Write the number of spans of each trace, and of those that refer to each shared row."""
        self._run_many(
            "UPDATE traces SET spans=? WHERE id=?",
            [(self._sizes[trace], trace) for trace in self.touched.values()],
        )
        self._run_many(
            "UPDATE shared SET spans=spans+? WHERE id=?",
            [(count, number) for number, count in self._references.items()],
        )

    def _find_trace(self, trace_id: bytes) -> int:
        if trace_id in self.touched:
            return self.touched[trace_id]
        found = self._run("SELECT id, spans FROM traces WHERE trace_id=?", (trace_id,)).fetchone()
        if found is None:
            return 0
        self._sizes.setdefault(found[0], found[1])
        return int(found[0])

    def _add_trace(self, trace_id: bytes) -> int:
        added = self._run(
            "INSERT INTO traces (trace_id, seen_ms, spans) VALUES (?,?,0)",
            (trace_id, self._seen_ms),
        )
        assert added.lastrowid
        self._sizes[added.lastrowid] = 0
        return added.lastrowid

    def _find_shared(self, content: bytes) -> int:
        number = self._shared.get(content)
        if number is None:
            # Found by digest: an index over whole resources would take a page for each.
            digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
            found = self._run("SELECT id FROM shared WHERE digest=?", (digest,)).fetchone()
            if found is None:
                added = self._run(
                    "INSERT INTO shared (digest, content, spans) VALUES (?,?,0)", (digest, content)
                )
                assert added.lastrowid
                number = added.lastrowid
            else:
                number = int(found[0])
            self._shared[content] = number
        return number
