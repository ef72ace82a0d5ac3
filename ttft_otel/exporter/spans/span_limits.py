# SPDX-License-Identifier: Apache-2.0
"""Cut off spans what the standard variables for limits do not allow; export_worker.py has the batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk import environment_variables as names

if TYPE_CHECKING:
    Owner: TypeAlias = Span | Span.Event | Span.Link


@dataclass(frozen=True, slots=True)
class SpanLimits:
    """The most of each kind that may be exported; None where no variable says so."""

    attributes: int | None
    event_attributes: int | None
    link_attributes: int | None
    events: int | None
    links: int | None
    characters: int | None

    @classmethod
    def read(cls, numbers: Mapping[str, int]) -> SpanLimits | None:
        """The limits in `numbers`, by their variables' names; None without one."""
        general = numbers.get(names.OTEL_ATTRIBUTE_COUNT_LIMIT)
        length = numbers.get(names.OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT)
        limits = cls(
            numbers.get(names.OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT, general),
            numbers.get(names.OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT, general),
            numbers.get(names.OTEL_LINK_ATTRIBUTE_COUNT_LIMIT, general),
            numbers.get(names.OTEL_SPAN_EVENT_COUNT_LIMIT),
            numbers.get(names.OTEL_SPAN_LINK_COUNT_LIMIT),
            numbers.get(names.OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT, length),
        )
        return None if limits == cls(*[None] * 6) else limits

    def cut_spans(self, request: ExportTraceServiceRequest) -> None:
        """Cut the spans of `request` in place, and count what they lost, as OTLP has it."""
        scopes = (scope for each in request.resource_spans for scope in each.scope_spans)
        for span in (span for scope in scopes for span in scope.spans):
            if self.events is not None and (lost := len(span.events) - self.events) > 0:
                del span.events[self.events :]
                span.dropped_events_count += lost
            if self.links is not None and (lost := len(span.links) - self.links) > 0:
                del span.links[self.links :]
                span.dropped_links_count += lost
            self._cut_attributes(span, self.attributes)
            for event in span.events:
                self._cut_attributes(event, self.event_attributes)
            for link in span.links:
                self._cut_attributes(link, self.link_attributes)

    def _cut_attributes(self, owner: Owner, limit: int | None) -> None:
        if limit is not None and (lost := len(owner.attributes) - limit) > 0:
            del owner.attributes[limit:]
            owner.dropped_attributes_count += lost
        if self.characters is not None:
            for attribute in owner.attributes:
                self._cut_value(attribute.value, self.characters)

    def _cut_value(self, value: AnyValue, characters: int) -> None:
        # Set only where it is longer: setting it changes which field of the value is there.
        if len(value.string_value) > characters:
            value.string_value = value.string_value[:characters]
        for each in value.array_value.values:
            self._cut_value(each, characters)
