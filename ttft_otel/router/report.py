# SPDX-License-Identifier: Apache-2.0
"""Tell a request's trip: forward.py gives the Exchange; handoff gets Records, clients reports."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from ttft_otel import clock, names, stages
from ttft_otel.breakdown import Breakdown
from ttft_otel.context import Context
from ttft_otel.original import Sums, original
from ttft_otel.record import VERSION, Attributes, Call, Piece, Record, Server, Ttft
from ttft_otel.router.choose import ENCODE, Choice
from ttft_otel.router.path import Attempt, Trip, partition
from ttft_otel.router.plan import STRIP
from ttft_otel.router.routing import DEFAULT

KEPT: Final = 10_000  # requests that /ttft_report still knows, about 2 KB each
LONGEST: Final = 256  # characters of a string the client chose
CANDIDATES: Final = 16  # of an instance's choice that a span tells, the best ones
_EGRESS: Final = "router.egress"
_ROUTE: Final = "router.route"
_NONE: Final[Attributes] = {}  # one for all: nobody writes to a Record


@dataclass(slots=True)
class Exchange:
    """One HTTP request of a client, as far as it has come; forward.py alone writes it."""

    context: Context
    ttft_id: str
    request_id: str
    path: str
    route: str
    scheme: str
    operation: str
    outermost: bool
    trip: Trip
    model: str = ""
    stream: bool = False
    streaming: bool = False
    given: bool = False  # the first body chunk is out
    told: bool = False  # the ttft half is sent
    done: bool = False  # nothing is left to send
    gone: bool = False  # the client went away
    status: int = 0
    error: str = ""
    died: str = ""
    calls: list[list[Attempt]] = field(default_factory=list)
    token: tuple[str, str] = ("", "")  # how the first token travelled, and why not otherwise
    mismatch: bool = False  # D's first token was not P's
    handover: Trip | None = None  # from P's token to D's next


def tell(exchange: Exchange, cut: Breakdown | None, end: int = 0) -> Record:
    """A Record with the halves that are known: `cut` gives the ttft half, `end` the server half."""
    context, arrive = exchange.context, exchange.trip.arrive
    return Record(
        VERSION,
        context.trace_id,
        context.span_id,
        context.parent_id,
        context.flags,
        context.state,
        clock.wall_ns(arrive),
        "router",
        exchange.outermost,
        stages.SERVICES["router"],
        exchange.request_id,
        attributes=_identity(exchange),
        ttft=None if cut is None else _ttft(exchange, cut),
        server=_server(exchange, end - arrive) if end else None,
        calls=tuple(_calls(exchange, end)) if end else (),
        late=_handover(exchange) if end else (),
    )


def _identity(exchange: Exchange) -> Attributes:
    found: Attributes = {names.PROVIDER: names.PROVIDER_VLLM}
    if exchange.operation:
        found[names.OPERATION] = exchange.operation
        found[names.STREAM] = exchange.stream
    if exchange.model:
        found[names.MODEL] = exchange.model[:LONGEST]
    return found


def _ttft(exchange: Exchange, cut: Breakdown) -> Ttft:
    servers, routes = _servers(exchange.trip, cut), _routes(exchange.trip)
    return Ttft(
        span_id=exchange.ttft_id,
        name=names.TTFT,
        start=0,
        end=cut.end - cut.start,
        stages=cut.stages,
        unattributed=cut.unattributed,
        clamped=cut.clamped,
        pieces=tuple(
            Piece(
                "stage",
                name,
                low - cut.start,
                high - cut.start,
                # our own stages have no server; of choices only the last piece tells
                routes.get(high, _NONE) if name == _ROUTE else servers.get(name, _NONE),
            )
            for name, low, high in cut.pieces
        ),
        attributes=_how(exchange),
        error="" if exchange.given and exchange.status < 400 else exchange.error,
        died=exchange.died,
    )


def _how(exchange: Exchange) -> Attributes:
    found: Attributes = {names.STREAMING: exchange.streaming}
    mode, reason = exchange.token
    if mode:
        found[names.FIRST_TOKEN] = mode
    if reason:
        found[names.FIRST_TOKEN_REASON] = reason
    for chain in exchange.trip.path:
        predicted = chain[-1].predicted if chain else None
        if predicted is not None and chain[-1].leg != ENCODE:
            found[names.PREDICTED_MS] = round(predicted * 1000)
            error = chain[-1].account.error if chain[-1].account else None
            if error is not None:
                found[names.PREDICTION_ERROR_MS] = round(error * 1000)
    return found


def _routes(trip: Trip) -> dict[int, Attributes]:
    """What was chosen from, and why; by the moment when the request was sent there."""
    found = {}
    for chain in trip.path:
        for attempt in chain:
            # round_robin knows no more than the calls' spans say
            if attempt.policy != DEFAULT and attempt.choice is not None:
                found[attempt.sent] = _chosen(attempt, attempt.choice)
    return found


def _chosen(attempt: Attempt, choice: Choice) -> Attributes:
    unit = 1 if choice.predicted is None else 1e6  # seconds become microseconds: no doubles
    scores, caches = choice.scores, choice.caches
    best = sorted(range(len(scores)), key=scores.__getitem__)[:CANDIDATES]
    offered = attempt.offered
    found: Attributes = {
        names.POLICY: attempt.policy,
        names.ROUTE_REASON: choice.reason,
        names.CANDIDATES: len(offered),
    }
    if scores:
        found[names.ROUTE_SCORE] = round(choice.score * unit)
        found[names.ROUTE_SCORES] = tuple(round(scores[at] * unit) for at in best)
        found[names.ROUTE_INSTANCES] = tuple(
            f"{offered[at].host}:{offered[at].port}" for at in best
        )
    if caches:
        found[names.ROUTE_CACHED] = tuple(caches[at] for at in best)
    return found


def _handover(exchange: Exchange) -> tuple[Piece, ...]:
    """What the client felt after P's token: until D's next one, cut like a TTFT, whole first."""
    trip, arrive = exchange.handover, exchange.trip.arrive
    if trip is None or not trip.end:
        return ()
    cut = partition(trip)
    # in strip D makes P's token first; what follows its bytes is a step of D's, not the router's
    other = names.FIRST_DECODE if exchange.token[0] == STRIP else _EGRESS
    whole: Attributes = {
        names.handover_us(other if name == _EGRESS else name): length
        for name, length in cut.stages.items()
    }
    whole[names.handover_us(stages.UNATTRIBUTED)] = cut.unattributed
    whole[names.HANDOVER_TOTAL_US] = cut.end - cut.start
    steps = [Piece("late", names.HANDOVER, cut.start - arrive, cut.end - arrive, whole)]
    for stage, low, high in cut.pieces:
        name = other if stage == _EGRESS else stage
        own: Attributes = {names.HANDOVER_STAGE: name}
        steps.append(Piece("step", name, low - arrive, high - arrive, own))
    return tuple(steps)


def _servers(trip: Trip, cut: Breakdown) -> dict[str, Attributes]:
    """Which server each leg's stages are of, so that one slow instance shows; by stage."""
    legs: dict[str, Attributes] = {
        chain[-1].leg: {names.INSTANCE: f"{chain[-1].host}:{chain[-1].port}"}
        for chain in trip.path
        if chain
    }
    return {name: legs[leg] for name in cut.stages if (leg := _leg(name)) in legs}


