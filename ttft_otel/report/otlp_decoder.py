# SPDX-License-Identifier: Apache-2.0
"""Decode OTLP trace exports, protobuf or JSON, into StoredSpans.

Spans that cannot be stored (without IDs, times out of range) are refused one by one, which OTLP
calls partial success.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from ttft_otel import names
from ttft_otel.report.report_types import SPAN_KINDS, StoredSpan
from ttft_otel.report.stored_holders import write_holders

MAX_EXPORT_SPANS: Final = 20_000  # of one export, further ones are refused; the SDK sends 512
# Values of a JSON body, by its commas and brackets: json holds the interpreter while it builds them.
MAX_JSON_VALUES: Final = 200_000
MAX_ATTRIBUTES: Final = 256  # per span; a router's `ttft` span with four legs has about 80
MAX_TEXT_CHARS: Final = 4096  # of one name or value; longer ones are cut
# Of the JSON text of a list or map, for each byte received: control characters become six.
MAX_TEXT_GROWTH: Final = 4
_IDS: Final = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_EXPORT_FULL: Final = f"more than {MAX_EXPORT_SPANS} spans in one export"
_MAX_TIME_NS: Final = 1 << 62  # SQLite's integers are signed, of 64 bits


class OtlpDecodeError(ValueError):
    """The body is not an ExportTraceServiceRequest."""


@dataclass(slots=True)
class SpanBatch:
    """The spans of one export; `refusal_reason` is the reason for the first refused span."""

    spans: list[StoredSpan] = field(default_factory=list)
    refused: int = 0
    refusal_reason: str = ""


def decode_export(data: bytes, as_json: bool = False) -> SpanBatch:
    """Decode one export. Raises OtlpDecodeError when it is not OTLP.

    as_json: `data` is OTLP/JSON, else protobuf.
    """
    message = _parse_json(data) if as_json else _parse_protobuf(data)
    batch = SpanBatch()
    for group in message.resource_spans:
        # One dict for all its spans: encode_spans() knows it by identity.
        resource = _read_attributes(group.resource.attributes)[0]
        service = str(resource.get("service.name", ""))
        for scope in group.scope_spans:
            for raw in scope.spans:
                # Counted on, so that the answer tells how many were refused.
                is_full = len(batch.spans) >= MAX_EXPORT_SPANS
                if fault := _EXPORT_FULL if is_full else _find_fault(raw):
                    batch.refused += 1
                    batch.refusal_reason = batch.refusal_reason or fault
                else:
                    batch.spans.append(_make_span(raw, service, scope.scope.name, resource))
    return batch


def build_export_response(refused: int, reason: str) -> ExportTraceServiceResponse:
    """The success message; a partial success when `refused` spans were not stored, for `reason`."""
    response = ExportTraceServiceResponse()
    if refused:
        response.partial_success.rejected_spans = refused
        response.partial_success.error_message = reason
    return response


def _parse_protobuf(data: bytes) -> ExportTraceServiceRequest:
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


def _find_fault(raw: trace_pb2.Span) -> str:
    """Why a span cannot be stored; "" when it can."""
    # W3C: all zeros is no valid ID.
    if len(raw.trace_id) != 16 or not any(raw.trace_id):
        return "a span without a valid trace id"
    if len(raw.span_id) != 8 or not any(raw.span_id):
        return "a span without a valid span id"
    if len(raw.parent_span_id) not in (0, 8):
        return "a span with an invalid parent id"
    if max(raw.start_time_unix_nano, raw.end_time_unix_nano) >= _MAX_TIME_NS:
        return "a span with a time out of range"
    return ""


def _make_span(
    raw: trace_pb2.Span, service: str, scope: str, resource: dict[str, Any]
) -> StoredSpan:
    attributes, cut = _read_attributes(raw.attributes)
    if scope == names.SCOPE and (text := write_holders(raw)):
        # Links and events have no column: they are for explanations, and few.
        attributes[names.HELD_BY] = text
    return StoredSpan(
        trace_id=raw.trace_id.hex(),
        span_id=raw.span_id.hex(),
        parent_id=raw.parent_span_id.hex(),
        name=raw.name[:MAX_TEXT_CHARS],
        kind=raw.kind if 0 <= raw.kind < len(SPAN_KINDS) else 0,  # enums of protobuf are open
        start_ns=raw.start_time_unix_nano,
        end_ns=max(raw.start_time_unix_nano, raw.end_time_unix_nano),  # never before its start
        service=service[:MAX_TEXT_CHARS],
        scope=scope[:MAX_TEXT_CHARS],
        status=raw.status.code,
        message=raw.status.message[:MAX_TEXT_CHARS],
        attributes=attributes,
        resource=resource,
        dropped=cut + raw.dropped_attributes_count,
    )


def _read_attributes(pairs: Iterable[KeyValue]) -> tuple[dict[str, Any], int]:
    """At most MAX_ATTRIBUTES attributes, and how many were left out."""
    attributes: dict[str, Any] = {}
    cut = 0
    for pair in pairs:
        if len(attributes) >= MAX_ATTRIBUTES:
            cut += 1
        else:
            attributes[pair.key[:MAX_TEXT_CHARS]] = _convert_value(pair.value)
    return attributes, cut


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
    text = json.dumps(_convert_nested(value), ensure_ascii=False)
    return text[: min(MAX_TEXT_CHARS, MAX_TEXT_GROWTH * value.ByteSize())]


def _convert_nested(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return [_convert_nested(each) for each in value.array_value.values]
    if value.HasField("kvlist_value"):
        return {each.key: _convert_nested(each.value) for each in value.kvlist_value.values}
    return _convert_value(value)
