# SPDX-License-Identifier: Apache-2.0
"""2 000 requests whose truth is known: one seeded table, told as Records, sent as the exporter sends them.

`table()` makes the rows; `send()` turns rows into spans by the exporter's own code and ships them by
the SDK's OTLP exporter; `Truth` answers from the rows alone what dashboards must show of them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from ttft_otel import names, stages
from ttft_otel.exporter import spans as exporter
from ttft_otel.record import VERSION, Attributes, Call, Piece, Record, Server, Ttft
from ttft_otel.stages import UNATTRIBUTED, Role

MANY: Final = 2000
SLOW: Final = 40  # reach their first token at 1 000 ms or later
FAILED: Final = 24  # never reach it; half of them give up after more than 1 000 ms
SLO_MS: Final = 1000
FIRST: Final = 4  # a fourth of all rows belongs to the first portion
BATCH: Final = 512  # spans, as the exporter's own

TEXT: Final = {
    "receive": 0.6,
    "preprocess": 4.0,
    "ipc": 0.9,
    "prefill.queue": 38.0,
    "dispatch": 2.6,
    "prefill.compute": 96.0,
    "prefill.stall": 7.0,
    "sample": 1.7,
    "output": 1.6,
    "egress": 0.3,
}
ENCODE: Final = {
    "receive": 0.9,
    "preprocess": 15.0,
    "ipc": 1.0,
    "encoder.queue": 17.0,
    "dispatch": 2.2,
    "encoder.compute": 62.0,
    "ec.transfer": 4.0,
    "output": 1.4,
    "egress": 0.2,
}
AFTER_ENCODE: Final = TEXT | {"preprocess": 12.0, "ec.transfer": 6.0, "prefill.compute": 118.0}
PREFILL: Final = TEXT | {"prefill.compute": 140.0, "prefill.queue": 52.0}
DECODE: Final = {
    "receive": 0.5,
    "preprocess": 2.0,
    "ipc": 0.9,
    "prefill.queue": 6.0,
    "kv.transfer": 29.0,
    "dispatch": 2.1,
    "prefill.compute": 4.5,
    "sample": 1.6,
    "output": 1.5,
    "egress": 0.3,
}


@dataclass(frozen=True, slots=True)
class Leg:
    """One server's way to its first token; lengths in microseconds."""

    role: Role
    instance: str
    lengths: Mapping[str, int]
    lost: int = 0
    hop: int = 0

    @property
    def ttft(self) -> int:
        """From this server's arrival to its first token."""
        return sum(self.lengths.values()) + self.lost


