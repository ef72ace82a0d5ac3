# SPDX-License-Identifier: Apache-2.0
"""Chunks of spans as rows of the database: span_store.py inserts them, database_reader.py reads them.

What many chunks repeat (resource, scope name) is one row of the table `shared`, which counts the chunks that
refer to it and goes with the last of them.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.span_chunks import (
    SpanChunk,
    StoredChunk,
    decode_shared,
    list_span_ids,
    select_places,
)

MAX_TRACE_SPANS: Final = 20_000  # spans of one trace; more are refused and counted
MAX_TRACE_TRUNKS: Final = 1000  # `ttft` and `encode` spans of one trace that are read
MAX_SQL_VARIABLES: Final = 500  # of one SQL statement; all SQLite versions allow 999
_DIGEST_BYTES: Final = 16


class TraceReader:
    """The stored spans of one trace.

    trace: its number in the table `traces`. trace_id: in hex.
    """

    def __init__(self, connection: sqlite3.Connection, trace: int, trace_id: str) -> None:
        self._connection = connection
        self._shared: dict[int, Any] = {}
        rows = connection.execute(
            "SELECT trunks, span_ids, content, resource, scope FROM chunks WHERE trace=?", (trace,)
        ).fetchall()
        self._chunks = [
            (trunks, StoredChunk(trace_id, span_ids, content, *map(self._load_shared, numbers)))
            for trunks, span_ids, content, *numbers in rows
        ]

    def _load_shared(self, number: int) -> Any:
        # Once: a trace may have thousands of chunks with one large resource.
        if number not in self._shared:
            row = self._connection.execute("SELECT content FROM shared WHERE id=?", (number,))
            self._shared[number] = decode_shared(row.fetchone()[0])
        return self._shared[number]

    def list_spans(self, wanted: Collection[bytes] | None = None) -> list[StoredSpan]:
        """Its spans in time order, all or those with the `wanted` IDs."""
        spans = [
            chunk.decode_span(place)
            for _, chunk in self._chunks
            for place, span_id in enumerate(chunk.span_ids)
            if wanted is None or span_id in wanted
        ]
        return sort_spans(spans)

    def list_trunks(self) -> list[StoredSpan]:
        """The first MAX_TRACE_TRUNKS `ttft` and `encode` spans, of which requests are made."""
        spans = [
            chunk.decode_span(place) for trunks, chunk in self._chunks for place in range(trunks)
        ]
        return sort_spans(spans)[:MAX_TRACE_TRUNKS]

    def list_parents(self) -> dict[str, str]:
        """Parent ID by span ID of all its spans, in hex."""
        return {
            span_id.hex(): chunk.find_parent(place).hex()
            for _, chunk in self._chunks
            for place, span_id in enumerate(chunk.span_ids)
        }


def sort_spans(spans: Iterable[StoredSpan]) -> list[StoredSpan]:
    """In time order; of spans that begin together the longer one is the parent."""
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id))


class InsertOutcome(NamedTuple):
    """What became of the spans of one chunk; "refused": their trace is full."""

    stored: int
    duplicate: int
    refused: int


@dataclass(slots=True)
class TouchedTrace:
    """A trace that has got spans in this transaction.

    number: in the table `traces`. spans, old_trunks: how many it has, and had before. new_trunks: those that
    it has got. known: IDs of its spans.
    """

    number: int
    spans: int = 0
    old_trunks: int = 0
    is_new: bool = True
    has_got_spans: bool = False
    new_trunks: list[StoredSpan] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)


class ChunkInserter:
    """Inserts chunks within one transaction of the caller."""

    def __init__(self, connection: sqlite3.Connection, seen_ms: int) -> None:
        """seen_ms: time of arrival, Unix milliseconds."""
        self._connection = connection
        self._seen_ms = seen_ms
        self._shared: dict[bytes, int] = {}
        self._references: Counter[int] = Counter()
        self._traces: dict[bytes, TouchedTrace] = {}

    def insert_chunks(self, chunks: Sequence[SpanChunk]) -> list[InsertOutcome]:
        """Insert chunks, to be called once; what became of each."""
        self._load_traces(list(dict.fromkeys(chunk.trace_id for chunk in chunks)))
        rows: list[tuple[object, ...]] = []
        outcomes = []
        for chunk in chunks:
            trace = self._traces[chunk.trace_id]
            kept, outcome = _keep_new(chunk, trace)
            outcomes.append(outcome)
            if outcome.stored:
                shared = self._find_shared(kept.resource), self._find_shared(kept.scope)
                self._references.update(shared)
                trace.new_trunks += kept.trunks
                trace.has_got_spans = True
                values = (outcome.stored, len(kept.trunks), kept.span_ids, kept.content)
                rows.append((trace.number, *shared, *values))
        self._connection.executemany(
            "INSERT INTO chunks (trace, resource, scope, spans, trunks, span_ids, content) "
            "VALUES (?,?,?,?,?,?,?)",
            rows,
        )
        self._write_counts()
        return outcomes

    def list_touched(self) -> Iterator[tuple[bytes, TouchedTrace]]:
        """Each trace that has got spans, with its ID."""
        return ((name, trace) for name, trace in self._traces.items() if trace.has_got_spans)

    def _load_traces(self, trace_ids: Sequence[bytes]) -> None:
        """What is stored of these traces; those of which nothing is get a number, in their order."""
        run = self._connection.execute
        found: dict[bytes, TouchedTrace] = {}
        for start in range(0, len(trace_ids), MAX_SQL_VARIABLES):
            some = trace_ids[start : start + MAX_SQL_VARIABLES]
            marks = ",".join("?" * len(some))
            rows = run(
                f"SELECT trace_id, id, spans, trunks FROM traces WHERE trace_id IN ({marks})", some
            )
            for trace_id, number, spans, trunks in rows.fetchall():
                trace = found[trace_id] = TouchedTrace(number, spans, trunks, is_new=False)
                for (span_ids,) in run("SELECT span_ids FROM chunks WHERE trace=?", (number,)):
                    trace.known.update(list_span_ids(span_ids))
        # Kept by SQLite for AUTOINCREMENT: the largest number that was ever used.
        row = run("SELECT seq FROM sqlite_sequence WHERE name='traces'").fetchone()
        last = int(row[0]) if row else 0
        for trace_id in trace_ids:
            if trace_id not in found:
                last += 1
                found[trace_id] = TouchedTrace(last)
            self._traces[trace_id] = found[trace_id]

    def _write_counts(self) -> None:
        """Write the number of spans of each trace, and of chunks that refer to each shared row."""
        run_many = self._connection.executemany
        touched = list(self.list_touched())
        run_many(
            "INSERT INTO traces (id, trace_id, seen_ms, spans, trunks) VALUES (?,?,?,?,?)",
            [
                (trace.number, trace_id, self._seen_ms, trace.spans, len(trace.new_trunks))
                for trace_id, trace in touched
                if trace.is_new
            ],
        )
        run_many(
            "UPDATE traces SET spans=?, trunks=? WHERE id=?",
            [
                (trace.spans, trace.old_trunks + len(trace.new_trunks), trace.number)
                for _, trace in touched
                if not trace.is_new
            ],
        )
        run_many(
            "UPDATE shared SET chunks=chunks+? WHERE id=?",
            [(count, number) for number, count in self._references.items()],
        )

    def _find_shared(self, content: bytes) -> int:
        number = self._shared.get(content)
        if number is None:
            run = self._connection.execute
            # Found by digest: an index over whole resources would take a page for each.
            digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
            found = run("SELECT id FROM shared WHERE digest=?", (digest,)).fetchone()
            if found is None:
                added = run(
                    "INSERT INTO shared (digest, content, chunks) VALUES (?,?,0)", (digest, content)
                )
                assert added.lastrowid
                number = added.lastrowid
            else:
                number = int(found[0])
            self._shared[content] = number
        return number


def _keep_new(chunk: SpanChunk, trace: TouchedTrace) -> tuple[SpanChunk, InsertOutcome]:
    """The part of a chunk that its trace does not have and has room for, which is noted in `trace`."""
    span_ids = list_span_ids(chunk.span_ids)
    size = len(span_ids)
    fresh = set(span_ids)
    if (
        len(fresh) == size
        and trace.spans + size <= MAX_TRACE_SPANS
        and fresh.isdisjoint(trace.known)
    ):
        trace.known |= fresh
        trace.spans += size
        return chunk, InsertOutcome(size, 0, 0)
    places: list[int] = []
    refused = 0
    for place, span_id in enumerate(span_ids):
        # A client that reuses one trace ID would else make it grow without end.
        if trace.spans >= MAX_TRACE_SPANS:
            refused += 1
        # Exporters retry what they got no answer for, although it may be stored.
        elif span_id not in trace.known:
            trace.known.add(span_id)
            trace.spans += 1
            places.append(place)
    outcome = InsertOutcome(len(places), size - len(places) - refused, refused)
    return select_places(chunk, places) if places else chunk, outcome
