# SPDX-License-Identifier: Apache-2.0
"""OTLP bytes, protobuf or JSON -> Spans and a count of refusals; from receiver.py to store.py.

Spans that cannot be stored (no ids, times out of range) are refused one by one: partial success.
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

from ttft_otel.report.shape import Span

ATTRIBUTES: Final = 256  # per span; a router with four legs has about 80
TEXT: Final = 4096  # characters of one value
_IDS: Final = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_LAST_NS: Final = 1 << 62


class Bad(ValueError):
    """Bytes that are no ExportTraceServiceRequest."""


@dataclass(slots=True)
class Batch:
    """What one export held. `why` names the first reason for refusing a span."""

    spans: list[Span] = field(default_factory=list)
    refused: int = 0
    why: str = ""


def read(data: bytes, as_json: bool = False) -> Batch:
    """Decode one export. Raises Bad when it is not OTLP at all."""
    message = _json(data) if as_json else _binary(data)
    batch = Batch()
    for group in message.resource_spans:
        resource = _attributes(group.resource.attributes)[0]
        service = str(resource.get("service.name", ""))
        for scope in group.scope_spans:
            for raw in scope.spans:
                if why := _wrong(raw):
                    batch.refused += 1
                    batch.why = batch.why or why
                else:
                    batch.spans.append(_span(raw, service, scope.scope.name, resource))
    return batch


def answer(refused: int, why: str) -> ExportTraceServiceResponse:
    """The success message, partial when spans were refused."""
    response = ExportTraceServiceResponse()
    if refused:
        response.partial_success.rejected_spans = refused
        response.partial_success.error_message = why
    return response


def _binary(data: bytes) -> ExportTraceServiceRequest:
    try:
        return ExportTraceServiceRequest.FromString(data)
    except DecodeError as error:
        raise Bad(f"not an OTLP protobuf message: {error}") from error


def _json(data: bytes) -> ExportTraceServiceRequest:
    """OTLP/JSON is protobuf's JSON with one exception: ids are hex, not base64."""
    try:
        tree = json.loads(data)
        if not isinstance(tree, dict):
            raise Bad("not an OTLP JSON object")
        for span in _raw_spans(tree):
            for key in _IDS:
                if key in span:
                    span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
        return json_format.ParseDict(tree, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Bad(f"not OTLP JSON: {error}") from error


def _raw_spans(tree: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for group in _either(tree, "resourceSpans", "resource_spans"):
        for scope in _either(group, "scopeSpans", "scope_spans"):
            yield from _either(scope, "spans", "spans")


def _either(tree: Mapping[str, Any], first: str, second: str) -> Iterable[Any]:
    return tree.get(first) or tree.get(second) or ()


def _wrong(raw: trace_pb2.Span) -> str:
    """Why a span cannot be stored; "" when it can."""
    if len(raw.trace_id) != 16 or not any(raw.trace_id):
        return "a span without a valid trace id"
    if len(raw.span_id) != 8 or not any(raw.span_id):
        return "a span without a valid span id"
    if max(raw.start_time_unix_nano, raw.end_time_unix_nano) >= _LAST_NS:
        return "a span with a time out of range"
    return ""


def _span(raw: trace_pb2.Span, service: str, scope: str, resource: dict[str, Any]) -> Span:
    attributes, cut = _attributes(raw.attributes)
    return Span(
        trace_id=raw.trace_id.hex(),
        span_id=raw.span_id.hex(),
        parent_id=raw.parent_span_id.hex(),
        name=raw.name[:TEXT],
        kind=raw.kind,
        start_ns=raw.start_time_unix_nano,
        end_ns=max(raw.start_time_unix_nano, raw.end_time_unix_nano),
        service=service[:TEXT],
        scope=scope[:TEXT],
        status=raw.status.code,
        message=raw.status.message[:TEXT],
        attributes=attributes,
        resource=resource,
        dropped=cut + raw.dropped_attributes_count,
    )


def _attributes(pairs: Iterable[KeyValue]) -> tuple[dict[str, Any], int]:
    """Attributes within bounds, and how many were left out."""
    kept: dict[str, Any] = {}
    cut = 0
    for pair in pairs:
        if len(kept) >= ATTRIBUTES:
            cut += 1
        else:
            kept[pair.key[:TEXT]] = _value(pair.value)
    return kept, cut


def _value(value: AnyValue) -> Any:
    """A value as JSON has it; lists and maps become text, for nothing here looks into them."""
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return value.string_value[:TEXT]
    if kind == "bool_value":
        return value.bool_value
    if kind == "int_value":
        return value.int_value
    if kind == "double_value":
        number = value.double_value
        return number if math.isfinite(number) else str(number)
    if kind == "bytes_value":
        return value.bytes_value[: TEXT // 2].hex()
    if kind is None:
        return ""
    return json.dumps(_plain(value))[:TEXT]


def _plain(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return [_plain(each) for each in value.array_value.values]
    if value.HasField("kvlist_value"):
        return {each.key: _plain(each.value) for each in value.kvlist_value.values}
    return _value(value)
