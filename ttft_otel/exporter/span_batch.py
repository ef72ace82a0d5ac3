# SPDX-License-Identifier: Apache-2.0
"""Collect records' spans in OTLP messages of bounded size, and let the SDK's exporters send them as they are.

export_worker.py adds records and gives the batches to the SDK's exporter, whose transport, retries and
variables stay its own. Resources of spans and metrics, one per service name, are found here. The messages
can be read as the SDK's read-only spans: where an SDK does not take messages, and by tests.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import (
    ResourceSpans,
    ScopeSpans,
    Span,
    SpanFlags,
    Status,
)
from opentelemetry.sdk import environment_variables as names
from opentelemetry.sdk.resources import (
    PROCESS_PID,
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Link,
    SpanContext,
    SpanKind,
    TraceFlags,
    TraceState,
)
from opentelemetry.trace.status import Status as SdkStatus
from opentelemetry.trace.status import StatusCode

from ttft_otel import __version__
from ttft_otel.exporter.span_writer import count_spans, write_spans
from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Attributes, Record, Value

MAX_SERVICES: Final = 16  # service names per host process; ours are one per role


class ResourceCache:
    """One resource per service name, bounded; the operator's OTEL_* variables take precedence.

    pid: the host process, for service.instance.id and process.pid.
    counts_requests: metrics come from this process too, and are not to be made of its spans again.
    engine_settings: attributes that the host knows, keys.ENGINE_SETTINGS.
    """

    def __init__(
        self,
        pid: int,
        counts_requests: bool = False,
        engine_settings: Mapping[str, int] | None = None,
    ) -> None:
        self.pid = pid
        attributes: dict[str, str | int] = {
            # Host and process: several servers on one host must not share a series.
            SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{pid}",
            PROCESS_PID: pid,
            **span_names.DISTRO,
            **(engine_settings or {}),
        }
        if counts_requests:
            attributes[keys.METRICS_SOURCE] = keys.METRICS_FROM_EXPORTER
        # Read apart from the rest: what the operator set is merged last, and has to win.
        self._operator = OTELResourceDetector().detect()
        self._base = Resource.create().merge(Resource(attributes)).merge(self._operator)
        self._resources: dict[str, Resource] = {}

    def get(self, service: str) -> Resource:
        """The resource for records of `service`, "" for the default name; one object for equal ones.

        OTEL_SERVICE_NAME, where set, replaces the name in all of them.
        """
        found = self._resources.get(service)
        # A name comes from a record; the bound keeps a wrong sender from filling the memory.
        if found is None and len(self._resources) >= MAX_SERVICES:
            found = self._resources.get("")
        if found is None:
            found = self._build_resource(service if len(self._resources) < MAX_SERVICES else "")
        return found

    def build_metrics_resource(self, resource: Resource) -> Resource:
        """The resource of metrics beside spans of `resource`, with a service.instance.id of this process.

        The operator may have given one to a server of several processes. Spans can share it; sums cannot:
        each process would send its own under the same name.
        """
        given = self._operator.attributes.get(SERVICE_INSTANCE_ID)
        if given is None:
            return resource
        return resource.merge(Resource({SERVICE_INSTANCE_ID: f"{given}:{self.pid}"}))

    def _build_resource(self, service: str) -> Resource:
        name = Resource({SERVICE_NAME: service or stages.SERVICE_NAMES["mono"]})
        built = self._base.merge(name).merge(self._operator)
        # Last, and only where no detector has one: the SDK drops a side if two that it merges differ.
        built = Resource(built.attributes, built.schema_url or span_names.SCHEMA_URL)
        # With OTEL_SERVICE_NAME all are equal: one object, because others look it up by id().
        equal = (other for other in self._resources.values() if other == built)
        self._resources[service] = next(equal, built)
        return self._resources[service]


# At some 290 bytes a span 0.3 MB, far below gRPC's usual limit of 4 MB for a message.
MAX_BATCH_SPANS: Final = 1024  # spans per OTLP message


class SpanBatch(Sequence[ReadableSpan]):
    """One export request. A sequence of the SDK's spans, too, but these are built only if somebody looks.

    An exporter that calls `encode_spans` (see take_messages()) never does; any other one exports the same
    spans, at the SDK's cost.
    """

    def __init__(self, detail: str = "full") -> None:
        self.detail = detail
        self.request = ExportTraceServiceRequest()
        self._scopes: dict[int, ScopeSpans] = {}  # by id() of their resource: its hash takes 20 us
        self._resources: list[Resource] = []  # of request.resource_spans, in their order
        self._count = 0

    def add_record(self, record: Record, resources: ResourceCache) -> None:
        """Append the record's spans to those of its resource. Raises ValueError, as write_spans()."""
        resource = resources.get(record.service)
        scope = self._scopes.get(id(resource))
        # The first spans of a resource are copied: one whose record is refused, or has none, is not named.
        spans = ScopeSpans().spans if scope is None else scope.spans
        before = len(spans)
        write_spans(record, spans, self.detail)
        self._count += len(spans) - before
        if scope is None and spans:
            self._add_resource(resource).spans.extend(spans)

    def _add_resource(self, resource: Resource) -> ScopeSpans:
        # protobuf copies on append: the cached encoding stays empty.
        self.request.resource_spans.append(_encode_resource(resource))
        self._resources.append(resource)
        scope = self.request.resource_spans[-1].scope_spans[0]
        self._scopes[id(resource)] = scope
        return scope

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ReadableSpan]:
        # Built anew at each call and not kept: exporters that take messages never get here.
        for resource, group in zip(self._resources, self.request.resource_spans, strict=True):
            for span in group.scope_spans[0].spans:
                yield read_span(span, resource)

    def __getitem__(self, index: Any) -> Any:
        # Only for exporters that index; it has to be there for a Sequence.
        return list(self)[index]

    def split_batch(self, max_spans: int) -> Iterator[SpanBatch]:
        """Parts of at most `max_spans` spans; itself when it is no larger."""
        if len(self) <= max_spans:
            yield self
            return
        for resource in self._resources:
            spans = self._scopes[id(resource)].spans
            for first in range(0, len(spans), max_spans):
                # Its detail does not matter: the spans are copied, and no record is added to it.
                part = SpanBatch()
                scope = part._add_resource(resource)
                scope.spans.extend(spans[first : first + max_spans])
                part._count = len(scope.spans)
                yield part


