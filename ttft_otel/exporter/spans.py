# SPDX-License-Identifier: Apache-2.0
"""Pure: turn one Record into the SDK's read-only spans; flow.py feeds it, ship.py exports them.

They are built directly, not by a tracer: ids and times are the record's, sampling was decided by
the recorder, and no global provider, processor or context is touched.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from ttft_otel import __version__, names, stages
from ttft_otel.context import SAMPLED
from ttft_otel.record import Attributes, Call, Piece, Record, Server, Ttft

LONGEST: Final = 256  # characters of one attribute's value
MOST: Final = 128  # attributes of one span

_SCOPE: Final = InstrumentationScope(names.SCOPE, __version__)
_OK: Final = Status(StatusCode.UNSET)
_ERROR: Final = Status(StatusCode.ERROR)


def build(record: Record, resource: Resource) -> list[ReadableSpan]:
    """All spans of a record, parents before their children; none when it is not sampled.

    Raises ValueError for ids that are no hex numbers or zero.
    """
    if not record.flags & SAMPLED:
        return []
    tree = _Tree(record, resource)
    return [*tree.server(), *tree.calls(), *tree.ttft(), *tree.late()]


@dataclass(slots=True)
class _Made:
    """What differs from span to span; times in microseconds after the record's start."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start: int
    end: int
    attributes: Attributes
    kind: SpanKind = SpanKind.INTERNAL
    status: Status = _OK


class _Tree:
    """One record on its way to spans: the ids and attributes that they share."""

    def __init__(self, record: Record, resource: Resource) -> None:
        self.record = record
        self.resource = resource
        self.trace_id = _number(record.trace_id)
        self.flags = TraceFlags(record.flags)
        self.state = TraceState.from_header([record.state]) if record.state else TraceState()
        self.top = self.context(_number(record.span_id))
        self.shared: Attributes = {names.ROLE: record.role, names.OUTERMOST: record.outermost}

    def server(self) -> Iterator[ReadableSpan]:
        """The HTTP server span; its parent is the caller's."""
        server = self.record.server
        if server is None:
            return
        above = self.record.parent_id
        parent = self.context(_number(above), remote=True) if above else None
        attributes = self.identity() | server.attributes | _outcome(server)
        status = _ERROR if names.ERROR_TYPE in attributes else _OK
        yield self.span(
            _Made(server.name, self.top, parent, 0, server.end, attributes, SpanKind.SERVER, status)
        )

    def calls(self) -> Iterator[ReadableSpan]:
        """The router's client spans, one per attempt at a leg."""
        for call in self.record.calls:
            attributes = self.shared | {names.LEG: call.leg} | call.attributes | _outcome(call)
            status = _ERROR if names.ERROR_TYPE in attributes else _OK
            context = self.context(_number(call.span_id))
            yield self.span(
                _Made(
                    call.name,
                    context,
                    self.top,
                    call.start,
                    call.end,
                    attributes,
                    SpanKind.CLIENT,
                    status,
                )
            )

    def ttft(self) -> Iterator[ReadableSpan]:
        """The `ttft` (or `encode`) span and the pieces below it."""
        ttft = self.record.ttft
        if ttft is None:
            return
        context = self.context(_number(ttft.span_id))
        attributes = self.identity() | ttft.attributes | _totals(ttft)
        status = _ERROR if ttft.error else _OK
        yield self.span(
            _Made(ttft.name, context, self.top, ttft.start, ttft.end, attributes, status=status)
        )
        below = self.below(ttft)
        placed: list[tuple[Piece, SpanContext]] = []
        for piece in sorted(ttft.pieces, key=lambda piece: piece.kind == "part"):
            parent = _around(piece, placed) if piece.kind == "part" else None
            own = self.context(_fresh())
            if piece.kind == "stage":
                placed.append((piece, own))
            yield self.span(
                _Made(
                    piece.name,
                    own,
                    parent or context,
                    piece.start,
                    piece.end,
                    (below if piece.kind == "stage" else self.shared)
                    | piece.attributes
                    | _kind(piece),
                )
            )

    def late(self) -> Iterator[ReadableSpan]:
        """What came after the first token: below the server span, a `step` below the one before."""
        above = self.top
        for piece in self.record.late:
            own = self.context(_fresh())
            parent = above if piece.kind == "step" else self.top
            above = above if piece.kind == "step" else own
            attributes = self.shared | piece.attributes
            yield self.span(_Made(piece.name, own, parent, piece.start, piece.end, attributes))

    def identity(self) -> Attributes:
        """What both the server span and the `ttft` span carry."""
        record = self.record
        own: Attributes = self.shared | {names.REQUEST_ID: record.request_id}
        if record.rank >= 0:
            own[names.RANK] = record.rank
        return own | record.attributes

    def below(self, ttft: Ttft) -> Attributes:
        """What stages carry too, because metrics are made span by span: model and failure."""
        own = dict(self.shared)
        if names.MODEL in self.record.attributes:
            own[names.MODEL] = self.record.attributes[names.MODEL]
        if ttft.error:
            own[names.ERROR_TYPE] = ttft.error
        return own

    def context(self, span_id: int, remote: bool = False) -> SpanContext:
        """A span's context in this trace, flags and tracestate kept."""
        return SpanContext(self.trace_id, span_id, remote, self.flags, self.state)

    def span(self, made: _Made) -> ReadableSpan:
        """Into the SDK's shape, with absolute times and bounded attributes."""
        base = self.record.start_ns
        return ReadableSpan(
            name=made.name,
            context=made.context,
            parent=made.parent,
            resource=self.resource,
            attributes=_bounded(made.attributes),
            kind=made.kind,
            status=made.status,
            start_time=base + made.start * 1000,
            end_time=base + max(made.start, made.end) * 1000,
            instrumentation_scope=_SCOPE,
        )


