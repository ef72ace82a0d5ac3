# SPDX-License-Identifier: Apache-2.0
"""Decode OTLP trace exports, protobuf or JSON: into StoredSpans, or into chunks for the database.

receiver.py and tempo_source.py have the exports. A chunk has the spans of one trace, resource and scope, in
OTLP's own bytes; database_reader.py decodes a span when somebody reads it, which for most is never. Only
`ttft` and `encode` spans, and what stands for them in other products, are decoded at once: requests are
found by them. Spans that cannot be stored (without IDs, times out of range) are refused one by one, which
OTLP calls partial success. Who held a waiting request (links and events of its span) is kept as one
attribute, and read back here.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from ttft_otel.model.names import keys, span_names
from ttft_otel.report.foreign.products import is_known
from ttft_otel.report.report_types import SPAN_KINDS, TTFT_SPAN_NAMES, StoredSpan

MAX_EXPORT_SPANS: Final = 20_000  # of one export, further ones are refused; the SDK sends 512
# Resources and scopes of one export; a collector sends some hundred.
MAX_EXPORT_GROUPS: Final = 5_000
# Values of a JSON body, by its commas and brackets: json keeps the interpreter while it builds them.
MAX_JSON_VALUES: Final = 200_000
_IDS: Final = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_EXPORT_FULL: Final = f"more than {MAX_EXPORT_SPANS} spans in one export"
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
_HOLDER_FIELDS: Final = (
    ("us", keys.HELD_BY_US),
    ("tokens", keys.HELD_BY_TOKENS),
    ("kind", keys.HELD_BY_KIND),
    ("request_id", keys.HELD_BY_REQUEST_ID),
)
MAX_CHUNK_SPANS: Final = 512  # of one chunk, which is written and removed as a whole
# Of one span as it came. Larger ones are converted first, which cuts what is too long or too much.
MAX_RAW_BYTES: Final = 4096
SPAN_ID_BYTES: Final = 8
_ID_FIELDS: Final = ("trace_id", "span_id", "parent_span_id")
_encode: Final = msgspec.msgpack.Encoder().encode
# The items of a chunk; a shared row is a resource (a dict) or a scope (a text).
decode_content: Final = msgspec.msgpack.Decoder().decode


def find_fault(raw: Span) -> str:
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


def convert_span(raw: Span, resource: dict[str, Any], scope: str) -> StoredSpan:
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


def build_raw_span(span: StoredSpan) -> Span:
    """The span in OTLP, of which convert_span() makes the same again."""
    raw = Span(
        trace_id=bytes.fromhex(span.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_id),
        name=span.name,
        kind=span.kind,  # type: ignore[arg-type]
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        status=Status(code=span.status, message=span.message),  # type: ignore[arg-type]
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


def _write_holders(raw: Span) -> str:
    """The holders in the links and events of a received span as JSON text; "" without any."""
    found = []
    events = [event for event in raw.events[:MAX_HOLDERS] if event.name == keys.HELD_BY]
    places: list[Span.Link | Span.Event] = [*raw.links[:MAX_HOLDERS], *events]
    for place in places:
        values = {each.key: each.value for each in place.attributes}
        if keys.HELD_BY_US not in values:
            continue
        holder: dict[str, Any] = {}
        for part, name in _HOLDER_FIELDS:
            value = values.get(name)
            if part in ("us", "tokens"):
                holder[part] = value.int_value if value is not None else 0
            else:
                holder[part] = value.string_value[:MAX_ID_CHARS] if value is not None else ""
        if isinstance(place, Span.Link):
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
                    # Nothing reads them: only our spans have holders there.
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
    content = decode_content(chunk.content)
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
    for name in _ID_FIELDS:
        raw.ClearField(name)
    return raw.SerializeToString()


class OtlpDecodeError(ValueError):
    """The body is not an ExportTraceServiceRequest, or not encoded as its Content-Encoding says."""


@dataclass(slots=True)
class ExportBatch:
    """The spans of one export, decoded or as chunks for the store."""

    spans: list[StoredSpan] = field(default_factory=list)  #: of decode_export()
    chunks: list[SpanChunk] = field(default_factory=list)  #: of chunk_export()
    accepted: int = 0  #: number of spans that can be stored
    refused: int = 0  #: number of the others
    refusal_reason: str = ""  #: why the first of these was refused

    def iterate_groups(
        self, message: ExportTraceServiceRequest
    ) -> Iterator[tuple[dict[str, Any], str, list[Span]]]:
        """Resource, name of the scope, and spans that can be stored, of each scope that has any."""
        # Two bytes make an empty one, of which Python's objects would take seconds.
        group_count = len(message.resource_spans)
        if group_count <= MAX_EXPORT_GROUPS:
            group_count += sum(len(group.scope_spans) for group in message.resource_spans)
        if group_count > MAX_EXPORT_GROUPS:
            raise OtlpDecodeError(
                f"more than {MAX_EXPORT_GROUPS} resources and scopes in one export"
            )
        for group in message.resource_spans:
            resource = read_attributes(group.resource.attributes)[0]
            for scope in group.scope_spans:
                if spans := self._accept_spans(scope.spans):
                    yield resource, scope.scope.name[:MAX_TEXT_CHARS], spans

    def _accept_spans(self, spans: Sequence[Span]) -> list[Span]:
        accepted: list[Span] = []
        left = max(0, MAX_EXPORT_SPANS - self.accepted - self.refused)
        for raw in spans[:left]:
            if fault := find_fault(raw):
                self.refused += 1
                self.refusal_reason = self.refusal_reason or fault
            else:
                accepted.append(raw)
        # Spans beyond the limit are counted, so that the answer says how many were refused.
        if len(spans) > left:
            self.refused += len(spans) - left
            self.refusal_reason = self.refusal_reason or _EXPORT_FULL
        self.accepted += len(accepted)
        return accepted


def decode_export(data: bytes, as_json: bool = False) -> ExportBatch:
    """Decode one export with all its spans. Raises OtlpDecodeError when it is not OTLP.

    as_json: `data` is OTLP/JSON, else protobuf.
    """
    batch = ExportBatch()
    # One dict for all spans of a resource: chunk_spans() knows it by identity.
    for resource, scope, group in batch.iterate_groups(_parse_export(data, as_json)):
        batch.spans += [convert_span(raw, resource, scope) for raw in group]
    return batch


def chunk_export(data: bytes, as_json: bool = False) -> ExportBatch:
    """Check one export and divide it into chunks for the store; arguments and errors as decode_export()."""
    batch = ExportBatch()
    for resource, scope, group in batch.iterate_groups(_parse_export(data, as_json)):
        batch.chunks += chunk_raw_spans(group, resource, scope)
    return batch


def _parse_export(data: bytes, as_json: bool) -> ExportTraceServiceRequest:
    if as_json:
        return _parse_json(data)
    try:
        return ExportTraceServiceRequest.FromString(data)
    except DecodeError as error:
        raise OtlpDecodeError(f"not an OTLP protobuf message: {error}") from error


def _parse_json(data: bytes) -> ExportTraceServiceRequest:
    """OTLP/JSON is protobuf's JSON mapping with one exception: IDs are hex, not base64."""
    # Before parsing: counting bytes takes milliseconds, building a million objects takes seconds.
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise OtlpDecodeError(
            f"more than {MAX_JSON_VALUES} values in JSON; send smaller batches, or protobuf"
        )
    try:
        tree = json.loads(data)
        if not isinstance(tree, dict):
            raise OtlpDecodeError("not an OTLP JSON object")
        for span in _iterate_raw_spans(tree):
            for key in _IDS:
                if key in span:
                    # ParseDict() expects base64 for bytes; OTLP/JSON alone writes hex.
                    span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
        return json_format.ParseDict(tree, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise OtlpDecodeError(f"not OTLP JSON: {error}") from error


def _iterate_raw_spans(tree: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for group in _get_either(tree, "resourceSpans", "resource_spans"):
        for scope in _get_either(group, "scopeSpans", "scope_spans"):
            yield from _get_either(scope, "spans", "spans")


def _get_either(tree: Mapping[str, Any], first: str, second: str) -> Iterable[Any]:
    # protobuf's JSON allows both spellings of a field.
    return tree.get(first) or tree.get(second) or ()
