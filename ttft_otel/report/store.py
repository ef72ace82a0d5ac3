# SPDX-License-Identifier: Apache-2.0
"""Keep spans in SQLite: receiver.py gives batches, each is answered when it is on disk, or refused.

One writer thread; what waits meanwhile is committed together. Sending twice changes nothing.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Full, Queue
from typing import Final

from ttft_otel.guard import Guard
from ttft_otel.report import assemble, schema
from ttft_otel.report.query import SPAN, spans_from
from ttft_otel.report.shape import Span

WAITING: Final = 64  # batches waiting for the writer; more are refused with 503
TOGETHER: Final = 4096  # spans in one transaction
MOST: Final = 20_000  # spans of one trace; more are refused and counted
EVICT: Final = 200  # traces given up per transaction, so that no commit is long

Batch = tuple[Sequence[Span], "Future[int]"]


class Unwritable(Exception):
    """The batch is not on disk: the sender keeps it and tries again."""


class Store:
    """The writing end. `add` from any thread; `counts` says what became of every span."""

    def __init__(
        self, path: Path, keep: int = 20_000, hours: float = 168.0, limit: int = 2 << 30
    ) -> None:
        """keep: traces; hours: their age; limit: bytes of the file. Raises schema.Trouble."""
        self.path = path
        self.keep = keep
        self.hours = hours
        self.limit = limit
        self.counts: Counter[str] = Counter()
        self.trouble = ""
        self._connection = schema.write(path, limit)
        self._queue: Queue[Batch | None] = Queue(WAITING)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ttft-otel-store", daemon=True)
        self._thread.start()

    def add(self, spans: Sequence[Span]) -> Future[int]:
        """Queue a batch; the future gives how many spans were refused. Raises Unwritable."""
        done: Future[int] = Future()
        done.set_running_or_notify_cancel()  # a sender that gave up must not cancel the write
        if self._closed:
            raise Unwritable("the store is closed")
        if not spans:
            done.set_result(0)
            return done
        try:
            self._queue.put_nowait((spans, done))
        except Full:
            self.counts["busy"] += 1
            raise Unwritable("too many batches wait for the disk") from None
        return done

    def close(self) -> None:
        """Write what waits, then close; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        ended = False
        while not ended:
            first = self._queue.get()
            if first is None:
                break
            batches, size = [first], len(first[0])
            while size < TOGETHER and not self._queue.empty():
                more = self._queue.get()
                if more is None:
                    ended = True
                    break
                batches.append(more)
                size += len(more[0])
            with Guard("store"):
                self._commit(batches)
            _give_up(batches, "an error of ttft-otel, see its log")
        while not self._queue.empty():
            if late := self._queue.get():
                _give_up([late], "the store is closed")

    def _commit(self, batches: Sequence[Batch]) -> None:
        try:
            try:
                refused = self._write(batches)
            except sqlite3.OperationalError:
                if not self._crowded():
                    raise
                self._evict(self._oldest(0.1))
                refused = self._write(batches)
        except sqlite3.Error as error:
            self.trouble = f"{type(error).__name__}: {error}"
            self.counts["failed_batches"] += len(batches)
            _give_up(batches, str(error))
            return
        self.trouble = ""
        for (_, done), count in zip(batches, refused, strict=True):
            done.set_result(count)
        try:
            self._evict(self._expired())
        except sqlite3.Error as error:  # the spans are safe; the next commit evicts again
            self.trouble = f"retention: {error}"

    def _write(self, batches: Sequence[Batch]) -> list[int]:
        """All batches in one transaction, or none of them."""
        counts: Counter[str] = Counter()
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            refused = [self._insert(spans, counts) for spans, _ in batches]
            self._assemble({span.trace_id for spans, _ in batches for span in spans})
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self.counts.update(counts)
        return refused

    def _insert(self, spans: Iterable[Span], counts: Counter[str]) -> int:
        """Insert what is new; give back how many were refused because their trace is full."""
        full = 0
        run = self._connection.execute
        for span in spans:
            run("INSERT OR IGNORE INTO traces VALUES (?, ?, 0)", (span.trace_id, time.time_ns()))
            size = run("SELECT spans FROM traces WHERE trace_id=?", (span.trace_id,)).fetchone()[0]
            if size >= MOST:
                full += 1
                continue
            if run(SPAN, row(span)).rowcount:
                counts["stored"] += 1
                run("UPDATE traces SET spans=spans+1 WHERE trace_id=?", (span.trace_id,))
            else:
                counts["duplicate"] += 1
        counts["refused"] += full
        return full

    def _assemble(self, traces: Iterable[str]) -> None:
        """Make the request rows of these traces anew, so that the order of arrival is no matter."""
        run = self._connection.execute
        for trace in traces:
            trunks = spans_from(self._connection, trace, "AND trunk=1")
            if not trunks:
                continue
            parents = dict(run("SELECT span_id, parent_id FROM spans WHERE trace_id=?", (trace,)))
            run("DELETE FROM requests WHERE trace_id=?", (trace,))
            for number, request in enumerate(assemble.requests(trace, trunks, parents)):
                run(
                    "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(trace, number, request.request_id, request.start_ns, request.model),
                        *(" ".join(request.roles), request.ttft_us, request.error),
                        int(request.pending),
                    ),
                )

    def _expired(self) -> list[str]:
        """Some of the traces that are too old or too many, the oldest first."""
        run = self._connection.execute
        line = time.time_ns() - int(self.hours * 3600e9)
        over = max(0, run("SELECT count(*) FROM traces").fetchone()[0] - self.keep)
        old = run("SELECT count(*) FROM traces WHERE seen_ns<?", (line,)).fetchone()[0]
        return self._first(min(EVICT, max(over, old)))

    def _oldest(self, share: float) -> list[str]:
        number = self._connection.execute("SELECT count(*) FROM traces").fetchone()[0]
        return self._first(int(number * share) + 1)

    def _first(self, number: int) -> list[str]:
        rows = self._connection.execute(
            "SELECT trace_id FROM traces ORDER BY seen_ns LIMIT ?", (number,)
        )
        return [row[0] for row in rows]

    def _evict(self, traces: Sequence[str]) -> None:
        """Give traces up, counted, and their pages back to the file system."""
        if not traces:
            return
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        try:
            for trace in traces:
                for table in ("spans", "requests", "traces"):
                    run(f"DELETE FROM {table} WHERE trace_id=?", (trace,))
            run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                run("ROLLBACK")
            raise
        self.counts["evicted_traces"] += len(traces)
        run("PRAGMA incremental_vacuum(512)").fetchall()

    def _crowded(self) -> bool:
        """Whether the file has reached its own limit (a full disk is another matter)."""
        run = self._connection.execute
        used, size = (run(f"PRAGMA {word}").fetchone()[0] for word in ("page_count", "page_size"))
        traces: int = run("SELECT count(*) FROM traces").fetchone()[0]
        return bool(used * size >= 0.9 * self.limit and traces)


def _give_up(batches: Sequence[Batch], why: str) -> None:
    """Answer those who still wait: their spans are not stored."""
    for _, done in batches:
        if not done.done():
            done.set_exception(Unwritable(why))


def row(span: Span) -> tuple[object, ...]:
    """A span as the columns of its table."""
    return (
        *(span.trace_id, span.span_id, span.parent_id, span.name, span.kind),
        *(span.start_ns, span.end_ns, span.service, span.scope, span.status, span.message),
        json.dumps(span.attributes, separators=(",", ":")),
        json.dumps(span.resource, separators=(",", ":")),
        *(span.dropped, int(span.trunk)),
    )
