# SPDX-License-Identifier: Apache-2.0
"""The SQLite database: its tables, how to open it and to write to it, and removal of old traces.

span_store.py writes, and removes old traces in its transactions and while idle. Traces beyond the limits
disappear at once, with their requests. Their spans, which nothing reads any more, are deleted in slices,
so that no commit takes long.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

# In SQLite's own user_version, which can be read without knowing any table.
SCHEMA_VERSION: Final = 6
DB_OPTION_HELP: Final = "Database file.  [default: $XDG_STATE_HOME/ttft-otel/spans.db]"
BUSY_S: Final = 2.0  # seconds to wait for another process's lock
MAX_PURGED_SPANS: Final = 4096  # spans deleted by one call; as many as a transaction stores
MAX_FREED_PAGES: Final = 512  # pages returned to the file system by one call
EVICTED_SHARE: Final = 0.1  # of the traces, removed when the file has reached its limit
MAX_SEARCHED_CHARS: Final = 200  # of a request ID, model, error or list of roles
# Without traces everything is below: then all spans are of removed ones.
_FIRST_KEPT: Final = "(SELECT coalesce(min(id), 1 << 62) FROM traces)"

# Numbers of traces grow in the order of arrival, without gaps, and are never used again: what is below the
# smallest has been removed. Spans are in chunks (otlp_decoder.py), of which only their trace is indexed.
# Bytes for each span are bounded (test_span_store.py): what spans share is in `shared`, and tables of
# long values have row IDs, because entries of an index beyond 1000 bytes take a page of their own.
CREATE_TABLES: Final = """
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
  span_ids BLOB NOT NULL, parent_ids BLOB NOT NULL, content BLOB NOT NULL
);
CREATE INDEX chunks_trace ON chunks (trace);
CREATE TABLE requests (
  id INTEGER PRIMARY KEY, trace INTEGER NOT NULL, number INTEGER NOT NULL,
  request_id TEXT NOT NULL, start_ns INTEGER NOT NULL, model TEXT NOT NULL, roles TEXT NOT NULL,
  ttft_us INTEGER NOT NULL, error TEXT NOT NULL, pending INTEGER NOT NULL
);
CREATE INDEX requests_trace ON requests (trace);
CREATE INDEX requests_start ON requests (start_ns);
CREATE INDEX requests_id ON requests (request_id) WHERE request_id<>'';
"""


class StoreError(Exception):
    """The database (or a port) cannot be used; the text says why and what to do."""


def get_default_path() -> Path:
    """${XDG_STATE_HOME:-~/.local/state}/ttft-otel/spans.db"""
    # State and not cache: nobody should delete it to save space.
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "ttft-otel" / "spans.db"


def open_for_writing(path: Path, max_bytes: int) -> tuple[sqlite3.Connection, int]:
    """Open the database for writing, create it if it is absent. Raises StoreError.

    max_bytes: size of the file at which SQLite refuses to write (SQLITE_FULL). From a larger file the oldest
    traces are removed, whose number is returned beside the connection.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files = path, Path(f"{path}-wal"), Path(f"{path}-shm")
        trusted = os.getuid(), path.parent.stat().st_uid
        for each in files:
            # In a folder that all may write to, somebody may have laid a link, or a file to read along.
            if os.path.lexists(each) and each.lstat().st_uid not in trusted:
                raise PermissionError(f"{each} is another user's")
        # Readable for its owner only: it has request IDs and timings. SQLite's -wal and -shm files
        # take over this mode.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        for each in files:
            # Somebody has opened it to all: closed again, or refused where it is another user's.
            if each.exists() and (mode := each.stat().st_mode & 0o777) & 0o007:
                each.chmod(mode & 0o770)
        # Transactions are begun explicitly; opened here, used by the writer thread.
        connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # evictions shrink the file
            connection.execute("PRAGMA journal_mode=WAL")  # commands read while `serve` writes
            # With WAL a power failure may cost the last commits but not the database.
            connection.execute("PRAGMA synchronous=NORMAL")
            # After auto_vacuum, which only takes effect before the first table.
            _prepare_schema(connection, path)
            evicted = fit_file(connection, max_bytes)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot write {path}: {error}; choose another with --db FILE") from error
    return connection, evicted


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the database read-only; another process may write to it. Raises StoreError."""
    if not path.exists():
        raise StoreError(
            f"no database at {path} yet; start `ttft-otel serve` and send it spans, "
            "or name another file with --db FILE"
        )
    try:
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None
        )
        try:
            _check_version(connection, path)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise StoreError(f"cannot read {path}: {error}; is it a ttft-otel database?") from error
    return connection


def _prepare_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables of a new database in one transaction. Raises StoreError for another schema."""
    # Takes the write lock before the version is read: two starts cannot both create tables.
    with run_transaction(connection):
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            # One by one: executescript() would commit first.
            for statement in CREATE_TABLES.split(";"):
                connection.execute(statement)
            # Part of the transaction: it is rolled back with the tables.
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    _check_version(connection, path)


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema {version}, this version of ttft-otel reads {SCHEMA_VERSION}: "
            f"delete the file {path}, or name another one with --db FILE"
        )


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
    number = int(count_traces(connection) * EVICTED_SHARE) + 1
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
        while _count_used_pages(connection) > max_pages and count_traces(connection):
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


def count_traces(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM traces").fetchone()[0])


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
