# SPDX-License-Identifier: Apache-2.0
"""Read the database: requests by filter, by id, by trace, for page, terminal and export.

Each reader opens its own connection, so a command can read while `serve` writes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ttft_otel.report import assemble, schema
from ttft_otel.report.shape import Request, Span

COLUMNS: Final = (
    "trace_id, span_id, parent_id, name, kind, start_ns, end_ns, service, scope, status, message, "
    "attributes, resource, dropped"
)
SPAN: Final = (
    f"INSERT OR IGNORE INTO spans ({COLUMNS}, trunk) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
)
ANSWERS: Final = ("chatcmpl-", "cmpl-")
MOST: Final = 2000  # requests in one answer


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which requests: an empty field does not narrow. error: "any", "none" or a type."""

    model: str = ""
    role: str = ""
    error: str = ""
    min_us: int = 0
    last: int = 200


@dataclass(frozen=True, slots=True)
class Trace:
    """All that is known of one trace."""

    trace_id: str
    spans: tuple[Span, ...]
    requests: tuple[Request, ...]


class Reader:
    """The reading end; `with reader(path) as db`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def latest(self, wanted: Wanted) -> list[Request]:
        """The newest requests that are wanted, newest first."""
        where, values = _where(wanted)
        rows = self._connection.execute(
            f"SELECT trace_id, number FROM requests {where} ORDER BY start_ns DESC LIMIT ?",
            (*values, min(max(wanted.last, 1), MOST)),
        ).fetchall()
        return self._load(rows)

    def request(self, name: str) -> Request | None:
        """The newest request of this id: the caller's x-request-id, without one the trace id.

        An answer's own id is understood too: vLLM makes it by putting `chatcmpl-` before.
        """
        words = [name, name.lower()]
        words += [name.removeprefix(word) for word in ANSWERS if name.startswith(word)]
        for word in words:
            rows = self._connection.execute(
                "SELECT trace_id, number FROM requests WHERE request_id=? "
                "ORDER BY start_ns DESC LIMIT 1",
                (word,),
            ).fetchall()
            if found := self._load(rows):
                return found[0]
        return None

    def trace(self, trace_id: str) -> Trace | None:
        """A whole trace; None when nothing of it is stored."""
        spans = spans_from(self._connection, trace_id)
        if not spans:
            return None
        return Trace(trace_id, tuple(spans), tuple(_assembled(trace_id, spans)))

    def models(self) -> list[str]:
        """Names of the models seen, for the page's filter."""
        rows = self._connection.execute(
            "SELECT DISTINCT model FROM requests WHERE model<>'' ORDER BY model LIMIT 100"
        )
        return [row[0] for row in rows]

    def sizes(self) -> dict[str, int]:
        """How many traces, spans and requests are stored."""
        return {
            table: self._connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("traces", "spans", "requests")
        }

    def _load(self, rows: Sequence[tuple[str, int]]) -> list[Request]:
        """Assemble the requests of these rows; a trace that left meanwhile is left out."""
        built: dict[str, list[Request]] = {}
        for trace_id, _ in rows:
            if trace_id not in built:
                parents = dict(
                    self._connection.execute(
                        "SELECT span_id, parent_id FROM spans WHERE trace_id=?", (trace_id,)
                    )
                )
                trunks = spans_from(self._connection, trace_id, "AND trunk=1")
                built[trace_id] = assemble.requests(trace_id, trunks, parents)
        return [
            built[trace_id][number] for trace_id, number in rows if number < len(built[trace_id])
        ]


@contextmanager
def reader(path: Path) -> Iterator[Reader]:
    """Open the database for reading. Raises schema.Trouble, with the remedy."""
    with closing(schema.read(path)) as connection:
        connection.execute("BEGIN")  # one snapshot for all that is read here
        yield Reader(connection)


def spans_from(connection: sqlite3.Connection, trace_id: str, more: str = "") -> list[Span]:
    """A trace's spans in time order."""
    rows = connection.execute(
        f"SELECT {COLUMNS} FROM spans WHERE trace_id=? {more} ORDER BY start_ns, end_ns DESC",
        (trace_id,),
    )
    return [
        Span(
            trace_id=row[0],
            span_id=row[1],
            parent_id=row[2],
            name=row[3],
            kind=row[4],
            start_ns=row[5],
            end_ns=row[6],
            service=row[7],
            scope=row[8],
            status=row[9],
            message=row[10],
            attributes=json.loads(row[11]),
            resource=json.loads(row[12]),
            dropped=row[13],
        )
        for row in rows
    ]


def _assembled(trace_id: str, spans: Sequence[Span]) -> list[Request]:
    parents = {span.span_id: span.parent_id for span in spans}
    return assemble.requests(trace_id, [span for span in spans if span.trunk], parents)


def _where(wanted: Wanted) -> tuple[str, list[str | int]]:
    parts: list[str] = []
    values: list[str | int] = []
    if wanted.model:
        parts.append("model=?")
        values.append(wanted.model)
    if wanted.role:
        parts.append("' '||roles||' ' LIKE ?")
        values.append(f"% {wanted.role} %")
    if wanted.error == "any":
        parts.append("error<>''")
    elif wanted.error == "none":
        parts.append("error=''")
    elif wanted.error:
        parts.append("error=?")
        values.append(wanted.error)
    if wanted.min_us:
        parts.append("ttft_us>=?")
        values.append(wanted.min_us)
    return ("WHERE " + " AND ".join(parts) if parts else ""), values
