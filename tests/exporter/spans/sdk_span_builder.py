# SPDX-License-Identifier: Apache-2.0
"""The reference of span_writer.py: the spans of one Record by the SDK's own objects; for tests only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from ttft_otel import __version__
from ttft_otel.exporter.spans import span_content
from ttft_otel.exporter.spans.span_content import list_late_pieces
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Attributes, HeldBy, Piece, Record
from ttft_otel.tracing.context import SAMPLED_FLAG

MAX_VALUE_CHARS: Final = 256  # characters of one attribute's value
MAX_ATTRIBUTES: Final = 128  # attributes of one span

_SCOPE: Final = InstrumentationScope(span_names.SCOPE, __version__, span_names.SCHEMA_URL)


def build_spans(record: Record, resource: Resource) -> list[ReadableSpan]:
    """All spans of `record`, parents before their children; [] when it is not sampled.

    Raises ValueError for IDs that are not hex numbers, or zero.
    """
    if not record.flags & SAMPLED_FLAG:
        return []
    tree = _SpanTree(record, resource)
    return [
        *tree.build_server_span(),
        *tree.build_call_spans(),
        *tree.build_ttft_spans(),
        *tree.build_late_spans(),
    ]


class _SpanTree:
    """Builds the spans of one record; holds the IDs and attributes that they share."""

    def __init__(self, record: Record, resource: Resource) -> None:
        self.record = record
        self.resource = resource
        self.trace_id = _parse_id(record.trace_id)
        self.flags = TraceFlags(record.flags)
        self.tracestate = TraceState.from_header([record.state]) if record.state else TraceState()
        self.server_context = self.make_context(_parse_id(record.span_id))
        self.shared_attributes = span_content.list_shared_attributes(record)

    def build_server_span(self) -> Iterator[ReadableSpan]:
        """The HTTP server span; its parent is the caller's span."""
        server = self.record.server
        if server is None:
            return
        above = self.record.parent_id
        parent = self.make_context(_parse_id(above), remote=True) if above else None
        identity = span_content.list_identity_attributes(self.record, self.shared_attributes)
        attributes = identity | server.attributes | span_content.list_outcome(server)
        failed = keys.ERROR_TYPE in attributes
        times = (0, server.end)
        yield self.make_span(
            server.name, self.server_context, parent, times, attributes, failed, SpanKind.SERVER
        )

    def build_call_spans(self) -> Iterator[ReadableSpan]:
        """The router's client spans, one per attempt at a leg."""
        for call in self.record.calls:
            attributes = (
                self.shared_attributes
                | {keys.LEG: call.leg}
                | call.attributes
                | span_content.list_outcome(call)
            )
            context = self.make_context(_parse_id(call.span_id))
            failed = keys.ERROR_TYPE in attributes
            times = (call.start, call.end)
            yield self.make_span(
                call.name, context, self.server_context, times, attributes, failed, SpanKind.CLIENT
            )

    def build_ttft_spans(self) -> Iterator[ReadableSpan]:
        """The `ttft` (or `encode`) span and the pieces below it."""
        ttft = self.record.ttft
        if ttft is None:
            return
        context = self.make_context(_parse_id(ttft.span_id))
        identity = span_content.list_identity_attributes(self.record, self.shared_attributes)
        attributes = identity | ttft.attributes | span_content.list_totals(ttft)
        times = (ttft.start, ttft.end)
        yield self.make_span(
            ttft.name, context, self.server_context, times, attributes, bool(ttft.error)
        )
        stage_attributes = span_content.list_stage_attributes(self.record, self.shared_attributes)
        placed: list[tuple[Piece, SpanContext]] = []
        # These last, because their parents are stages of this list.
        below = ("part", "reason")
        for piece in sorted(ttft.pieces, key=lambda piece: piece.kind in below):
            parent = _find_enclosing_stage(piece, placed) if piece.kind in below else None
            piece_context = self.make_context(_new_span_id())
            if piece.kind == "stage":
                placed.append((piece, piece_context))
            shared = self.shared_attributes
            if piece.kind in ("stage", "reason"):
                shared = stage_attributes
            own = piece.attributes | span_content.list_kind_attributes(piece.kind, piece.name)
            yield self.make_piece(piece, piece_context, parent or context, shared | own)

    def build_late_spans(self) -> Iterator[ReadableSpan]:
        """Spans after the first token: children of the server span, a `step` of the span before it."""
        above = self.server_context
        for piece in list_late_pieces(self.record):
            piece_context = self.make_context(_new_span_id())
            parent = above if piece.kind == "step" else self.server_context
            above = above if piece.kind == "step" else piece_context
            attributes = self.shared_attributes | piece.attributes
            yield self.make_piece(piece, piece_context, parent, attributes)

    def make_piece(
        self, piece: Piece, context: SpanContext, parent: SpanContext, attributes: Attributes
    ) -> ReadableSpan:
        """The span of a piece, which never failed by itself."""
        times = (piece.start, piece.end)
        return self.make_span(
            piece.name, context, parent, times, attributes, False, held_by=piece.held_by
        )

    def make_context(self, span_id: int, remote: bool = False) -> SpanContext:
        """The context of the span `span_id` in this trace, with its flags and tracestate."""
        return SpanContext(self.trace_id, span_id, remote, self.flags, self.tracestate)

    def make_span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[int, int],
        attributes: Attributes,
        failed: bool,
        kind: SpanKind = SpanKind.INTERNAL,
        held_by: tuple[HeldBy, ...] = (),
    ) -> ReadableSpan:
        """The SDK's span, with absolute times and bounded attributes.

        times: start and end, microseconds after the record's start.
        """
        start_ns, end_ns = (self.record.start_ns + 1000 * each for each in times)
        links, events = [], []
        for holder in held_by:
            told: Attributes = {
                keys.HELD_BY_US: holder.us,
                keys.HELD_BY_TOKENS: holder.tokens,
                keys.HELD_BY_KIND: holder.kind,
                keys.HELD_BY_REQUEST_ID: holder.request_id[:MAX_VALUE_CHARS],
            }
            if holder.trace_id:
                ids = _parse_id(holder.trace_id), _parse_id(holder.span_id)
                links.append(Link(SpanContext(*ids, True, TraceFlags(1)), told))
            else:
                events.append(Event(keys.HELD_BY, told, start_ns))
        return ReadableSpan(
            links=links,
            events=events,
            name=name,
            context=context,
            parent=parent,
            resource=self.resource,
            attributes=_bound_attributes(attributes),
            kind=kind,
            status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            instrumentation_scope=_SCOPE,
        )


def _find_enclosing_stage(
    part: Piece, placed: list[tuple[Piece, SpanContext]]
) -> SpanContext | None:
    """The stage piece that contains a part in time."""
    for stage, context in placed:
        if stage.start <= part.start and part.end <= stage.end:
            return context
    return None


def _bound_attributes(attributes: Attributes) -> Attributes:
    if len(attributes) > MAX_ATTRIBUTES:  # later ones are ours and matter more
        attributes = dict(list(attributes.items())[-MAX_ATTRIBUTES:])
    return {
        name: value[:MAX_VALUE_CHARS] if isinstance(value, str) else value
        for name, value in attributes.items()
    }


def _parse_id(digits: str) -> int:
    number = int(digits, 16)
    if not number:
        raise ValueError("an id of zeros")
    return number


def _new_span_id() -> int:
    return random.getrandbits(64) or 1
