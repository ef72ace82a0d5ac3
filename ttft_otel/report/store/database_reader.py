# SPDX-License-Identifier: Apache-2.0
"""Read the database: requests by filter, by request ID or by trace ID.

Each reader opens its own connection, so that a command can read while `serve` writes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from ttft_otel.model import stages
from ttft_otel.report import window_sample
from ttft_otel.report.assemble import request_assembly
from ttft_otel.report.foreign import foreign_spans
from ttft_otel.report.report_types import Request, StoredSpan
from ttft_otel.report.store import database_schema
from ttft_otel.report.store.span_chunks import MAX_TRACE_TRUNKS, TraceReader
from ttft_otel.report.store.span_rows import MAX_SEARCHED_CHARS
from ttft_otel.report.window_sample import LATE, LOST, OTHER, REFUSED, SamplePlan, WindowSample

ANSWER_ID_PREFIXES: Final = ("chatcmpl-", "cmpl-")  # vLLM puts them before the request ID
MAX_REQUESTS: Final = 2000  # requests in one result
SERVED: Final = "error='' AND NOT pending"  # requests that got a first token
REFUSED_ERROR: Final = "error GLOB '4[0-9][0-9]'"  # as keys.is_refusal() says it


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Conditions on requests; a field with its default does not restrict the result."""

    model: str = ""
    role: str = ""
    error: str = ""  #: "any", "none" or an error.type
    min_us: int = 0  #: shortest TTFT, microseconds
    #: Unix nanoseconds between which the request began, the end excluded.
    since_ns: int = 0
    until_ns: int = 0
    last: int = 200  #: number of requests, newest first; 0 for all, where a window is sampled


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """The stored spans of one trace, and the requests assembled from them."""

    trace_id: str
    spans: tuple[StoredSpan, ...]
    requests: tuple[Request, ...]


