# SPDX-License-Identifier: Apache-2.0
"""Store spans in SQLite. receiver.py adds batches and answers each once it is on disk, or refused.

One writer thread commits the batches that wait in one transaction. A span that is sent twice is stored once.
What many chunks repeat (resource, scope name) is one row of the table `shared`, which counts the chunks that
refer to it and goes with the last of them. The rows of `requests`, by which database_reader.py finds
requests, are recomputed from the spans whenever a trace has got more of them, so that spans may arrive in
any order. Their texts are cut: they are searched, and shown from the spans.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Final

from ttft_otel.report.assemble import request_assembly
from ttft_otel.report.foreign import products
from ttft_otel.report.receive.otlp_decoder import SpanChunk, chunk_spans, select_places, split_ids
from ttft_otel.report.report_types import Request, StoredSpan
from ttft_otel.report.store import database_schema
from ttft_otel.report.store.database_reader import TraceReader
from ttft_otel.report.store.database_schema import MAX_SEARCHED_CHARS, run_transaction
from ttft_otel.tracing.guard import Guard

MAX_TRACE_SPANS: Final = 20_000  # spans of one trace; more are refused and counted
MAX_SQL_VARIABLES: Final = 500  # of one SQL statement; all SQLite versions allow 999
_DIGEST_BYTES: Final = 16
MAX_WAITING_BATCHES: Final = 64  # batches in the writer's queue; more are refused with 503
MAX_TRANSACTION_SPANS: Final = 4096  # spans in one transaction, so that no commit takes long
# Seconds between two looks for expired traces while nothing arrives.
RETENTION_INTERVAL_S: Final = 1.0
RETENTION_TROUBLE: Final = "retention: "  # begins last_error when old traces could not be removed

log: Final = logging.getLogger("ttft_otel")

QueuedBatch = tuple[Sequence[SpanChunk], "Future[int]"]


class StoreUnavailableError(Exception):
    """The batch could not be stored: the sender should retry."""


class SpanStore:
    """Writes spans to the database; `add` may be called from any thread.

    counts: spans "stored", "duplicate" and "refused"; batches "busy" (queue full) and
    "failed_batches"; "evicted_traces". last_error: "" while writing works.
    """

    def __init__(
        self,
        path: Path,
        max_traces: int = 20_000,
        max_age_hours: float = 168.0,
        max_bytes: int = 2 << 30,
    ) -> None:
        """Open the database at `path` and start the writer thread. Raises StoreError.

        max_traces, max_age_hours, max_bytes: limits beyond which the oldest traces are removed.
        """
        self.path = path
        self.max_traces = max_traces
        self.max_age_hours = max_age_hours
        self.max_bytes = max_bytes
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self._clock_offset_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._open_database()
        self._queue: Queue[QueuedBatch | None] = Queue(MAX_WAITING_BATCHES)
        self._closed = False
        # A daemon: a process that ends without close() must not wait for it.
        self._thread = threading.Thread(
            target=self._run_writer, name="ttft-otel-store", daemon=True
        )
        self._thread.start()

    def _open_database(self) -> None:
        self._connection, evicted = database_schema.open_for_writing(self.path, self.max_bytes)
        self._file_id = self._read_file_id()
        self.counts["evicted_traces"] += evicted

    def _read_file_id(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _follow_file(self) -> bool:
        """Open the database anew if its file was removed or replaced: nobody would read what is written.

        Returns False while it cannot be opened.
        """
        if self._file_id and self._read_file_id() == self._file_id:
            return True
        if self._file_id:
            log.error("ttft-otel serve: %s was removed or replaced: it is opened anew", self.path)
            self._file_id = None
            # Before the other is opened, as it removes the old file's -wal and -shm.
            self._connection.close()
        try:
            self._open_database()
        except database_schema.StoreError as error:
            self.last_error = str(error)
            return False
        self.last_error = ""
        return True

    def add(self, spans: Sequence[StoredSpan]) -> Future[int]:
        """Queue decoded spans; as add_chunks()."""
        return self.add_chunks([*chunk_spans(spans)])

    def add_chunks(self, chunks: Sequence[SpanChunk]) -> Future[int]:
        """Queue a batch. Raises StoreUnavailableError when the queue is full or the store closed.

        The future gives the number of spans of the batch that were refused (MAX_TRACE_SPANS).
        """
        done: Future[int] = Future()
        done.set_running_or_notify_cancel()  # a sender that gave up must not cancel the write
        if self._closed:
            raise StoreUnavailableError("the store is closed")
        if not chunks:
            done.set_result(0)
            return done
        try:
            # Never waits: the sender learns at once that the queue is full, and retries.
            self._queue.put_nowait((chunks, done))
        except Full:
            self.counts["busy"] += 1
            raise StoreUnavailableError("too many batches wait for the disk") from None
        return done

    def close(self) -> None:
        """Write the batches in the queue, then close; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        # Behind all batches, so that these are written first.
        self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _run_writer(self) -> None:
        ended = False
        wait_s = RETENTION_INTERVAL_S
        while not ended:
            batches, ended = self._take_batches(wait_s)
            if not self._follow_file():
                _fail_batches(batches, self.last_error)
                continue
            with Guard("store"):
                if batches:
                    self._commit_batches(batches)
            # Batches that were answered are left alone; the others failed by a bug that Guard caught.
            _fail_batches(batches, "an error of ttft-otel, see its log")
            with Guard("store.retention"):
                # While something is left to remove, the next slice follows without a pause.
                wait_s = 0.0 if not batches and self._remove_old() else RETENTION_INTERVAL_S
        while not self._queue.empty():
            if waiting := self._queue.get():
                _fail_batches([waiting], "the store is closed")

    def _take_batches(self, wait_s: float) -> tuple[list[QueuedBatch], bool]:
        """The batches of one turn, none after `wait_s` seconds; True when close() was called."""
        batches: list[QueuedBatch] = []
        size = 0
        # Whatever waits is committed together: one transaction for many senders.
        while size < MAX_TRANSACTION_SPANS and not (batches and self._queue.empty()):
            try:
                queued = self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait()
            except Empty:
                break
            if queued is None:  # from close()
                return batches, True
            batches.append(queued)
            size += sum(chunk.span_count for chunk in queued[0])
        return batches, False

    def _commit_batches(self, batches: Sequence[QueuedBatch]) -> None:
        refused = [0] * len(batches)
        work = [(number, chunk) for number, (chunks, _) in enumerate(batches) for chunk in chunks]
        try:
            for part in _divide_work(work):
                counts = self._write_slice([chunk for _, chunk in part])
                for (number, _), count in zip(part, counts, strict=True):
                    refused[number] += count
        except sqlite3.Error as error:
            self.last_error = f"{type(error).__name__}: {error}"
            # All of the turn: those that were written already come again as duplicates.
            self.counts["failed_batches"] += len(batches)
            _fail_batches(batches, str(error))
            return
        # A commit has succeeded: /healthz is well again.
        self.last_error = ""
        for (_, done), count in zip(batches, refused, strict=True):
            done.set_result(count)

    def _write_slice(self, chunks: Sequence[SpanChunk]) -> list[int]:
        """Write chunks in one transaction; how many spans of each are refused."""
        try:
            return self._write_chunks(chunks)
        except sqlite3.OperationalError:
            # SQLITE_FULL by our own limit: remove a share of the traces and write once more.
            if not self._is_full():
                raise
            with run_transaction(self._connection):
                evicted = database_schema.evict_share(self._connection)
            self.counts["evicted_traces"] += evicted
            return self._write_chunks(chunks)

    def _write_chunks(self, chunks: Sequence[SpanChunk]) -> list[int]:
        with run_transaction(self._connection):
            inserter = ChunkInserter(self._connection, self._read_clock_ms())
            refused = inserter.insert_chunks(chunks)
            write_requests(self._connection, inserter.list_touched())
            # Deletes as many spans as are stored, so that those of removed traces do not pile up.
            evicted = self._evict_and_purge()
        # Only after COMMIT: what was rolled back is still there. And only what there was, for /healthz.
        self.counts.update(+inserter.counts)
        self.counts["evicted_traces"] += evicted
        return refused

    def _remove_old(self) -> bool:
        """While idle, enforce the limits and shrink the file a little; whether more is left to do."""
        try:
            if database_schema.has_old(
                self._connection, self.max_traces, self._compute_oldest_ms()
            ):
                with run_transaction(self._connection):
                    evicted = self._evict_and_purge()
                self.counts["evicted_traces"] += evicted
                is_left = True
            else:
                is_left = database_schema.shrink_file(self._connection)
        except sqlite3.Error as error:  # the spans are safe; the next turn tries again
            self.last_error = f"{RETENTION_TROUBLE}{error}"
            return False
        if self.last_error.startswith(RETENTION_TROUBLE):
            self.last_error = ""
        return is_left

    def _compute_oldest_ms(self) -> int:
        return self._read_clock_ms() - int(self.max_age_hours * 3600e3)

    def _read_clock_ms(self) -> int:
        """The wall clock of the start, and what has passed since: ages are compared across restarts.

        A clock that is set meanwhile would make all that is stored too old at once.
        """
        return (time.clock_gettime_ns(time.CLOCK_BOOTTIME) + self._clock_offset_ns) // 1_000_000

    def _evict_and_purge(self) -> int:
        evicted = database_schema.evict_traces(
            self._connection, self.max_traces, self._compute_oldest_ms()
        )
        database_schema.purge_spans(self._connection)
        return evicted

    def _is_full(self) -> bool:
        """Whether the file is near its own limit, max_bytes (as opposed to a full disk)."""
        run = self._connection.execute
        used, size = (run(f"PRAGMA {word}").fetchone()[0] for word in ("page_count", "page_size"))
        # 0.9: the limit is of whole pages, and a batch needs several of them.
        return bool(
            used * size >= 0.9 * self.max_bytes and database_schema.count_traces(self._connection)
        )


def _divide_work(work: Sequence[tuple[int, SpanChunk]]) -> Iterator[list[tuple[int, SpanChunk]]]:
    """Parts of MAX_TRANSACTION_SPANS spans, more by less than a chunk."""
    part: list[tuple[int, SpanChunk]] = []
    size = 0
    for number, chunk in work:
        part.append((number, chunk))
        size += chunk.span_count
        if size >= MAX_TRANSACTION_SPANS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _fail_batches(batches: Sequence[QueuedBatch], reason: str) -> None:
    """Answer batches that are not answered yet: their spans are not stored."""
    for _, done in batches:
        if not done.done():
            done.set_exception(StoreUnavailableError(reason))


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
        found = products.make_trunks(trace.new_trunks, {})
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
