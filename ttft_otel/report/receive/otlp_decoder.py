# SPDX-License-Identifier: Apache-2.0
"""Decode OTLP trace exports, protobuf or JSON: into chunks for the store, or into StoredSpans.

Spans that cannot be stored (without IDs, times out of range) are refused one by one, which OTLP
calls partial success.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1 import trace_pb2

from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.store.span_chunks import SpanChunk, chunk_raw_spans
from ttft_otel.report.store.span_conversion import (
    MAX_TEXT_CHARS,
    convert_span,
    find_fault,
    read_attributes,
)

MAX_EXPORT_SPANS: Final = 20_000  # of one export, further ones are refused; the SDK sends 512
# Resources and scopes of one export; a collector sends some hundred.
MAX_EXPORT_GROUPS: Final = 5_000
# Values of a JSON body, by its commas and brackets: json keeps the interpreter while it builds them.
MAX_JSON_VALUES: Final = 200_000
_IDS: Final = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_EXPORT_FULL: Final = f"more than {MAX_EXPORT_SPANS} spans in one export"


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
    ) -> Iterator[tuple[dict[str, Any], str, list[trace_pb2.Span]]]:
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

    def _accept_spans(self, spans: Sequence[trace_pb2.Span]) -> list[trace_pb2.Span]:
        accepted: list[trace_pb2.Span] = []
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


def build_export_response(refused: int, reason: str) -> ExportTraceServiceResponse:
    """The success message; a partial success when `refused` spans were not stored, for `reason`."""
    response = ExportTraceServiceResponse()
    if refused:
        response.partial_success.rejected_spans = refused
        response.partial_success.error_message = reason
    return response


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
