# SPDX-License-Identifier: Apache-2.0
"""HOT: one Trip per HTTP request in the API server; collects marks and hands their Record off.

asgi.py begins and ends it, hooks/frontend.py marks it; what comes out is a Record's bytes on their way
to the exporter, and the text of the Server-Timing header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol

from ttft_otel import breakdown, carrier, clock, context, meter, names, stages, timing
from ttft_otel.record import VERSION, Attributes, Piece, Record, Server, Ttft, encode
from ttft_otel.settings import Settings
from ttft_otel.trip import Engine, Trip

AWAITING_LIMIT: Final = 16384
PARTS_LIMIT: Final = 64
OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
}
_ASK: Final = names.ASK.encode()
_LEG: Final = names.LEG_HEADER.encode()
_WANTED: Final = frozenset(
    name.encode()
    for name in (
        names.TRACEPARENT,
        names.TRACESTATE,
        names.ASK,
        names.LEG_HEADER,
        names.REQUEST_HEADER,
    )
)


class Sends(Protocol):
    """What takes a record's bytes: handoff.Sender, or a test's list."""

    def send(self, data: bytes) -> bool:
        """Take them or drop them, at once."""


@dataclass(slots=True)
class Identity:
    """Who this server is; filled from vLLM's configuration when it starts.

    sees: whether first outputs are noticed at all (their hooks may be gone).
    """

    role: str = ""
    model: str = ""
    connector: str = ""
    sees: Callable[[], bool] = lambda: True


current: ContextVar[Trip | None] = ContextVar("ttft_otel_trip", default=None)
awaiting: dict[str, Trip] = {}  # engine request id -> trip without that request's first output
identity = Identity()


def begin(headers: Iterable[tuple[bytes, bytes]], settings: Settings) -> Trip | None:
    """Start a trip; None when it is neither sampled nor asked for (the sampler decides here)."""
    arrive = clock.now()
    found = {name: value.decode("latin-1") for name, value in headers if name in _WANTED}
    asked = found.get(_ASK) == "1"
    where = context.start(found.get(b"traceparent", ""), found.get(b"tracestate", ""), settings)
    if not (asked or where.sampled):
        return None
    trip = Trip(arrive, where, asked)
    leg = found.get(_LEG, "")
    trip.leg = leg if leg in stages.ROLES else ""
    trip.request_id = found.get(b"x-request-id", "")[:256]
    return trip


def register(trip: Trip, engine_id: str) -> None:
    """An engine request of this trip leaves for the engine (n > 1: `<index>_<parent>`)."""
    assign = trip.assigned.get(engine_id) or trip.assigned.get(engine_id.partition("_")[2], 0)
    trip.engines[engine_id] = Engine(assign)
    if len(awaiting) >= AWAITING_LIMIT:
        del awaiting[next(iter(awaiting))]
        meter.dropped("awaiting")
    awaiting[engine_id] = trip


def arrived(engine_id: str, marks: str, received: int, now: int) -> None:
    """An engine request's first output has been processed."""
    trip = awaiting.pop(engine_id, None)
    if trip is None:
        return
    engine = trip.engines[engine_id]
    engine.marks, engine.received, engine.output = marks, received, now
    if trip.first is None:
        trip.first = engine


def role(trip: Trip) -> str:
    """Configuration first; the router's header where that cannot tell."""
    if identity.role and not (identity.role == "mono" and trip.leg):
        return identity.role
    return trip.leg or "mono"


def marks_of(trip: Trip, egress: int) -> breakdown.Marks:
    """The trip's marks as breakdown.partition takes them; also fills trip.journey."""
    engine = trip.first or next(iter(trip.engines.values()), None)
    marks = breakdown.Marks(trip.arrive, trip.render)
    marks.encode_only = role(trip) == "encode"
    marks.egress = egress
    if engine is None:
        marks.assign = next(iter(trip.assigned.values()), 0)
        return marks
    marks.assign = engine.assign
    marks.output = engine.output
    marks.received = engine.received
    trip.journey = carrier.unfold(engine.marks, marks) if engine.marks else None
    return marks


def close(trip: Trip, egress: int) -> breakdown.Breakdown:
    """The first token is out: cut the way to it. `egress` 0 when the TTFT ends with `output`."""
    marks = marks_of(trip, egress)
    trip.cut = breakdown.partition(marks)
    _parts(trip, marks)
    return trip.cut


def fail(trip: Trip, end: int, marks: str = "") -> breakdown.Breakdown:
    """It ended without a first token; `marks` is what the engine core still knew of it."""
    engine = next(iter(trip.engines.values()), None)
    if engine is not None and not engine.marks:
        engine.marks = marks
    found = marks_of(trip, 0)
    found.partial = trip.journey is not None and not trip.journey.complete
    trip.died = breakdown.where(found)
    trip.cut = breakdown.partition(found, end, trip.died)
    _parts(trip, found)
    return trip.cut


def _parts(trip: Trip, marks: breakdown.Marks) -> None:
    sampled = marks.steps[-1].sampled if marks.steps else 0
    for name, start, end in (
        ("collect", sampled, marks.entered),
        ("transport", marks.entered, marks.received),
        ("detokenize", marks.received, marks.output),
    ):
        if start and end > start and not marks.foreign:
            trip.parts.append((name, start, end))