@functools.cache  # as many as there are stages
def _leg(stage: str) -> str:
    return stages.split(stage)[0] or stage.removeprefix("router.hop.")


def _server(exchange: Exchange, end: int) -> Server:
    return Server(
        name=f"POST {exchange.route}",
        end=end,
        status=exchange.status,
        attributes={
            names.HTTP_METHOD: "POST",
            names.HTTP_ROUTE: exchange.route,
            names.URL_PATH: exchange.path[:LONGEST],
            names.URL_SCHEME: exchange.scheme,
            **({names.FIRST_TOKEN_MISMATCH: True} if exchange.mismatch else {}),
        },
        # a 4xx is the client's error, not this server's
        error="" if 400 <= exchange.status < 500 else exchange.error,
    )


def _calls(exchange: Exchange, end: int) -> Iterable[Call]:
    arrive = exchange.trip.arrive
    for attempt in (attempt for chain in exchange.calls for attempt in chain):
        attributes: Attributes = {
            names.HTTP_METHOD: "POST",
            names.SERVER_ADDRESS: attempt.host,
            names.SERVER_PORT: attempt.port,
        }
        if attempt.policy:
            attributes[names.POLICY] = attempt.policy
            attributes[names.CANDIDATES] = len(attempt.offered)
        if attempt.number > 1:
            attributes[names.ATTEMPT] = attempt.number
        yield Call(
            attempt.span_id,
            f"POST {attempt.path}",
            attempt.leg,
            attempt.sent - arrive,
            (attempt.ended or end) - arrive,
            attempt.status,
            attributes,
            attempt.error,
        )


class Reports:
    """The newest requests' breakdowns by request id, bounded; the oldest goes first."""

    def __init__(self, most: int = KEPT) -> None:
        self.most = most
        self._kept: OrderedDict[str, tuple[dict[str, Sums], Sums]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, request_id: str, trip: Trip, cut: Breakdown) -> None:
        """Keep what each leg of the critical path said, and the whole."""
        legs: dict[str, Sums] = {}
        for attempt in (chain[-1] for chain in trip.path if chain):
            if attempt.timing is not None:
                said = attempt.timing
                legs[attempt.leg] = Sums(
                    stages=said.stages, unattributed=said.unattributed, ttft=said.ttft
                )
        whole = Sums(stages=cut.stages, unattributed=cut.unattributed, ttft=cut.end - cut.start)
        self._kept[request_id] = (legs, whole)
        self._kept.move_to_end(request_id)
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)

    def get(self, request_id: str) -> dict[str, Any] | None:
        """The answer of /ttft_report, or None when the request is unknown (or long gone)."""
        found = self._kept.get(request_id)
        return None if found is None else original(request_id, *found)