@dataclass(frozen=True, slots=True)
class Known:
    """One row: an outermost request. A router has `own` stages and legs, a lone server one leg."""

    number: int
    kind: str
    model: str
    role: Role
    instance: str
    legs: tuple[Leg, ...]
    own: Mapping[str, int] = field(default_factory=dict)
    spare: tuple[Leg, ...] = ()  # further encoders, off the critical path
    streaming: bool = True
    error: str = ""
    portion: int = 0
    trace_id: str = ""

    @property
    def request_id(self) -> str:
        """The id a client would have sent."""
        return f"known-{self.number}"

    @property
    def series(self) -> tuple[object, ...]:
        """What decides which time series this row is counted in."""
        places = (leg.instance for leg in self.legs)
        return (self.model, self.role, self.instance, *places, *self.stages)

    @property
    def routed(self) -> bool:
        """Whether a router stands before the servers."""
        return self.role == "router"

    @property
    def stages(self) -> dict[str, int]:
        """Full stage name -> microseconds, without the remainder."""
        if not self.routed:
            return dict(self.legs[0].lengths)
        found = dict(self.own)
        for leg in self.legs:
            found[f"router.hop.{leg.role}"] = leg.hop
            found |= {f"{leg.role}.{name}": us for name, us in leg.lengths.items()}
        return found

    @property
    def unattributed(self) -> int:
        """The remainder, in microseconds."""
        return sum(leg.lost for leg in self.legs)

    @property
    def ttft(self) -> int:
        """Microseconds from the outermost arrival to the first token."""
        return sum(self.stages.values()) + self.unattributed


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of traffic: how many rows, what they go through."""

    kind: str
    many: int
    model: str
    role: Role
    instances: tuple[str, ...]
    legs: tuple[tuple[Role, Mapping[str, float], tuple[str, ...]], ...]


SHAPES: Final = (
    Shape(
        *("text", 640, "Qwen/Qwen3-8B", "mono", ("chat-1:101", "chat-2:102")),
        (("mono", TEXT, ()),),
    ),
    Shape(
        *("epd", 760, "Qwen/Qwen2.5-VL-7B-Instruct", "router", ("router-1:201",)),
        (
            ("encode", ENCODE, ("10.0.0.11:8001", "10.0.0.12:8001")),
            ("prefill_decode", AFTER_ENCODE, ("10.0.0.21:8002", "10.0.0.22:8002")),
        ),
    ),
    Shape(
        *("pd", 540, "meta-llama/Llama-3.1-8B-Instruct", "router", ("router-2:202",)),
        (
            ("prefill", PREFILL, ("10.0.0.31:8003", "10.0.0.32:8003")),
            ("decode", DECODE, ("10.0.0.41:8004",)),
        ),
    ),
    # Someone asks an encoder directly: an `encode` span that is outermost, and no TTFT.
    Shape(
        *("encode", 60, "Qwen/Qwen2.5-VL-7B-Instruct", "encode", ("10.0.0.11:8001",)),
        (("encode", ENCODE, ()),),
    ),
)
# What makes the slow ones slow, by kind: (rows, which leg, which stage).
CAUSES: Final = {
    "text": (18, 0, "prefill.queue"),
    "epd": (12, 0, "encoder.queue"),
    "pd": (10, 1, "kv.transfer"),
}


def table(seed: int = 7, portions: int = 5) -> list[Known]:
    """All rows. Portion 0 holds a quarter, every series and all failures; the others share the rest."""
    draw = random.Random(seed)
    rows: list[Known] = []
    for shape in SHAPES:
        made = [_row(draw, shape, turn) for turn in range(shape.many)]
        rows += _troubled(draw, shape, made)
    rows = [
        replace(row, number=number, trace_id=f"{draw.getrandbits(128) | 1:032x}")
        for number, row in enumerate(rows)
    ]
    portion = [0] * (MANY // FIRST)
    portion += [1 + turn % (portions - 1) for turn in range(MANY - len(portion))]
    draw.shuffle(portion)
    seen: set[tuple[object, ...]] = set()
    for row in rows:
        if row.error or row.series not in seen:
            seen.add(row.series)
            portion[row.number] = 0
    return [replace(row, portion=portion[row.number]) for row in rows]


def _row(draw: random.Random, shape: Shape, turn: int) -> Known:
    instance = shape.instances[turn % len(shape.instances)]
    legs = []
    for role, base, places in shape.legs:
        place = places[(turn // 2) % len(places)] if places else instance
        hop = _length(draw, 1.3) if shape.role == "router" else 0
        legs.append(Leg(role, place, _lengths(draw, base), draw.randrange(40), hop))
    own = {}
    if shape.role == "router":
        for name, ms in (("receive", 0.3), ("route", 0.15), ("egress", 0.2)):
            own[f"router.{name}"] = _length(draw, ms)
        if turn % 48 < 2:
            own["router.retry"] = _length(draw, 24.0)
    spare = ()
    if shape.kind == "epd" and turn % 5 == 0:  # a second image, encoded sooner
        quick = {name: us // 2 for name, us in legs[0].lengths.items()}
        spare = (replace(legs[0], lengths=quick, hop=400),)
    streaming = turn % 3 > 0
    if not streaming and shape.role == "mono":
        legs[0] = replace(legs[0], lengths=_without(legs[0].lengths, "egress"))
    if not streaming:
        own.pop("router.egress", None)
        if shape.role == "router":
            legs[-1] = replace(legs[-1], lengths=_without(legs[-1].lengths, "egress"))
    return Known(
        *(0, shape.kind, shape.model, shape.role, instance, tuple(legs), own, spare, streaming)
    )


def _troubled(draw: random.Random, shape: Shape, rows: list[Known]) -> list[Known]:
    """The slow and the failed ones among the rows of one kind; all others stay below 900 ms."""
    assert max(row.ttft for row in rows) < 900_000, "a seed that makes slow ones by chance"
    if shape.kind not in CAUSES:
        return rows
    many, leg, stage = CAUSES[shape.kind]
    chosen = draw.sample(range(8, len(rows)), many + FAILED // 3)
    for turn, place in enumerate(chosen[:many]):
        extra = round(1_050_000 * (1 + 2.2 * turn / many)) + draw.randrange(9_000)
        rows[place] = _longer(rows[place], leg, stage, extra)
    for turn, place in enumerate(chosen[many:]):
        row = rows[place]
        if turn % 2:
            row = _longer(row, leg, stage, 4_000_000 + draw.randrange(2_000_000))
        rows[place] = replace(row, error="timeout", streaming=False)
    return rows


def _longer(row: Known, place: int, stage: str, extra: int) -> Known:
    leg = row.legs[place]
    grown = replace(leg, lengths={**leg.lengths, stage: leg.lengths[stage] + extra})
    return replace(row, legs=(*row.legs[:place], grown, *row.legs[place + 1 :]))


def _lengths(draw: random.Random, base: Mapping[str, float]) -> dict[str, int]:
    return {name: _length(draw, ms) for name, ms in base.items()}


def _length(draw: random.Random, ms: float) -> int:
    """Around so many milliseconds, skewed as waits are."""
    return 1 + round(1000 * ms * min(3.0, draw.lognormvariate(0.0, 0.4)))


def _without(lengths: Mapping[str, int], name: str) -> dict[str, int]:
    return {stage: us for stage, us in lengths.items() if stage != name}


# Rows -> Records -> spans.


@dataclass(frozen=True, slots=True)
class Told:
    """A Record and which process tells it."""

    record: Record
    instance: str


def tell(row: Known, end_ns: int) -> list[Told]:
    """The Records of a row, its response over at `end_ns`."""
    draw = random.Random(row.trace_id)
    rest = 40_000 if row.streaming else 300
    start_ns = end_ns - (row.ttft + rest) * 1000
    if not row.routed:
        return [_server(row, row.legs[0], draw, start_ns, rest, "")]
    calls: list[Call] = []
    told: list[Told] = []
    at = sum(row.own.get(f"router.{name}", 0) for name in ("receive", "route", "retry"))
    if lost := row.own.get("router.retry", 0):
        gone = Call(
            *(_id(draw), "POST /v1/chat/completions", row.legs[0].role, at - lost, at, 503),
            *(_place(row.legs[0]), "503"),
        )
        calls.append(gone)
    for leg in row.legs:
        for each in (leg, *(row.spare if leg.role == "encode" else ())):
            last = leg is row.legs[-1]
            call = Call(
                *(_id(draw), "POST /v1/chat/completions", leg.role, at),
                at + each.hop + each.ttft + (rest if last else 0),
                200,
                _place(each),
            )
            calls.append(call)
            begin = start_ns + (at + each.hop // 2) * 1000
            told.append(_server(row, each, draw, begin, rest if last else 100, call.span_id))
        at += leg.hop + leg.ttft
    told.append(Told(_router(row, draw, start_ns, rest, tuple(calls)), row.instance))
    return told


def _place(leg: Leg) -> Attributes:
    host, _, port = leg.instance.partition(":")
    return {names.HTTP_METHOD: "POST", names.SERVER_ADDRESS: host, names.SERVER_PORT: int(port)}


def _server(
    row: Known, leg: Leg, draw: random.Random, start_ns: int, rest: int, parent: str
) -> Told:
    """What one server records; outermost when no router called it."""
    pieces, at = [], 0
    for name, us in leg.lengths.items():
        pieces.append(Piece("stage", name, at, at + us))
        if name == "preprocess":
            pieces.append(Piece("part", "tokenize", at, at + us // 2))
        at += us
    if leg.lost:
        pieces.append(Piece("stage", UNATTRIBUTED, at, at + leg.lost))
    error = "" if row.routed else row.error
    ttft = Ttft(
        span_id=_id(draw),
        name=names.ENCODE if leg.role == "encode" else names.TTFT,
        start=0,
        end=leg.ttft,
        stages=dict(leg.lengths),
        unattributed=leg.lost,
        clamped=0,
        pieces=tuple(pieces),
        attributes={names.STREAMING: row.streaming, names.INPUT_TOKENS: 512},
        error=error,
        died="prefill.queue" if error else "",
    )
    return Told(
        _record(row, draw, leg.role, not row.routed, ttft, start_ns, rest, parent), leg.instance
    )


def _router(
    row: Known, draw: random.Random, start_ns: int, rest: int, calls: tuple[Call, ...]
) -> Record:
    """What the router records: its own stages around its legs', laid end to end."""
    laid: list[tuple[str, int, Attributes]] = [
        (name, row.own.get(name, 0), {})
        for name in (
            *("router.receive", "router.tokenize", "router.lookup"),
            *("router.route", "router.retry"),
        )
    ]
    for leg in row.legs:
        where: Attributes = {names.INSTANCE: leg.instance}
        laid.append((f"router.hop.{leg.role}", leg.hop, where))
        laid += [(f"{leg.role}.{name}", us, where) for name, us in leg.lengths.items()]
        laid.append((UNATTRIBUTED, leg.lost, {}))
    laid.append(("router.egress", row.own.get("router.egress", 0), {}))
    pieces, at = [], 0
    for name, us, attributes in laid:
        if us:
            pieces.append(Piece("stage", name, at, at + us, attributes))
        at += us
    ttft = Ttft(
        span_id=_id(draw),
        name=names.TTFT,
        start=0,
        end=row.ttft,
        stages=row.stages,
        unattributed=row.unattributed,
        clamped=0,
        pieces=tuple(pieces),
        attributes={names.STREAMING: row.streaming},
        error=row.error,
        died=f"{row.legs[-1].role}.prefill.queue" if row.error else "",
    )
    return _record(row, draw, "router", True, ttft, start_ns, rest, "", calls)


