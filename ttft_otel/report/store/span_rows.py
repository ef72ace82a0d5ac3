# SPDX-License-Identifier: Apache-2.0
"""Insert chunks of spans, and rows of requests, into the database, for span_store.py.

What many chunks repeat (resource, scope name) is one row of the table `shared`, which counts the chunks that
refer to it and goes with the last of them. The rows of `requests`, by which database_reader.py finds
requests, are recomputed from the spans whenever a trace has got more of them, so that spans may arrive in any
order. Their texts are cut: they are searched, and shown from the spans.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ttft_otel.report.assemble import request_assembly
from ttft_otel.report.foreign import foreign_spans
from ttft_otel.report.report_types import Request, StoredSpan
from ttft_otel.report.store.span_chunks import SpanChunk, TraceReader, select_places, split_ids

MAX_TRACE_SPANS: Final = 20_000  # spans of one trace; more are refused and counted
MAX_SQL_VARIABLES: Final = 500  # of one SQL statement; all SQLite versions allow 999
_DIGEST_BYTES: Final = 16
MAX_SEARCHED_CHARS: Final = 200  # of a request ID, model, error or list of roles


@dataclass(slots=True)
class TouchedTrace:
    """A trace that has got spans in this transaction."""

    number: int  #: in the table `traces`
    spans: int = 0  #: how many it has
    old_trunks: int = 0  #: how many it had before
    is_new: bool = True
    has_got_spans: bool = False
    new_trunks: list[StoredSpan] = field(default_factory=list)  #: those that it has got


class ChunkInserter:
    """Inserts chunks within one transaction of the caller.

    counts: spans "stored", "duplicate", and "refused", because their trace is full.
    """

    def __init__(self, connection: sqlite3.Connection, seen_ms: int) -> None:
        """seen_ms: time of arrival, Unix milliseconds."""
        self.counts: Counter[str] = Counter()
        self._connection = connection
        self._seen_ms = seen_ms
        self._shared: dict[bytes, int] = {}
        self._references: Counter[int] = Counter()
        self._traces: dict[bytes, TouchedTrace] = {}

    def insert_chunks(self, chunks: Sequence[SpanChunk]) -> list[int]:
        """Insert chunks, to be called once; how many spans of each are refused."""
        places_by_trace: dict[bytes, list[int]] = {}
        for place, chunk in enumerate(chunks):
            places_by_trace.setdefault(chunk.trace_id, []).append(place)
        self._load_traces(list(places_by_trace))
        rows: list[tuple[object, ...]] = []
        refused = [0] * len(chunks)
        # Trace by trace, so that IDs of all spans are at hand of one trace only.
        for trace_id, places in places_by_trace.items():
            trace = self._traces[trace_id]
            known = self._load_known(trace)
            for place in places:
                kept, refused[place] = self._keep_new(chunks[place], trace, known)
                if kept:
                    rows.append(self._make_row(kept, trace))
        self._connection.executemany(
            "INSERT INTO chunks (trace, resource, scope, spans, trunks, span_ids, parent_ids, content) "
            "VALUES (?,?,?,?,?,?,?,?)",
            rows,
        )
        self._write_counts()
        return refused

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
                found[trace_id] = TouchedTrace(number, spans, trunks, is_new=False)
        # Kept by SQLite for AUTOINCREMENT: the largest number that was ever used.
        row = run("SELECT seq FROM sqlite_sequence WHERE name='traces'").fetchone()
        last = int(row[0]) if row else 0
        for trace_id in trace_ids:
            if trace_id not in found:
                last += 1
                found[trace_id] = TouchedTrace(last)
            self._traces[trace_id] = found[trace_id]

    def _load_known(self, trace: TouchedTrace) -> set[bytes]:
        """IDs of the stored spans of a trace, as far as they matter: a full trace takes no more."""
        if trace.is_new or trace.spans >= MAX_TRACE_SPANS:
            return set()
        rows = self._connection.execute(
            "SELECT span_ids FROM chunks WHERE trace=?", (trace.number,)
        )
        return {span_id for (span_ids,) in rows for span_id in split_ids(span_ids)}

    def _keep_new(
        self, chunk: SpanChunk, trace: TouchedTrace, known: set[bytes]
    ) -> tuple[SpanChunk | None, int]:
        """The part of a chunk that its trace does not have and can take, and how many spans it cannot.

        It is counted in `trace`, and added to `known`, the IDs of the trace's spans.
        """
        span_ids = split_ids(chunk.span_ids)
        size = len(span_ids)
        fresh = set(span_ids)
        if len(fresh) == size and trace.spans + size <= MAX_TRACE_SPANS and fresh.isdisjoint(known):
            known |= fresh
            trace.spans += size
            self.counts["stored"] += size
            return chunk, 0
        places: list[int] = []
        refused = 0
        for place, span_id in enumerate(span_ids):
            # A client that reuses one trace ID would else make it grow without end.
            if trace.spans >= MAX_TRACE_SPANS:
                refused += 1
            # Exporters retry what they got no answer for, although it may be stored.
            elif span_id not in known:
                known.add(span_id)
                trace.spans += 1
                places.append(place)
        duplicate = size - len(places) - refused
        self.counts.update(stored=len(places), duplicate=duplicate, refused=refused)
        return (select_places(chunk, places) if places else None), refused

    def _make_row(self, chunk: SpanChunk, trace: TouchedTrace) -> tuple[object, ...]:
        """The row of a chunk of new spans, which are noted in `trace`."""
        shared = self._find_shared(chunk.resource), self._find_shared(chunk.scope)
        self._references.update(shared)
        trace.new_trunks += chunk.trunks
        trace.has_got_spans = True
        counts = chunk.span_count, len(chunk.trunks)
        return (trace.number, *shared, *counts, chunk.span_ids, chunk.parent_ids, chunk.content)

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


def write_requests(
    connection: sqlite3.Connection, traces: Iterable[tuple[bytes, TouchedTrace]]
) -> None:
    """Replace the request rows of these traces, which are named by their IDs."""
    rows: list[tuple[object, ...]] = []
    for trace_id, trace in traces:
        # Spans of others alone make no request; those above a single leg change nothing in its row.
        if not trace.new_trunks and trace.old_trunks <= 1:
            continue
        requests = _assemble_trace(connection, trace_id.hex(), trace)
        if trace.old_trunks:
            # All anew: one more leg can change how requests are divided.
            connection.execute("DELETE FROM requests WHERE trace=?", (trace.number,))
        rows += [_make_row(trace.number, place, each) for place, each in enumerate(requests)]
    connection.executemany(
        "INSERT INTO requests (trace, number, request_id, start_ns, model, roles, ttft_us, "
        "error, pending) VALUES (?,?,?,?,?,?,?,?,?)",
        rows,
    )


def _assemble_trace(
    connection: sqlite3.Connection, trace_id: str, trace: TouchedTrace
) -> list[Request]:
    # By far the most have one leg, of which all is at hand; parents tell whose leg it is.
    if not trace.old_trunks and len(trace.new_trunks) == 1:
        found = foreign_spans.make_trunks(trace.new_trunks, {})
    else:
        found = TraceReader(connection, trace.number, trace_id).read_trunks()
    return request_assembly.assemble_requests(trace_id, *found)


def _make_row(trace: int, number: int, request: Request) -> tuple[object, ...]:
    # A request without an ID of its own is found by its trace.
    request_id = "" if request.request_id == request.trace_id else request.request_id
    roles = " ".join(request.roles)
    request_id, model, roles, error = (
        text[:MAX_SEARCHED_CHARS] for text in (request_id, request.model, roles, request.error)
    )
    begin, length, pending = request.start_ns, request.ttft_us, int(request.pending)
    return trace, number, request_id, begin, model, roles, length, error, pending
