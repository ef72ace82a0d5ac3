# SPDX-License-Identifier: Apache-2.0
"""Convert spans of OTLP to StoredSpans, with bounds on what one span can have.

otlp_decoder.py does so for reports that are read elsewhere, span_chunks.py when somebody reads a stored span.
Who held a waiting request (links and events of its span) is kept as one attribute, and read back here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Final

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from ttft_otel.model.names import keys, span_names
from ttft_otel.report.report_types import SPAN_KINDS, StoredSpan

MAX_ATTRIBUTES: Final = 256  # per span; a router's `ttft` span with four legs has about 80
MAX_TEXT_CHARS: Final = 4096  # of one name or value; longer ones are cut
# Of the JSON text of a list or map, for each byte received: control characters become six.
MAX_TEXT_GROWTH: Final = 4
MAX_TRACESTATE_CHARS: Final = 512  # W3C: what everybody should be able to pass on
SERVICE_NAME: Final = "service.name"  # OpenTelemetry's name
_MAX_TIME_NS: Final = 1 << 62  # SQLite's integers are signed, of 64 bits
_NO_TRACE_ID: Final = bytes(16)
NO_SPAN_ID: Final = bytes(8)
MAX_HOLDERS: Final = 8  # of one span; ours have three
MAX_ID_CHARS: Final = 256  # of a request ID: anybody can send spans
_FIELDS: Final = (
    ("us", keys.HELD_BY_US),
    ("tokens", keys.HELD_BY_TOKENS),
    ("kind", keys.HELD_BY_KIND),
    ("request_id", keys.HELD_BY_REQUEST_ID),
)


def find_fault(raw: trace_pb2.Span) -> str:
    """Why a span cannot be stored; "" when it can."""
    # W3C: all zeros is no valid ID.
    trace_id, span_id = raw.trace_id, raw.span_id
    if len(trace_id) != 16 or trace_id == _NO_TRACE_ID:
        return "a span without a valid trace id"
    if len(span_id) != 8 or span_id == NO_SPAN_ID:
        return "a span without a valid span id"
    if len(raw.parent_span_id) not in (0, 8):
        return "a span with an invalid parent id"
    if raw.start_time_unix_nano >= _MAX_TIME_NS or raw.end_time_unix_nano >= _MAX_TIME_NS:
        return "a span with a time out of range"
    return ""


def convert_span(raw: trace_pb2.Span, resource: dict[str, Any], scope: str) -> StoredSpan:
    """The span as it is shown; texts and attributes beyond the bounds are cut.

    resource: from read_attributes(). scope: name of its instrumentation scope.
    """
    attributes, cut = read_attributes(raw.attributes)
    if scope == span_names.SCOPE and (text := _write_holders(raw)):
        # Links and events have no column: they are for explanations, and few.
        attributes[keys.HELD_BY] = text
    return StoredSpan(
        trace_id=raw.trace_id.hex(),
        span_id=raw.span_id.hex(),
        parent_id=format_parent_id(raw.parent_span_id),
        name=raw.name[:MAX_TEXT_CHARS],
        kind=raw.kind if 0 <= raw.kind < len(SPAN_KINDS) else 0,  # enums of protobuf are open
        start_ns=raw.start_time_unix_nano,
        end_ns=max(raw.start_time_unix_nano, raw.end_time_unix_nano),  # never before its start
        service=str(resource.get(SERVICE_NAME, ""))[:MAX_TEXT_CHARS],
        scope=scope[:MAX_TEXT_CHARS],
        status=raw.status.code,
        message=raw.status.message[:MAX_TEXT_CHARS],
        attributes=attributes,
        resource=resource,
        dropped=cut + raw.dropped_attributes_count,
        trace_state=raw.trace_state[:MAX_TRACESTATE_CHARS],
    )


def build_raw_span(span: StoredSpan) -> trace_pb2.Span:
    """The span in OTLP, of which convert_span() makes the same again."""
    raw = trace_pb2.Span(
        trace_id=bytes.fromhex(span.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_id),
        name=span.name,
        kind=span.kind,  # type: ignore[arg-type]
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        status=trace_pb2.Status(code=span.status, message=span.message),  # type: ignore[arg-type]
        dropped_attributes_count=span.dropped,
        trace_state=span.trace_state,
    )
    for key, value in span.attributes.items():
        place = raw.attributes.add(key=key).value
        if isinstance(value, bool):
            place.bool_value = value
        elif isinstance(value, int):
            place.int_value = value
        elif isinstance(value, float):
            place.double_value = value
        else:
            place.string_value = value
    return raw


def format_parent_id(parent_id: bytes) -> str:
    """The ID in hex; "" for no parent, for which some senders write zeros."""
    return "" if parent_id == NO_SPAN_ID else parent_id.hex()


def read_attributes(pairs: Sequence[KeyValue]) -> tuple[dict[str, Any], int]:
    """The first MAX_ATTRIBUTES attributes, and how many were left out."""
    attributes = {
        pair.key[:MAX_TEXT_CHARS]: _convert_value(pair.value) for pair in pairs[:MAX_ATTRIBUTES]
    }
    return attributes, max(0, len(pairs) - MAX_ATTRIBUTES)


def _convert_value(value: AnyValue) -> Any:
    """A value for JSON; lists and maps become JSON text, because they are only displayed."""
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return value.string_value[:MAX_TEXT_CHARS]
    if kind == "bool_value":
        return value.bool_value
    if kind == "int_value":
        return value.int_value
    if kind == "double_value":
        number = value.double_value
        return number if math.isfinite(number) else str(number)  # JSON has no NaN and infinity
    if kind == "bytes_value":
        # Two hex digits for each byte.
        return value.bytes_value[: MAX_TEXT_CHARS // 2].hex()
    if kind is None:
        return ""
    text = json.dumps(_convert_nested(value, count(1)), ensure_ascii=False)
    return text[: min(MAX_TEXT_CHARS, MAX_TEXT_GROWTH * value.ByteSize())]


def _convert_nested(value: AnyValue, counted: Iterator[int]) -> Any:
    """counted: the number of each value. Each has a character of the text at least, which is cut."""
    if value.HasField("array_value"):
        return [
            _convert_nested(each, counted)
            for each in value.array_value.values[:MAX_TEXT_CHARS]
            if next(counted) <= MAX_TEXT_CHARS
        ]
    if value.HasField("kvlist_value"):
        return {
            each.key: _convert_nested(each.value, counted)
            for each in value.kvlist_value.values[:MAX_TEXT_CHARS]
            if next(counted) <= MAX_TEXT_CHARS
        }
    return _convert_value(value)


# Of microseconds and tokens, with the bound that a stage's length has (request_assembly.MAX_DURATION_US).
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 42)]


class StoredHolder(msgspec.Struct, frozen=True):
    """A request whose work another one waited for."""

    us: Count  #: of that work; of several waiting requests their sum
    tokens: Count
    kind: str  #: see stages.HOLDING_KINDS
    request_id: str
    # Of its server span, "" when it was not sampled.
    trace_id: str = ""
    span_id: str = ""
    delayed: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1  #: how many requests it held


def _write_holders(raw: trace_pb2.Span) -> str:
    """The holders in the links and events of a received span as JSON text; "" without any."""
    found = []
    events = [event for event in raw.events[:MAX_HOLDERS] if event.name == keys.HELD_BY]
    places: list[trace_pb2.Span.Link | trace_pb2.Span.Event] = [*raw.links[:MAX_HOLDERS], *events]
    for place in places:
        values = {each.key: each.value for each in place.attributes}
        if keys.HELD_BY_US not in values:
            continue
        holder: dict[str, Any] = {}
        for field, name in _FIELDS:
            value = values.get(name)
            if field in ("us", "tokens"):
                holder[field] = value.int_value if value is not None else 0
            else:
                holder[field] = value.string_value[:MAX_ID_CHARS] if value is not None else ""
        if isinstance(place, trace_pb2.Span.Link):
            holder |= {"trace_id": place.trace_id.hex(), "span_id": place.span_id.hex()}
        found.append(holder)
    found.sort(key=lambda holder: -holder["us"])
    return json.dumps(found[:MAX_HOLDERS], ensure_ascii=False) if found else ""


def read_holders(attributes: Mapping[str, Any]) -> list[StoredHolder]:
    """The holders of a stored span, the largest first; [] where there are none, or not in our form."""
    text = attributes.get(keys.HELD_BY)
    try:
        return msgspec.json.decode(text, type=list[StoredHolder]) if isinstance(text, str) else []
    except (msgspec.DecodeError, ValueError, RecursionError):
        return []  # an attribute of this name that somebody else has sent
