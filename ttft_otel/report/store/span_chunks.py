# SPDX-License-Identifier: Apache-2.0
"""Spans as the database keeps them: those of one trace, resource and scope together, in OTLP's own bytes.

otlp_decoder.py makes chunks of an export, span_rows.py writes them, trace_reader.py reads them. A span is
decoded when somebody reads it, which for most is never. Only `ttft` and `encode` spans, and what stands for
them in other products (foreign_spans.py), are decoded at once: requests are found by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ttft_otel.model.names import span_names
from ttft_otel.report.foreign.foreign_spans import is_known
from ttft_otel.report.report_types import TTFT_SPAN_NAMES, StoredSpan
from ttft_otel.report.store.span_conversion import (
    NO_SPAN_ID,
    build_raw_span,
    convert_span,
)

MAX_CHUNK_SPANS: Final = 512  # of one chunk, which is written and removed as a whole
# Of one span as it came. Larger ones are converted first, which cuts what is too long or too much.
MAX_RAW_BYTES: Final = 4096
SPAN_ID_BYTES: Final = 8
_ID_FIELDS: Final = ("trace_id", "span_id", "parent_span_id")
_encode: Final = msgspec.msgpack.Encoder().encode
# The items of a chunk, for decode_item(); a shared row is a resource (a dict) or a scope (a text).
decode_content: Final = msgspec.msgpack.Decoder().decode


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
        for part in _divide_spans(members):
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
            ordered = _put_first(part, trunks)
            ids = _join_ids([(raw.span_id, raw.parent_span_id) for raw in ordered])
            content = _encode([_pack_raw_span(raw, resource, scope) for raw in ordered])
            yield SpanChunk(trace_id, *ids, content, tuple(trunks.values()), *shared)


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


def decode_item(
    item: bytes, ids: tuple[bytes, bytes, bytes], resource: dict[str, Any], scope: str
) -> StoredSpan:
    """The span that an item of a chunk stands for.

    ids: of trace, span and parent. resource, scope: of its chunk.
    """
    raw = Span.FromString(item)
    raw.trace_id, raw.span_id, raw.parent_span_id = ids
    return convert_span(raw, resource, scope)


def select_places(chunk: SpanChunk, places: Sequence[int]) -> SpanChunk:
    """The chunk with the spans in these places only, which ascend."""
    span_ids, parent_ids = split_ids(chunk.span_ids), split_ids(chunk.parent_ids)
    content = decode_content(chunk.content)
    count = len(chunk.trunks)
    return chunk._replace(
        span_ids=b"".join([span_ids[place] for place in places]),
        parent_ids=b"".join([parent_ids[place] for place in places]),
        content=_encode([content[place] for place in places]),
        trunks=tuple(chunk.trunks[place] for place in places if place < count),
    )


def _join_ids(ids: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """IDs of spans, and of their parents, as they are stored."""
    span_ids = b"".join([span_id for span_id, _ in ids])
    return span_ids, b"".join([parent_id or NO_SPAN_ID for _, parent_id in ids])


def _divide_spans(spans: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(spans), MAX_CHUNK_SPANS):
        yield spans[start : start + MAX_CHUNK_SPANS]


def _put_first(spans: list[Any], places: Mapping[int, object]) -> list[Any]:
    """The spans in these places, then the others."""
    if not places:
        return spans
    others = [span for place, span in enumerate(spans) if place not in places]
    return [spans[place] for place in places] + others


def _pack_raw_span(raw: Span, resource: dict[str, Any], scope: str) -> bytes:
    """The item of a span; takes the IDs away from `raw`."""
    if raw.ByteSize() > MAX_RAW_BYTES:
        raw = build_raw_span(convert_span(raw, resource, scope))
    for field in _ID_FIELDS:
        raw.ClearField(field)
    return raw.SerializeToString()