def _record(
    row: Known,
    draw: random.Random,
    role: Role,
    outermost: bool,
    ttft: Ttft,
    start_ns: int,
    rest: int,
    parent: str,
    calls: tuple[Call, ...] = (),
) -> Record:
    return Record(
        version=VERSION,
        trace_id=row.trace_id,
        span_id=_id(draw),
        parent_id=parent,
        flags=1,
        state="",
        start_ns=start_ns,
        role=role,
        outermost=outermost,
        service=stages.SERVICES[role],
        request_id=row.request_id,
        attributes={
            names.OPERATION: "chat",
            names.PROVIDER: names.PROVIDER_VLLM,
            names.MODEL: row.model,
            names.STREAM: row.streaming,
        },
        ttft=ttft,
        server=Server(
            "POST /v1/chat/completions",
            ttft.end + rest,
            504 if ttft.error else 200,
            {names.HTTP_METHOD: "POST", names.HTTP_ROUTE: "/v1/chat/completions"},
            ttft.error,
        ),
        calls=calls,
    )


def _id(draw: random.Random) -> str:
    return f"{draw.getrandbits(64) | 1:016x}"


def spans(rows: Iterable[Known], end_ns: int) -> list[ReadableSpan]:
    """The exporter's own spans of these rows, each process under its own resource."""
    resources: dict[tuple[str, str], Resource] = {}
    found: list[ReadableSpan] = []
    for row in rows:
        for told in tell(row, end_ns):
            key = (told.record.service, told.instance)
            if key not in resources:
                own = {"service.name": key[0], "service.instance.id": key[1]}
                resources[key] = Resource(own)
            found += exporter.build(told.record, resources[key])
    return found


