# SPDX-License-Identifier: Apache-2.0
"""The rows of the table `requests`, by which database_reader.py finds requests; span_store.py writes them.

They are recomputed from the spans whenever a trace has got more of them, so that spans may arrive in any
order. Their texts are cut: they are searched, and shown from the spans.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Final

from ttft_otel.report import request_assembly
from ttft_otel.report.report_types import Request
from ttft_otel.report.span_rows import select_parents, select_trunks

MAX_SEARCHED_CHARS: Final = 200  # of a request ID, model, error or list of roles


def write_requests(connection: sqlite3.Connection, traces: Mapping[bytes, int]) -> None:
    """Replace the request rows of these traces (number by trace ID)."""
    for trace_id, trace in traces.items():
        trunks = select_trunks(connection, trace, trace_id.hex())
        # Not yet, or never: spans of others alone make no request.
        if not trunks:
            continue
        parents = select_parents(connection, trace)
        # All anew: one more leg can change how requests are divided.
        connection.execute("DELETE FROM requests WHERE trace=?", (trace,))
        requests = request_assembly.assemble_requests(trace_id.hex(), trunks, parents)
        connection.executemany(
            "INSERT INTO requests (trace, number, request_id, start_ns, model, roles, ttft_us, "
            "error, pending) VALUES (?,?,?,?,?,?,?,?,?)",
            [_make_row(trace, number, request) for number, request in enumerate(requests)],
        )


def _make_row(trace: int, number: int, request: Request) -> tuple[object, ...]:
    # A request without an ID of its own is found by its trace.
    request_id = "" if request.request_id == request.trace_id else request.request_id
    return (
        *(trace, number, request_id[:MAX_SEARCHED_CHARS], request.start_ns),
        *(request.model[:MAX_SEARCHED_CHARS], " ".join(request.roles)[:MAX_SEARCHED_CHARS]),
        *(request.ttft_us, request.error[:MAX_SEARCHED_CHARS], int(request.pending)),
    )