def header(trip: Trip, now: int) -> str:
    """Server-Timing of a closed trip; `rest` is what came after the first token of a plain answer."""
    cut = trip.cut
    if cut is None:
        return ""
    rest = None if trip.streamed else now - cut.end
    return timing.write(
        cut.stages, cut.unattributed, cut.end - cut.start, rest, _tokens(trip.journey)
    )


def _tokens(journey: carrier.Journey | None) -> timing.Tokens | None:
    if journey is None or not journey.own_tokens:
        return None
    return timing.Tokens(journey.prompt, journey.cached, journey.own_tokens, journey.step_tokens)


def hand(trip: Trip, sender: Sends, *, server: bool) -> None:
    """Send what is known: the ttft half once, the server half when the response has ended."""
    if not trip.context.sampled or (trip.cut is None and not server):
        return
    ttft = None if trip.told or trip.cut is None else _ttft(trip, trip.cut)
    trip.told = trip.told or ttft is not None
    _send(trip, sender, ttft, _server(trip) if server else None)


def keeps(trip: Trip) -> bool:
    """Whether this answered request's blocks are kept for another instance, and a span may follow."""
    return trip.context.sampled and trip.journey is not None and trip.journey.kept


def follow(trip: Trip, kept: carrier.Kept, sender: Sends) -> None:
    """Send what became known after the response: how long blocks were kept."""
    found: Attributes = {names.KV_TOKENS: kept.tokens, names.KV_BLOCKS: kept.blocks}
    if identity.connector:
        found[names.KV_CONNECTOR] = identity.connector
    if kept.over:
        found[names.ERROR_TYPE] = "expired"
    start, end = kept.since - trip.arrive, kept.until - trip.arrive
    _send(trip, sender, late=(Piece("late", names.KEPT, max(0, start), end, found),))


def _send(
    trip: Trip,
    sender: Sends,
    ttft: Ttft | None = None,
    server: Server | None = None,
    late: tuple[Piece, ...] = (),
) -> None:
    kind = role(trip)
    record = Record(
        version=VERSION,
        trace_id=trip.context.trace_id,
        span_id=trip.context.span_id,
        parent_id=trip.context.parent_id,
        flags=trip.context.flags,
        state=trip.context.state,
        start_ns=clock.wall_ns(trip.arrive),
        role=kind,
        outermost=not trip.leg,
        service=stages.SERVICES.get(kind, "vllm"),  # type: ignore[call-overload]
        request_id=trip.request_id,
        rank=trip.journey.rank if trip.journey else -1,
        attributes=_identity(trip),
        ttft=ttft,
        server=server,
        late=late,
    )
    if sender.send(encode(record)):
        meter.sent()
    else:
        meter.dropped("handoff")


def forget(trip: Trip) -> None:
    """Nothing of a trip stays behind, however it ended."""
    for engine_id in trip.engines:
        awaiting.pop(engine_id, None)


def _identity(trip: Trip) -> Attributes:
    found: Attributes = {
        names.OPERATION: OPERATIONS.get(trip.path, "generate_content"),
        names.PROVIDER: names.PROVIDER_VLLM,
        names.STREAM: trip.streamed,
    }
    if identity.model:
        found[names.MODEL] = identity.model
    return found


def _server(trip: Trip) -> Server:
    found: Attributes = {
        names.HTTP_METHOD: trip.method,
        names.URL_PATH: trip.path,
        names.URL_SCHEME: trip.scheme,
    }
    if trip.route:
        found[names.HTTP_ROUTE] = trip.route
    name = f"{trip.method} {trip.route}" if trip.route else trip.method
    # By HTTP's conventions a 4xx is the client's error, not this server's.
    error = "" if 400 <= trip.status < 500 else trip.error
    return Server(name, trip.end - trip.arrive, trip.status, found, error)


def _ttft(trip: Trip, cut: breakdown.Breakdown) -> Ttft:
    base = trip.arrive
    pieces = [Piece("stage", name, low - base, high - base) for name, low, high in cut.pieces]
    pieces += [
        Piece("part", name, low - base, high - base) for name, low, high in trip.parts[:PARTS_LIMIT]
    ]
    pieces += [
        Piece("sibling", names.SIBLING, max(0, engine.assign - base), engine.output - base)
        for engine in trip.engines.values()
        if engine is not trip.first and engine.output
    ]
    return Ttft(
        span_id=trip.ttft_id,
        name=names.ENCODE if role(trip) == "encode" else names.TTFT,
        start=0,
        end=cut.end - base,
        stages=cut.stages,
        unattributed=cut.unattributed,
        clamped=cut.clamped,
        pieces=tuple(pieces),
        attributes=_counts(trip),
        error=trip.error if trip.first is None else "",
        died=trip.died,
    )


def _counts(trip: Trip) -> Attributes:
    found: Attributes = {names.STREAMING: trip.streamed}
    if trip.journey is None:
        return found
    if trip.journey.blocks and identity.connector:
        found[names.KV_CONNECTOR] = identity.connector
    return found | carrier.counts(trip.journey)
