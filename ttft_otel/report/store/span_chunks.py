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
    SERVICE_NAME,
    convert_span,
    format_parent_id,
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
    #: A MessagePack list: of each span OTLP's bytes without these IDs, or a list of its values.
    content: bytes
    #: The spans of which requests are made, which are the first ones in that order.
    trunks: tuple[StoredSpan, ...]
    resource: bytes  #: content of its row in `shared`
    scope: bytes  #: likewise

    @property
    def span_count(self) -> int:
        """Number of its spans."""
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


def encode_spans(spans: Iterable[StoredSpan]) -> list[SpanChunk]:
    """Chunks of decoded spans. A resource that several of them share is encoded once."""
    # Identity is safe: the spans keep the dicts alive for as long as this runs.
    groups: dict[tuple[str, int, str], list[StoredSpan]] = {}
    resources: dict[int, bytes] = {}
    for span in spans:
        groups.setdefault((span.trace_id, id(span.resource), span.scope), []).append(span)
    chunks = []
    for (trace_id, identity, scope), members in groups.items():
        if identity not in resources:
            resources[identity] = _encode(members[0].resource)
        for part in _divide_spans(members):
            trunks = {
                place: span
                for place, span in enumerate(part)
                if span.is_ttft_span or is_known(span.scope, span.name)
            }
            ordered = _put_first(part, trunks)
            ids = [(bytes.fromhex(span.span_id), bytes.fromhex(span.parent_id)) for span in ordered]
            chunks.append(
                SpanChunk(
                    bytes.fromhex(trace_id),
                    *_join_ids(ids),
                    _encode([_list_values(span) for span in ordered]),
                    tuple(trunks.values()),
                    resources[identity],
                    _encode(scope),
                )
            )
    return chunks


def split_ids(joined: bytes) -> list[bytes]:
    """The IDs in a chunk's `span_ids` or `parent_ids`; of the latter NO_SPAN_ID for roots."""
    return [joined[start : start + SPAN_ID_BYTES] for start in range(0, len(joined), SPAN_ID_BYTES)]


def decode_item(
    item: Any, ids: tuple[bytes, bytes, bytes], resource: dict[str, Any], scope: str
) -> StoredSpan:
    """The span that an item of a chunk stands for.

    ids: of trace, span and parent. resource, scope: of its chunk.
    """
    if isinstance(item, bytes):
        raw = Span.FromString(item)
        raw.trace_id, raw.span_id, raw.parent_span_id = ids
        return convert_span(raw, resource, scope)
    name, kind, start_ns, end_ns, status, message, attributes, dropped, trace_state = item
    return StoredSpan(
        trace_id=ids[0].hex(),
        span_id=ids[1].hex(),
        parent_id=format_parent_id(ids[2]),
        name=name,
        kind=kind,
        start_ns=start_ns,
        end_ns=end_ns,
        service=str(resource.get(SERVICE_NAME, "")),
        scope=scope,
        status=status,
        message=message,
        attributes=attributes,
        resource=resource,
        dropped=dropped,
        trace_state=trace_state,
    )


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


def _pack_raw_span(raw: Span, resource: dict[str, Any], scope: str) -> bytes | tuple[object, ...]:
    """The item of a span; takes the IDs away from `raw`."""
    for field in _ID_FIELDS:
        raw.ClearField(field)
    data = raw.SerializeToString()
    if len(data) <= MAX_RAW_BYTES:
        return data
    return _list_values(convert_span(raw, resource, scope))


def _list_values(span: StoredSpan) -> tuple[object, ...]:
    """What decode_item() reads; the rest is in the chunk."""
    return (
        span.name,
        span.kind,
        span.start_ns,
        span.end_ns,
        span.status,
        span.message,
        span.attributes,
        span.dropped,
        span.trace_state,
    )
