# SPDX-License-Identifier: Apache-2.0
"""Removal of old traces from the database; span_store.py calls it in its transactions and while idle.

Traces beyond the limits disappear at once, with their requests. Their spans, which nothing reads any more,
are deleted in slices, so that no commit takes long. run_transaction() is how all of this folder writes.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MAX_PURGED_SPANS: Final = 4096  # spans deleted by one call; as many as a transaction stores
MAX_FREED_PAGES: Final = 512  # pages returned to the file system by one call
EVICTED_SHARE: Final = 0.1  # of the traces, removed when the file has reached its limit
# Without traces everything is below: then all spans are of removed ones.
_FIRST_KEPT: Final = "(SELECT coalesce(min(id), 1 << 62) FROM traces)"


@contextmanager
def run_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit what the block writes, or roll it back where it raises."""
    # The write lock at once: a later upgrade of a read lock could fail half-way.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite rolls back by itself after some errors, a full disk among them.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def has_old(connection: sqlite3.Connection, max_traces: int, oldest_kept_ms: int) -> bool:
    """Whether there are traces beyond the limits, or spans of removed traces."""
    first_kept = _find_first_kept(connection, max_traces, oldest_kept_ms)
    found = connection.execute(
        f"SELECT EXISTS (SELECT 1 FROM traces WHERE id<?) OR "
        f"EXISTS (SELECT 1 FROM chunks WHERE trace<{_FIRST_KEPT})",
        (first_kept,),
    ).fetchone()
    return bool(found[0])


def evict_traces(connection: sqlite3.Connection, max_traces: int, oldest_kept_ms: int) -> int:
    """Remove traces beyond `max_traces`, and those seen before `oldest_kept_ms`; returns their number.

    To be called within a transaction, so that no reader sees more than the limits allow.
    """
    return _evict_below(connection, _find_first_kept(connection, max_traces, oldest_kept_ms))


def evict_share(connection: sqlite3.Connection) -> int:
    """Remove the oldest EVICTED_SHARE of the traces, at least one, with their spans; returns their number."""
    run = connection.execute
    # At least one, or the writer would find the file as full as before.
    number = int(run("SELECT count(*) FROM traces").fetchone()[0] * EVICTED_SHARE) + 1
    row = run("SELECT id FROM traces ORDER BY id LIMIT 1 OFFSET ?", (number,)).fetchone()
    evicted = _evict_below(connection, row[0] if row else 1 << 62)
    # All at once here: only deleted pages can be used for the batch that waits.
    while purge_spans(connection):
        pass
    return evicted


def purge_spans(connection: sqlite3.Connection) -> int:
    """Delete chunks of removed traces, until these had MAX_PURGED_SPANS spans; returns their number.

    To be called within a transaction.
    """
    found = connection.execute(
        f"SELECT id, resource, scope, spans FROM chunks WHERE trace<{_FIRST_KEPT} ORDER BY trace LIMIT ?",
        (MAX_PURGED_SPANS,),
    )
    rows: list[tuple[int, int, int]] = []
    purged = 0
    for *row, spans in found:
        rows.append((row[0], row[1], row[2]))
        purged += spans
        if purged >= MAX_PURGED_SPANS:
            break
    found.close()
    # Counted first: one update for each shared row, and not one for each chunk.
    references = Counter(number for row in rows for number in row[1:])
    connection.executemany("DELETE FROM chunks WHERE id=?", [row[:1] for row in rows])
    connection.executemany(
        "UPDATE shared SET chunks=chunks-? WHERE id=?",
        [(count, number) for number, count in references.items()],
    )
    connection.executemany(
        "DELETE FROM shared WHERE id=? AND chunks=0", [(number,) for number in references]
    )
    return purged


def shrink_file(connection: sqlite3.Connection) -> bool:
    """Return up to MAX_FREED_PAGES unused pages to the file system; whether there were any."""
    if not connection.execute("PRAGMA freelist_count").fetchone()[0]:
        return False
    # Not execute(): it frees one page, because this statement has no rows to fetch.
    connection.executescript(f"PRAGMA incremental_vacuum({MAX_FREED_PAGES})")
    return True


def fit_file(connection: sqlite3.Connection, max_bytes: int) -> int:
    """Let the file never grow beyond `max_bytes`; the number of traces that were removed for that.

    To be called at each start: the limit may be another one, or the file have been rewritten.
    """
    evicted = 0
    run = connection.execute
    max_pages = max(1, max_bytes // run("PRAGMA page_size").fetchone()[0])
    if run("PRAGMA page_count").fetchone()[0] > max_pages:
        while _count_used_pages(connection) > max_pages and count_kept(connection)["traces"]:
            with run_transaction(connection):
                evicted += evict_share(connection)
        connection.executescript("PRAGMA incremental_vacuum")
        # Until a checkpoint the file keeps its size, and its log grows.
        run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    # Of the connection and not of the file, and never less than its size.
    run(f"PRAGMA max_page_count={max_pages}")
    return evicted


def _count_used_pages(connection: sqlite3.Connection) -> int:
    total, free = (
        connection.execute(f"PRAGMA {word}").fetchone()[0]
        for word in ("page_count", "freelist_count")
    )
    return int(total - free)


def count_kept(connection: sqlite3.Connection) -> dict[str, int]:
    """The number of traces, spans and requests; what is left of removed traces is not counted."""
    traces, spans, requests = connection.execute(
        "SELECT count(*), coalesce(sum(spans), 0), (SELECT count(*) FROM requests) FROM traces"
    ).fetchone()
    return {"traces": traces, "spans": spans, "requests": requests}


def _find_first_kept(connection: sqlite3.Connection, max_traces: int, oldest_kept_ms: int) -> int:
    run = connection.execute
    # By number, which is the order of arrival: spans' own times may be wrong. Numbers have no gaps.
    last: int = run("SELECT coalesce(max(id), 0) FROM traces").fetchone()[0]
    oldest_young = "SELECT id FROM traces WHERE seen_ms>=? ORDER BY id LIMIT 1"
    by_age = run(oldest_young, (oldest_kept_ms,)).fetchone()
    return max(last - max_traces + 1, by_age[0] if by_age else 1 << 62)


def _evict_below(connection: sqlite3.Connection, first_kept: int) -> int:
    connection.execute("DELETE FROM requests WHERE trace<?", (first_kept,))
    return connection.execute("DELETE FROM traces WHERE id<?", (first_kept,)).rowcount
