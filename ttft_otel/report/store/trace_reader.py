# SPDX-License-Identifier: Apache-2.0
"""Read the stored spans of one trace, for database_reader.py, and for span_rows.py while they are written.

span_rows.py has inserted them.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ttft_otel.report.foreign import foreign_spans
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.store.span_chunks import decode_content, decode_item, split_ids
from ttft_otel.report.store.span_conversion import format_parent_id

MAX_TRACE_TRUNKS: Final = 1000  # spans of one trace of which requests are made


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
        return foreign_spans.make_trunks(told, parents)

    def _decode_spans(self, chunk: StoredChunk, places: Sequence[int]) -> Iterator[StoredSpan]:
        if not places:
            return
        resource, scope = self._load_shared(chunk.resource), self._load_shared(chunk.scope)
        run = self._connection.execute
        row = run("SELECT content FROM chunks WHERE id=?", (chunk.number,)).fetchone()
        items = decode_content(row[0])
        for place in places:
            ids = self._trace_id, chunk.span_ids[place], chunk.parent_ids[place]
            yield decode_item(items[place], ids, resource, scope)

    def _load_shared(self, number: int) -> Any:
        # Once: a trace may have thousands of chunks with one large resource.
        if number not in self._shared:
            row = self._connection.execute("SELECT content FROM shared WHERE id=?", (number,))
            self._shared[number] = decode_content(row.fetchone()[0])
        return self._shared[number]


def get_time_order(span: StoredSpan) -> tuple[int, int, str]:
    """What spans are sorted by: of those that begin together the longer one is the parent."""
    return span.start_ns, -span.end_ns, span.span_id