class DatabaseReader:
    """Queries on one snapshot of the database: `with open_reader(path) as db`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def list_latest(self, wanted: RequestFilter) -> list[Request]:
        """The newest requests that match `wanted`, newest first."""
        where, values = _build_where(wanted)
        return self._load_requests(where, values, min(max(wanted.last, 1), MAX_REQUESTS))

    def sample_window(
        self, wanted: RequestFilter, slo_us: int = 0, limits: Mapping[str, int] | None = None
    ) -> WindowSample:
        """The requests that match `wanted`: all late ones, and a sample of the others.

        slo_us: longer TTFTs are late; 0: the slowest LATE_SHARE. limits: as in SamplePlan.
        """
        where, values = _build_where(wanted)
        where = where or "WHERE 1"
        run = self._connection.execute

        def select(what: str, condition: str, *more: object) -> sqlite3.Cursor:
            return run(f"SELECT {what} FROM requests {where} AND {condition}", (*values, *more))

        if wanted.last:
            oldest = select(
                "start_ns", "1 ORDER BY start_ns DESC LIMIT 1 OFFSET ?", wanted.last - 1
            )
            where, values = f"{where} AND start_ns>=?", [*values, (oldest.fetchone() or (0,))[0]]
        total, served, failed, refused, first_ns, last_ns = select(
            f"count(*), total({SERVED}), total(error<>''), total({REFUSED_ERROR}), "
            "min(start_ns), max(start_ns)",
            "1",
        ).fetchone()
        if not slo_us:
            late = window_sample.count_late(served)
            row = select(
                "ttft_us", f"{SERVED} ORDER BY ttft_us DESC LIMIT 1 OFFSET ?", late
            ).fetchone()
            slo_us = row[0] if row else -1
        late = select("count(*)", f"{SERVED} AND ttft_us>?", slo_us).fetchone()[0]
        counts = {
            LATE: late,
            OTHER: int(served) - late,
            LOST: int(failed - refused),
            REFUSED: int(refused),
        }
        plan = SamplePlan(counts, limits)
        found: list[tuple[int, str]] = []
        for stratum, condition in (
            (LATE, f"{SERVED} AND ttft_us>{slo_us}"),
            (OTHER, f"{SERVED} AND ttft_us<={slo_us}"),
            (LOST, f"error<>'' AND NOT {REFUSED_ERROR}"),
        ):
            # By number, which is the order of arrival: the same at each reading.
            rows = select("id", f"{condition} ORDER BY id")
            found += [(number, stratum) for number in plan.choose(stratum, rows)]
        incomplete = int(total - served - failed)
        coverage = window_sample.Coverage(
            counts, plan.read, incomplete, first_ns or 0, last_ns or 0, slo_us
        )
        return WindowSample(coverage, self._read_rows(sorted(found), plan))

    def _read_rows(
        self, chosen: Sequence[tuple[int, str]], plan: SamplePlan
    ) -> Iterator[window_sample.ReadRequest]:
        """The requests in these rows, which are given with their stratum."""
        trace = -1
        requests: list[Request] = []
        spans: list[StoredSpan] = []
        for row, stratum in chosen:
            found, number, trace_id = self._connection.execute(
                "SELECT trace, number, (SELECT trace_id FROM traces WHERE traces.id=trace) "
                "FROM requests WHERE id=?",
                (row,),
            ).fetchone()
            if found != trace:
                trace = found
                requests, spans = self._assemble_stored(found, trace_id.hex())
            # Rows are of the last commit; the assembly may differ after an upgrade of the code.
            if number < len(requests):
                yield window_sample.ReadRequest(requests[number], spans, plan.get_weight(stratum))

    def find_request(self, request_id: str) -> Request | None:
        """The newest request with this ID; None when there is none.

        request_id: the caller's x-request-id, or the trace ID where it sent none, or the ID in vLLM's
        answer (`chatcmpl-` and the request ID).
        """
        for candidate in list_possible_ids(request_id):
            # As the column is cut; the whole ID is compared below.
            searched = _encode_value(candidate)
            for request in self._load_requests(
                # The second term lets SQLite use the partial index.
                "WHERE (request_id=? AND request_id<>'') OR "
                "(request_id='' AND trace=(SELECT id FROM traces WHERE trace_id=?))",
                (searched, _parse_id(candidate)),
                1,
            ):
                # Two long IDs may have the same first characters.
                if request.request_id == candidate:
                    return request
        return None

    def find_trace(self, trace_id: str) -> StoredTrace | None:
        """All spans and requests of a trace; None when no span of it is stored."""
        row = self._connection.execute(
            "SELECT id FROM traces WHERE trace_id=?", (_parse_id(trace_id),)
        ).fetchone()
        if row is None:
            return None
        return build_stored_trace(
            trace_id, TraceReader(self._connection, row[0], trace_id).list_spans()
        )

    def list_models(self) -> list[str]:
        """Names of models in the database, at most 100, for the page's filter."""
        rows = self._connection.execute(
            "SELECT DISTINCT model FROM requests WHERE model<>'' ORDER BY model LIMIT 100"
        )
        return [row[0] for row in rows]

    def count_rows(self) -> dict[str, int]:
        return database_schema.count_kept(self._connection)

    def _load_requests(self, where: str, values: Sequence[object], limit: int) -> list[Request]:
        """Assemble the newest requests that match a condition on the table `requests`, newest first."""
        rows = self._connection.execute(
            "SELECT trace, number, (SELECT trace_id FROM traces WHERE traces.id=trace) "
            f"FROM requests {where} ORDER BY start_ns DESC LIMIT ?",
            (*values, limit),
        ).fetchall()
        # A trace may have several of the requests: it is assembled once.
        built: dict[int, list[Request]] = {}
        for trace, _, trace_id in rows:
            if trace not in built:
                built[trace], _ = self._assemble_stored(trace, trace_id.hex())
        # Rows are of the last commit; the assembly may differ after an upgrade of the code.
        return [built[trace][number] for trace, number, _ in rows if number < len(built[trace])]

    def _assemble_stored(self, trace: int, trace_id: str) -> tuple[list[Request], list[StoredSpan]]:
        """A trace's requests, and its `ttft` and `encode` spans with all that are above these."""
        reader = TraceReader(self._connection, trace, trace_id)
        trunks, parents = reader.read_trunks()
        ancestors = request_assembly.collect_ancestors([trunk.span_id for trunk in trunks], parents)
        requests = request_assembly.assemble_requests(trace_id, trunks, parents)
        if any(each.stages.get(stages.RETRY) for each in requests):
            # Attempts that failed: nothing hangs below them, the router's span is above.
            beside = (span_id for span_id, above in parents.items() if above in ancestors)
            ancestors |= {*islice(beside, MAX_TRACE_TRUNKS)}
        # Only these: a trace may have thousands of other spans.
        spans = reader.list_spans({bytes.fromhex(span_id) for span_id in ancestors})
        above = {span.span_id: span for span in spans}
        every = above | {trunk.span_id: trunk for trunk in trunks}
        return request_assembly.add_before(requests, parents, above), list(every.values())