def _totals(ttft: Ttft) -> Attributes:
    """The whole partition on one span: nothing downstream can add up over spans."""
    total = ttft.end - ttft.start
    totals: Attributes = {names.stage_us(stage): length for stage, length in ttft.stages.items()}
    totals[names.UNATTRIBUTED_US] = ttft.unattributed
    totals[names.CLAMPED_US] = ttft.clamped
    totals[names.TOTAL_US] = total
    if ttft.error:
        totals[names.ERROR_TYPE] = ttft.error
    else:
        totals[names.FIRST_CHUNK] = total / 1e6
    if ttft.died:
        totals[names.DIED_IN] = ttft.died
    return totals


def _outcome(http: Server | Call) -> Attributes:
    """Status code and `error.type`, by HTTP's conventions: servers fail from 500, clients from 400."""
    found: Attributes = {}
    if http.status:
        found[names.HTTP_STATUS] = http.status
    error = http.error
    if not error and http.status >= (400 if isinstance(http, Call) else 500):
        error = str(http.status)
    if error:
        found[names.ERROR_TYPE] = error
    return found


def _kind(piece: Piece) -> Attributes:
    """What kind of piece it is, in attributes: `ttft.stage` or `ttft.part`, and a router's leg."""
    if piece.kind == "stage":
        leg = "" if piece.name in stages.ROUTER else stages.split(piece.name)[0]
        found: Attributes = {names.STAGE: piece.name}
        return found | {names.LEG: leg} if leg else found
    return {names.PART: piece.name} if piece.kind == "part" else {}


def _around(part: Piece, placed: list[tuple[Piece, SpanContext]]) -> SpanContext | None:
    """The stage piece that contains a part in time."""
    for stage, context in placed:
        if stage.start <= part.start and part.end <= stage.end:
            return context
    return None


def _bounded(attributes: Attributes) -> Attributes:
    if len(attributes) > MOST:  # later ones are ours and matter more
        attributes = dict(list(attributes.items())[-MOST:])
    return {
        name: value[:LONGEST] if isinstance(value, str) else value
        for name, value in attributes.items()
    }


def _number(digits: str) -> int:
    number = int(digits, 16)
    if not number:
        raise ValueError("an id of zeros")
    return number


def _fresh() -> int:
    return random.getrandbits(64) or 1
