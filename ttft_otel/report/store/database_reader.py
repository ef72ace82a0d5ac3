# SPDX-License-Identifier: Apache-2.0
"""Read the database: requests by filter, by request ID or by trace ID, and the spans of a trace.

Each reader opens its own connection, so that a command can read while `serve` writes.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ttft_otel.model import stages
from ttft_otel.report.assemble import request_assembly
from ttft_otel.report.foreign import products
from ttft_otel.report.receive.otlp_decoder import (
    convert_span,
    decode_content,
    format_parent_id,
    split_ids,
)
from ttft_otel.report.report_types import (
    LATE,
    LOST,
    OTHER,
    REFUSED,
    Coverage,
    ReadRequest,
    Request,
    SamplePlan,
    StoredSpan,
    WindowSample,
    count_late,
)
from ttft_otel.report.store import database_schema
from ttft_otel.report.store.database_schema import MAX_SEARCHED_CHARS

ANSWER_ID_PREFIXES: Final = ("chatcmpl-", "cmpl-")  # vLLM puts them before the request ID
MAX_TRACE_TRUNKS: Final = 1000  # spans of one trace of which requests are made
MAX_REQUESTS: Final = 2000  # requests in one result
SERVED: Final = "error='' AND NOT pending"  # requests that got a first token
# A request's trace, its number in the trace, and the trace's ID.
ROW: Final = "trace, number, (SELECT trace_id FROM traces WHERE traces.id=trace) FROM requests"
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


class StoredChunk(NamedTuple):
    """A row of the table `chunks`, without its spans' content."""

    number: int  #: of its row
    trunks: int
    span_ids: list[bytes]  #: of its spans, in their order
    parent_ids: list[bytes]  #: likewise
    resource: int  #: number of the row in `shared`
    scope: int  #: likewise


class TraceReader:
    """The stored spans of one trace, which are decoded chunk by chunk when they are asked for.

    To be used within one transaction. trace: its number in the table `traces`. trace_id: in hex.
    """

    def __init__(self, connection: sqlite3.Connection, trace: int, trace_id: str) -> None:
        self._connection = connection
        self._trace_id = bytes.fromhex(trace_id)
        self._shared: dict[int, Any] = {}
        rows = connection.execute(
            "SELECT id, trunks, span_ids, parent_ids, resource, scope FROM chunks WHERE trace=?",
            (trace,),
        )
        self._chunks = [
            StoredChunk(number, trunks, split_ids(span_ids), split_ids(parent_ids), *shared)
            for number, trunks, span_ids, parent_ids, *shared in rows
        ]

    def list_spans(self, wanted: Collection[bytes] | None = None) -> list[StoredSpan]:
        """Its spans in time order, all or those with the `wanted` IDs."""
        spans: list[StoredSpan] = []
        for chunk in self._chunks:
            places = [
                place
                for place, span_id in enumerate(chunk.span_ids)
                if wanted is None or span_id in wanted
            ]
            spans += self._decode_spans(chunk, places)
        return sorted(spans, key=get_time_order)

    def read_trunks(self) -> tuple[list[StoredSpan], dict[str, str]]:
        """Its `ttft` and `encode` spans, and parent ID by span ID of all its spans, in hex; "" for roots.

        The first MAX_TRACE_TRUNKS of those of which requests are made.
        """
        spans = (
            span
            for chunk in self._chunks
            for span in self._decode_spans(chunk, range(chunk.trunks))
        )
        # Never more than these at once: a hostile trace has 20 000.
        told = heapq.nsmallest(MAX_TRACE_TRUNKS, spans, key=get_time_order)
        parents = {
            span_id.hex(): format_parent_id(parent_id)
            for chunk in self._chunks
            for span_id, parent_id in zip(chunk.span_ids, chunk.parent_ids, strict=True)
        }
        return products.make_trunks(told, parents)

    def _decode_spans(self, chunk: StoredChunk, places: Sequence[int]) -> Iterator[StoredSpan]:
        if not places:
            return
        resource, scope = self._load_shared(chunk.resource), self._load_shared(chunk.scope)
        run = self._connection.execute
        row = run("SELECT content FROM chunks WHERE id=?", (chunk.number,)).fetchone()
        items = decode_content(row[0])
        for place in places:
            raw = Span.FromString(items[place])
            raw.trace_id, raw.span_id = self._trace_id, chunk.span_ids[place]
            raw.parent_span_id = chunk.parent_ids[place]
            yield convert_span(raw, resource, scope)

    def _load_shared(self, number: int) -> Any:
        # Once: a trace may have thousands of chunks with one large resource.
        if number not in self._shared:
            row = self._connection.execute("SELECT content FROM shared WHERE id=?", (number,))
            self._shared[number] = decode_content(row.fetchone()[0])
        return self._shared[number]


def get_time_order(span: StoredSpan) -> tuple[int, int, str]:
    """What spans are sorted by: of those that begin together the longer one is the parent."""
    return span.start_ns, -span.end_ns, span.span_id


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
            late = count_late(served)
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
        coverage = Coverage(counts, plan.read, incomplete, first_ns or 0, last_ns or 0, slo_us)
        return WindowSample(coverage, self._read_rows(sorted(found), plan))

    def _read_rows(
        self, chosen: Sequence[tuple[int, str]], plan: SamplePlan
    ) -> Iterator[ReadRequest]:
        """The requests in these rows, which are given with their stratum."""
        trace = -1
        requests: list[Request] = []
        spans: list[StoredSpan] = []
        for row, stratum in chosen:
            found, number, trace_id = self._connection.execute(
                f"SELECT {ROW} WHERE id=?", (row,)
            ).fetchone()
            if found != trace:
                trace = found
                requests, spans = self._assemble_stored(found, trace_id.hex())
            # Rows are of the last commit; the assembly may differ after an upgrade of the code.
            if number < len(requests):
                yield ReadRequest(requests[number], spans, plan.get_weight(stratum))

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
        """The number of traces, spans and requests; what is left of removed traces is not counted."""
        traces, spans, requests = self._connection.execute(
            "SELECT count(*), coalesce(sum(spans), 0), (SELECT count(*) FROM requests) FROM traces"
        ).fetchone()
        return {"traces": traces, "spans": spans, "requests": requests}

    def _load_requests(self, where: str, values: Sequence[object], limit: int) -> list[Request]:
        """Assemble the newest requests that match a condition on the table `requests`, newest first."""
        rows = self._connection.execute(
            f"SELECT {ROW} {where} ORDER BY start_ns DESC LIMIT ?", (*values, limit)
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
    spans = products.add_ttft_spans(spans, {span.span_id: span.parent_id for span in spans})
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
