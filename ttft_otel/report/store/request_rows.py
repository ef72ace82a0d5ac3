# SPDX-License-Identifier: Apache-2.0
"""The rows of the table `requests`, by which database_reader.py finds requests; span_store.py writes them.

They are recomputed from the spans whenever a trace has got more of them, so that spans may arrive in any
order. Their texts are cut: they are searched, and shown from the spans.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Final

from ttft_otel.report.assemble import request_assembly
from ttft_otel.report.report_types import Request
from ttft_otel.report.store.span_rows import TouchedTrace
from ttft_otel.report.store.trace_reader import TraceReader

MAX_SEARCHED_CHARS: Final = 200  # of a request ID, model, error or list of roles


def write_requests(
    connection: sqlite3.Connection, traces: Iterable[tuple[bytes, TouchedTrace]]
) -> None:
    """Replace the request rows of these traces, which are named by their IDs."""
    rows: list[tuple[object, ...]] = []
    for trace_id, trace in traces:
        if not _can_change(trace):
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


def _can_change(trace: TouchedTrace) -> bool:
    # Spans of others alone make no request; those above a single leg change nothing in its row.
    return bool(trace.new_trunks) or trace.old_trunks > 1


def _assemble_trace(
    connection: sqlite3.Connection, trace_id: str, trace: TouchedTrace
) -> list[Request]:
    # By far the most have one leg, of which all is at hand; parents tell whose leg it is.
    if not trace.old_trunks and len(trace.new_trunks) == 1:
        return request_assembly.assemble_requests(trace_id, trace.new_trunks, {})
    reader = TraceReader(connection, trace.number, trace_id)
    trunks, parents = reader.list_trunks(), reader.list_parents()
    return request_assembly.assemble_requests(trace_id, trunks, parents)


def _make_row(trace: int, number: int, request: Request) -> tuple[object, ...]:
    # A request without an ID of its own is found by its trace.
    request_id = "" if request.request_id == request.trace_id else request.request_id
    return (
        *(trace, number, request_id[:MAX_SEARCHED_CHARS], request.start_ns),
        *(request.model[:MAX_SEARCHED_CHARS], " ".join(request.roles)[:MAX_SEARCHED_CHARS]),
        *(request.ttft_us, request.error[:MAX_SEARCHED_CHARS], int(request.pending)),
    )
