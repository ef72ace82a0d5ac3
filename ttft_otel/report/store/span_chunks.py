# SPDX-License-Identifier: Apache-2.0
"""Spans as the database keeps them: those of one trace, resource and scope together, in OTLP's own bytes.

otlp_decoder.py makes chunks of an export, span_rows.py writes them, database_reader.py reads a trace of
them. A span is decoded when somebody reads it, which for most is never. Only `ttft` and `encode` spans,
and what stands for them in other products (foreign_spans.py), are decoded at once: requests are found by
them.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ttft_otel.model.names import span_names
from ttft_otel.report.foreign import foreign_spans
from ttft_otel.report.foreign.foreign_spans import is_known
from ttft_otel.report.report_types import TTFT_SPAN_NAMES, StoredSpan
from ttft_otel.report.store.span_conversion import (
    NO_SPAN_ID,
    build_raw_span,
    convert_span,
    format_parent_id,
)

MAX_CHUNK_SPANS: Final = 512  # of one chunk, which is written and removed as a whole
# Of one span as it came. Larger ones are converted first, which cuts what is too long or too much.
MAX_RAW_BYTES: Final = 4096
MAX_TRACE_TRUNKS: Final = 1000  # spans of one trace of which requests are made
SPAN_ID_BYTES: Final = 8
_ID_FIELDS: Final = ("trace_id", "span_id", "parent_span_id")
_encode: Final = msgspec.msgpack.Encoder().encode
# The items of a chunk; a shared row is a resource (a dict) or a scope (a text).
_decode: Final = msgspec.msgpack.Decoder().decode


class SpanChunk(NamedTuple):
    """Spans of one trace, resource and scope."""

    trace_id: bytes
    span_ids: bytes  #: of all spans, in the order of `content`
    parent_ids: bytes  #: likewise, zeros for no parent
    #: A MessagePack list: of each span OTLP's bytes without these IDs.
    content: bytes
    #: The spans of which requests are made, which are the first ones in that order.
    trunks: tuple[StoredSpan, ...]
    resource: bytes  #: content of its row in `shared`
    scope: bytes  #: likewise

    @property
    def span_count(self) -> int:
        return len(self.span_ids) // SPAN_ID_BYTES


def chunk_raw_spans(
    spans: Iterable[Span], resource: dict[str, Any], scope: str
) -> Iterator[SpanChunk]:
    """Chunks of the spans of one resource and scope; `resource` and `scope` as for convert_span().

    Removes links and events from spans of others.
    """
    shared = _encode(resource), _encode(scope)
    by_trace: dict[bytes, list[Span]] = {}
    for raw in spans:
        by_trace.setdefault(raw.trace_id, []).append(raw)
    for trace_id, members in by_trace.items():
        for start in range(0, len(members), MAX_CHUNK_SPANS):
            part = members[start : start + MAX_CHUNK_SPANS]
            trunks: dict[int, StoredSpan] = {}  # by place in `part`
            is_ours = scope == span_names.SCOPE
            for place, raw in enumerate(part):
                # Asked of the name first: to convert a span takes longer than all the rest.
                if raw.name in TTFT_SPAN_NAMES if is_ours else is_known(scope, raw.name):
                    span = convert_span(raw, resource, scope)
                    if span.is_ttft_span or not is_ours:
                        trunks[place] = span
                if not is_ours:
                    # Nothing reads them: only our spans have holders there (span_conversion.py).
                    raw.ClearField("events")
                    raw.ClearField("links")
            others = [raw for place, raw in enumerate(part) if place not in trunks]
            ordered = [*(part[place] for place in trunks), *others]
            span_ids = b"".join([raw.span_id for raw in ordered])
            parent_ids = b"".join([raw.parent_span_id or NO_SPAN_ID for raw in ordered])
            content = _encode([_pack_raw_span(raw, resource, scope) for raw in ordered])
            yield SpanChunk(
                trace_id, span_ids, parent_ids, content, tuple(trunks.values()), *shared
            )


def chunk_spans(spans: Iterable[StoredSpan]) -> Iterator[SpanChunk]:
    """Chunks of decoded spans; those that share a resource, by identity, are in the same ones."""
    groups: dict[tuple[int, str], list[StoredSpan]] = {}
    for span in spans:
        groups.setdefault((id(span.resource), span.scope), []).append(span)
    for members in groups.values():
        raw = [build_raw_span(span) for span in members]
        yield from chunk_raw_spans(raw, members[0].resource, members[0].scope)


def split_ids(joined: bytes) -> list[bytes]:
    """The IDs in a chunk's `span_ids` or `parent_ids`; of the latter NO_SPAN_ID for roots."""
    return [joined[start : start + SPAN_ID_BYTES] for start in range(0, len(joined), SPAN_ID_BYTES)]


def select_places(chunk: SpanChunk, places: Sequence[int]) -> SpanChunk:
    """The chunk with the spans in these places only, which ascend."""
    span_ids, parent_ids = split_ids(chunk.span_ids), split_ids(chunk.parent_ids)
    content = _decode(chunk.content)
    count = len(chunk.trunks)
    return chunk._replace(
        span_ids=b"".join([span_ids[place] for place in places]),
        parent_ids=b"".join([parent_ids[place] for place in places]),
        content=_encode([content[place] for place in places]),
        trunks=tuple(chunk.trunks[place] for place in places if place < count),
    )


def _pack_raw_span(raw: Span, resource: dict[str, Any], scope: str) -> bytes:
    """The item of a span; takes the IDs away from `raw`."""
    if raw.ByteSize() > MAX_RAW_BYTES:
        raw = build_raw_span(convert_span(raw, resource, scope))
    for field in _ID_FIELDS:
        raw.ClearField(field)
    return raw.SerializeToString()


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
        items = _decode(row[0])
        for place in places:
            raw = Span.FromString(items[place])
            raw.trace_id, raw.span_id = self._trace_id, chunk.span_ids[place]
            raw.parent_span_id = chunk.parent_ids[place]
            yield convert_span(raw, resource, scope)

    def _load_shared(self, number: int) -> Any:
        # Once: a trace may have thousands of chunks with one large resource.
        if number not in self._shared:
            row = self._connection.execute("SELECT content FROM shared WHERE id=?", (number,))
            self._shared[number] = _decode(row.fetchone()[0])
        return self._shared[number]


def get_time_order(span: StoredSpan) -> tuple[int, int, str]:
    """What spans are sorted by: of those that begin together the longer one is the parent."""
    return span.start_ns, -span.end_ns, span.span_id