@contextmanager
def open_reader(path: Path) -> Iterator[DatabaseReader]:
    """Open the database at `path` for reading. Raises StoreError, whose text has the remedy."""
    with closing(database_schema.open_for_reading(path)) as connection:
        try:
            connection.execute("BEGIN")  # all queries of this reader see one snapshot
            yield DatabaseReader(connection)
        except sqlite3.Error as error:
            raise database_schema.StoreError(
                f"cannot read {path}: {error}; if it is damaged, move it away, "
                "or name another file with --db FILE"
            ) from error


def list_possible_ids(request_id: str) -> list[str]:
    """What a request may be stored under: the text itself, a trace ID, an ID in vLLM's answer."""
    possible = [request_id, request_id.lower()]  # trace IDs are stored in lower case
    # The full text first: a client may have chosen an ID that begins like vLLM's.
    possible += [
        request_id.removeprefix(prefix)
        for prefix in ANSWER_ID_PREFIXES
        if request_id.startswith(prefix)
    ]
    return list(dict.fromkeys(possible))


def build_stored_trace(trace_id: str, spans: Sequence[StoredSpan]) -> StoredTrace:
    """The trace that `spans`, all that are stored of it, make. Pure."""
    spans = foreign_spans.add_ttft_spans(spans, {span.span_id: span.parent_id for span in spans})
    parents = {span.span_id: span.parent_id for span in spans}
    # The same limit as when rows are written, so that numbers of requests agree.
    trunks = [span for span in spans if span.is_ttft_span][:MAX_TRACE_TRUNKS]
    requests = request_assembly.add_before(
        request_assembly.assemble_requests(trace_id, trunks, parents),
        parents,
        {span.span_id: span for span in spans},
    )
    return StoredTrace(
        trace_id, tuple(request_assembly.annotate_spans(spans, requests)), tuple(requests)
    )


def _parse_id(text: str) -> bytes:
    """The bytes of an ID in hex; b"", which no trace has, for other texts."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _encode_value(text: str) -> str:
    """A text as SQLite compares it with a column; bytes of a command line that are no UTF-8 match nothing."""
    return text[:MAX_SEARCHED_CHARS].encode(errors="backslashreplace").decode()


def _build_where(wanted: RequestFilter) -> tuple[str, list[str | int]]:
    error = {"any": "error<>''", "none": "error=''"}.get(wanted.error, "")
    # Values always as parameters: they come from a URL.
    given: tuple[tuple[str, str | int], ...] = (
        ("model=?", _encode_value(wanted.model)),
        # `roles` is a list of words: with spaces around it `decode` does not match `prefill_decode`.
        ("' '||roles||' ' LIKE ?", wanted.role and f"% {_encode_value(wanted.role)} %"),
        ("error=?", "" if error else _encode_value(wanted.error)),
        ("ttft_us>=?", wanted.min_us),
        ("start_ns>=?", wanted.since_ns),
        ("start_ns<?", wanted.until_ns),
    )
    parts = [condition for condition, value in given if value] + ([error] if error else [])
    values = [value for _, value in given if value]
    return ("WHERE " + " AND ".join(parts) if parts else ""), values