class BatchBuilder:
    """Distributes records over batches of at most `max_spans` spans; a record stays in one if it fits.

    detail: which spans they have, one of settings.DETAILS.
    """

    def __init__(
        self, resources: ResourceCache, detail: str = "full", max_spans: int = MAX_BATCH_SPANS
    ) -> None:
        self.resources = resources
        self.detail = detail
        self.max_spans = min(max_spans, MAX_BATCH_SPANS)
        self._batches: list[SpanBatch] = []

    def add_record(self, record: Record) -> None:
        """Add the record's spans. Raises ValueError, and adds none, for a record with broken IDs."""
        # The most that it can make: with less detail a batch ends smaller than the bound.
        count = count_spans(record)
        if count and (not self._batches or len(self._batches[-1]) + count > self.max_spans):
            self._batches.append(SpanBatch(self.detail))
        if count:
            self._batches[-1].add_record(record, self.resources)

    def take_batches(self) -> Iterator[SpanBatch]:
        """The batches so far, none of them empty; the builder has none afterwards."""
        batches, self._batches = self._batches, []
        # A refused record, or one without spans in this detail, can leave an empty batch.
        for batch in batches:
            if len(batch):
                yield from batch.split_batch(self.max_spans)


@lru_cache(MAX_SERVICES + 1)
def _encode_resource(resource: Resource) -> ResourceSpans:
    """The SDK's own encoding of a resource and of our scope, with an empty list of spans."""
    empty = ReadableSpan(
        name="", context=INVALID_SPAN_CONTEXT, resource=resource, instrumentation_scope=SCOPE
    )
    encoded = encode_spans([empty]).resource_spans[0]
    del encoded.scope_spans[0].spans[:]
    return encoded


def take_messages(exporter: SpanExporter) -> None:
    """Let an SDK exporter send a SpanBatch as it is; anything else it encodes as before.

    The SDK's exporters have no public way to be given messages. All of them encode by the function
    `encode_spans` in their module, which is replaced here; where a version has none, or does not call
    it, the exporter reads the batch as spans of the SDK.
    """
    module: Any = sys.modules[type(exporter).__module__]
    encode = getattr(module, "encode_spans", None)
    if encode is None or isinstance(encode, partial):  # an exporter of it has been here
        return
    module.encode_spans = partial(_encode_batch, encode)


def _encode_batch(
    encode: Callable[[Sequence[ReadableSpan]], ExportTraceServiceRequest],
    spans: Sequence[ReadableSpan],
) -> ExportTraceServiceRequest:
    """A batch as it is; other spans by the SDK's own `encode`."""
    return spans.request if isinstance(spans, SpanBatch) else encode(spans)


def read_limits(numbers: Mapping[str, int]) -> dict[str, int]:
    """The most of each kind that a span may have, of `numbers` by variables' names; {} for no limits."""
    general = numbers.get(names.OTEL_ATTRIBUTE_COUNT_LIMIT)
    length = numbers.get(names.OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT)
    limits = {
        "attributes": numbers.get(names.OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT, general),
        "attributes of events": numbers.get(names.OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT, general),
        "attributes of links": numbers.get(names.OTEL_LINK_ATTRIBUTE_COUNT_LIMIT, general),
        "events": numbers.get(names.OTEL_SPAN_EVENT_COUNT_LIMIT),
        "links": numbers.get(names.OTEL_SPAN_LINK_COUNT_LIMIT),
        "characters": numbers.get(names.OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT, length),
    }
    return {kind: limit for kind, limit in limits.items() if limit is not None}


def cut_spans(request: ExportTraceServiceRequest, limits: Mapping[str, int]) -> None:
    """Cut the spans of `request` in place, and count what they lost, as OTLP has it."""
    characters = limits.get("characters")
    scopes = (scope for each in request.resource_spans for scope in each.scope_spans)
    for span in (span for scope in scopes for span in scope.spans):
        for field in ("events", "links"):
            _cut_field(span, field, limits.get(field))
            for each in getattr(span, field):
                _cut_field(each, "attributes", limits.get(f"attributes of {field}"))
        _cut_field(span, "attributes", limits.get("attributes"))
        if characters is not None:
            owners: tuple[Span | Span.Event | Span.Link, ...] = (span, *span.events, *span.links)
            for owner in owners:
                for attribute in owner.attributes:
                    _cut_value(attribute.value, characters)


def _cut_field(owner: Span | Span.Event | Span.Link, field: str, limit: int | None) -> None:
    values = getattr(owner, field)
    if limit is not None and (lost := len(values) - limit) > 0:
        del values[limit:]
        count = f"dropped_{field}_count"
        setattr(owner, count, getattr(owner, count) + lost)


def _cut_value(value: AnyValue, characters: int) -> None:
    # Set only where it is longer: setting it changes which field of the value is there.
    if len(value.string_value) > characters:
        value.string_value = value.string_value[:characters]
    for each in value.array_value.values:
        _cut_value(each, characters)


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
