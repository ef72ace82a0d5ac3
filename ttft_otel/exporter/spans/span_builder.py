# SPDX-License-Identifier: Apache-2.0
"""Read OTLP span messages as the SDK's read-only spans, for whoever wants these instead of bytes.

span_batch.py needs it where an SDK does not take messages; tests look at spans with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, SpanFlags, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status as SdkStatus
from opentelemetry.trace.status import StatusCode

from ttft_otel import __version__
from ttft_otel.exporter.spans.span_writer import write_spans
from ttft_otel.model.names import span_names
from ttft_otel.model.record import Attributes, Record, Value

SCOPE: Final = InstrumentationScope(span_names.SCOPE, __version__, span_names.SCHEMA_URL)
# OTLP has a kind 0 (unspecified) before the SDK's first.
_KINDS: Final = {kind.value + 1: kind for kind in SpanKind}
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)  # others are not exported


def build_spans(record: Record, resource: Resource) -> list[ReadableSpan]:
    """All spans of `record`, parents before their children; [] when it is not sampled.

    Raises ValueError as write_spans() does.
    """
    scope_spans = ScopeSpans()
    write_spans(record, scope_spans.spans)
    return [read_span(span, resource) for span in scope_spans.spans]


def read_span(span: Span, resource: Resource) -> ReadableSpan:
    """The SDK's span of one message that write_spans() has made."""
    trace_id = int.from_bytes(span.trace_id, "big")
    state = TraceState.from_header([span.trace_state]) if span.trace_state else TraceState()
    is_remote = bool(span.flags & SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)

    # A span's own context is never remote; its parent's is where another process made it.
    def make_context(span_id: bytes, remote: bool) -> SpanContext:
        return SpanContext(trace_id, int.from_bytes(span_id, "big"), remote, _SAMPLED, state)

    failed = span.status.code == Status.STATUS_CODE_ERROR
    return ReadableSpan(
        name=span.name,
        context=make_context(span.span_id, False),
        parent=make_context(span.parent_span_id, is_remote) if span.parent_span_id else None,
        resource=resource,
        attributes=_read_attributes(span.attributes),
        kind=_KINDS[span.kind],
        links=[_read_link(link) for link in span.links],
        events=[
            Event(each.name, _read_attributes(each.attributes), each.time_unix_nano)
            for each in span.events
        ],
        status=SdkStatus(StatusCode.ERROR if failed else StatusCode.UNSET),
        start_time=span.start_time_unix_nano,
        end_time=span.end_time_unix_nano,
        instrumentation_scope=SCOPE,
    )


def _read_link(link: Span.Link) -> Link:
    trace_id, span_id = (int.from_bytes(each, "big") for each in (link.trace_id, link.span_id))
    return Link(SpanContext(trace_id, span_id, True, _SAMPLED), _read_attributes(link.attributes))


def _read_attributes(attributes: Iterable[KeyValue]) -> Attributes:
    return {each.key: _read_value(each.value) for each in attributes}


def _read_value(value: AnyValue) -> Value:
    if value.HasField("array_value"):
        return tuple(_read_value(each) for each in value.array_value.values)  # type: ignore[misc]
    field = value.WhichOneof("value")
    return getattr(value, field) if field else ""
