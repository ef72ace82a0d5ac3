# SPDX-License-Identifier: Apache-2.0
"""The database file: its tables, its version, and how to open it; store.py and query.py use it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

VERSION: Final = 1
HELP: Final = "Database file.  [default: $XDG_STATE_HOME/ttft-otel/spans.db]"
BUSY_S: Final = 2.0  # how long a lock of another process is waited for

TABLES: Final = """
CREATE TABLE traces (
  trace_id TEXT PRIMARY KEY, seen_ns INTEGER NOT NULL, spans INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX traces_seen ON traces (seen_ns);
CREATE TABLE spans (
  trace_id TEXT NOT NULL, span_id TEXT NOT NULL, parent_id TEXT NOT NULL, name TEXT NOT NULL,
  kind INTEGER NOT NULL, start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL,
  service TEXT NOT NULL, scope TEXT NOT NULL, status INTEGER NOT NULL, message TEXT NOT NULL,
  attributes TEXT NOT NULL, resource TEXT NOT NULL, dropped INTEGER NOT NULL,
  trunk INTEGER NOT NULL,
  PRIMARY KEY (trace_id, span_id)
) WITHOUT ROWID;
CREATE TABLE requests (
  trace_id TEXT NOT NULL, number INTEGER NOT NULL, request_id TEXT NOT NULL,
  start_ns INTEGER NOT NULL, model TEXT NOT NULL, roles TEXT NOT NULL,
  ttft_us INTEGER NOT NULL, error TEXT NOT NULL, pending INTEGER NOT NULL,
  PRIMARY KEY (trace_id, number)
) WITHOUT ROWID;
CREATE INDEX requests_start ON requests (start_ns);
CREATE INDEX requests_id ON requests (request_id);
"""


class Trouble(Exception):
    """The database cannot be used; the text says why and what to do."""


def default(env: Mapping[str, str] | None = None) -> Path:
    """${XDG_STATE_HOME:-~/.local/state}/ttft-otel/spans.db"""
    source = os.environ if env is None else env
    state = source.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "ttft-otel" / "spans.db"


def write(path: Path, limit: int) -> sqlite3.Connection:
    """Open for writing, made if absent; limit: bytes the file may have. Raises Trouble."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Request ids and timings are nobody else's business; SQLite's side files copy the mode.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            size = connection.execute("PRAGMA page_size").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count={max(1, limit // size)}")
            _migrate(connection, path)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise Trouble(f"cannot write {path}: {error}; choose another with --db FILE") from error
    return connection


def read(path: Path) -> sqlite3.Connection:
    """Open for reading while another process may write. Raises Trouble."""
    if not path.exists():
        raise Trouble(
            f"no database at {path} yet; start `ttft-otel serve` and send it spans, "
            "or name another file with --db FILE"
        )
    try:
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None
        )
        try:
            _check(connection, path)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise Trouble(f"cannot read {path}: {error}; is it a ttft-otel database?") from error
    return connection


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if not found:
            for statement in TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    _check(connection, path)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != VERSION:
        raise Trouble(
            f"{path} has schema {found}, this version of ttft-otel reads {VERSION}; "
            "move it away, or name another file with --db FILE"
        )
