# SPDX-License-Identifier: Apache-2.0
"""The SQLite database: its tables, its schema version, and how to open it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

from ttft_otel.report.store import retention

# In SQLite's own user_version, which can be read without knowing any table.
SCHEMA_VERSION: Final = 6
DB_OPTION_HELP: Final = "Database file.  [default: $XDG_STATE_HOME/ttft-otel/spans.db]"
BUSY_S: Final = 2.0  # seconds to wait for another process's lock

# Numbers of traces grow in the order of arrival, without gaps, and are never used again: what is below the
# smallest has been removed. Spans are in chunks (span_chunks.py), of which only their trace is indexed. Bytes
# for each span are bounded (test_storage_bounds.py): what spans share is in `shared`, and tables
# of long values have row IDs, because entries of an index beyond 1000 bytes take a page of their own.
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


def get_default_path(env: Mapping[str, str] | None = None) -> Path:
    """${XDG_STATE_HOME:-~/.local/state}/ttft-otel/spans.db"""
    source = os.environ if env is None else env
    # State and not cache: nobody should delete it to save space.
    state = source.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
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
            evicted = retention.fit_file(connection, max_bytes)
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
    with retention.run_transaction(connection):
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