def send(url: str, rows: Sequence[Known], batch: int = BATCH) -> None:
    """Ship rows to an OTLP/HTTP receiver as if they had just ended, `batch` spans to a message."""
    export(url, spans(rows, time.time_ns()), batch)


def export(url: str, found: Sequence[ReadableSpan], batch: int = BATCH) -> None:
    """Ship spans."""
    client = OTLPSpanExporter(endpoint=f"{url}/v1/traces", timeout=30)
    try:
        for first in range(0, len(found), batch):
            result = client.export(found[first : first + batch])
            assert result is SpanExportResult.SUCCESS, f"{url} refused spans"
    finally:
        client.shutdown()


class Truth:
    """What is true of some rows; encoders that were asked directly answer nobody and are left out."""

    def __init__(self, rows: Iterable[Known]) -> None:
        self.all = [row for row in rows if row.role != "encode"]
        self.good = [row for row in self.all if not row.error]

    def where(self, **wanted: str) -> Truth:
        """The rows with these values: `model`, `role`, `instance`, `kind`."""
        return Truth(
            row
            for row in self.all
            if all(getattr(row, name) == value for name, value in wanted.items())
        )

    def quantile(self, share: float) -> float:
        """Of the TTFT of those that got a first token; seconds, nearest rank."""
        ordered = sorted(row.ttft for row in self.good)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] / 1e6

    def mean(self) -> float:
        """Mean TTFT of those that got a first token, in seconds."""
        return fmean(row.ttft for row in self.good) / 1e6

    def stages(self) -> dict[str, float]:
        """Mean seconds by full stage name; with the remainder they add up to the mean TTFT."""
        sums: dict[str, int] = {}
        for row in self.good:
            for name, us in (row.stages | {UNATTRIBUTED: row.unattributed}).items():
                sums[name] = sums.get(name, 0) + us
        return {name: us / len(self.good) / 1e6 for name, us in sums.items()}

    def lengths(self, stage: str) -> list[float]:
        """Seconds of one stage, of each that had it, shortest first."""
        return sorted(row.stages[stage] / 1e6 for row in self.good if stage in row.stages)

    def over(self, ms: float = SLO_MS) -> float:
        """Share of requests that had no first token by an objective, failed ones among them."""
        return sum(row.ttft > 1000 * ms for row in self.all) / len(self.all)

    def failed(self) -> float:
        """Share of requests that never got a first token."""
        return 1 - len(self.good) / len(self.all)

    def slow(self, ms: int = SLO_MS) -> list[Known]:
        """The requests that took so many milliseconds or more, failed ones among them, longest first."""
        return sorted(
            (row for row in self.all if row.ttft // 1000 >= ms), key=lambda row: -row.ttft
        )
