# SPDX-License-Identifier: Apache-2.0
"""Collect records' spans in OTLP messages of bounded size, and let the SDK's exporters send them as they are.

export_worker.py adds records; batch_exporter.py gives the batches to the SDK's exporter, whose transport,
retries and variables stay its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from opentelemetry.sdk import environment_variables as names
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import INVALID_SPAN_CONTEXT

from ttft_otel.exporter.spans.resource_cache import MAX_SERVICES, ResourceCache
from ttft_otel.exporter.spans.span_builder import SCOPE, read_span
from ttft_otel.exporter.spans.span_writer import count_spans, write_spans
from ttft_otel.model.record import Record

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
