# SPDX-License-Identifier: Apache-2.0
"""2 000 requests whose truth is known: one seeded table, made into Records, sent as the exporter sends them.

`build_known_requests()` makes the rows; `send_rows()` turns them into spans by the exporter's own code and
ships them by the SDK's OTLP exporter; `KnownTruth` answers from the rows alone what dashboards must show.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from tests.report.sample_records import make_leg_record
from ttft_otel.exporter import span_batch as exporter
from ttft_otel.model import stages
from ttft_otel.model.names import keys
from ttft_otel.model.record import RECORD_VERSION, Attributes, Call, Piece, Record, Server
from ttft_otel.model.stages import QUEUE_STAGES, UNATTRIBUTED, Role

TOTAL_ROWS: Final = 2000
SLOW_ROWS: Final = 40  # reach their first token at 1 000 ms or later
FAILED_ROWS: Final = 24  # never reach it; half of them give up after more than 1 000 ms
SERVER_ERRORS: Final = ("timeout", "no_token")
LEFT_ERRORS: Final = ("disconnected",)
REFUSED_ERRORS: Final = ("429",)
SLO_MS: Final = 1000
FIRST: Final = 4  # a fourth of all rows belongs to the first portion
SPANS_PER_BATCH: Final = 512  # spans, as the exporter's own

TEXT_STAGES_MS: Final = {
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
ENCODE_STAGES_MS: Final = {
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
AFTER_ENCODE_STAGES_MS: Final = TEXT_STAGES_MS | {
    "preprocess": 12.0,
    "ec.transfer": 6.0,
    "prefill.compute": 118.0,
}
PREFILL_STAGES_MS: Final = TEXT_STAGES_MS | {"prefill.compute": 140.0, "prefill.queue": 52.0}
DECODE_STAGES_MS: Final = {
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
class KnownLeg:
    """One server's way to its first token; lengths in microseconds."""

    role: Role
    instance: str
    lengths: Mapping[str, int]
    lost: int = 0
    hop: int = 0
    recomputed: int | None = None  # items of an encoder-cache consumer; no such server: None

    @property
    def ttft(self) -> int:
        """From this server's arrival to its first token."""
        return sum(self.lengths.values()) + self.lost


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """One row: an outermost request. A router has `own` stages and legs, a lone server one leg."""

    number: int
    kind: str
    model: str
    role: Role
    instance: str
    legs: tuple[KnownLeg, ...]
    own: Mapping[str, int] = field(default_factory=dict)
    spare: tuple[KnownLeg, ...] = ()  # further encoders, off the critical path
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
class TrafficShape:
    """A kind of traffic: how many rows, what they go through."""

    kind: str
    many: int
    model: str
    role: Role
    instances: tuple[str, ...]
    legs: tuple[tuple[Role, Mapping[str, float], tuple[str, ...]], ...]


TRAFFIC_SHAPES: Final = (
    TrafficShape(
        "text", 640, "Qwen/Qwen3-8B", "mono", ("chat-1:101", "chat-2:102"),
        (("mono", TEXT_STAGES_MS, ()),),
    ),
    TrafficShape(
        "epd", 760, "Qwen/Qwen2.5-VL-7B-Instruct", "router", ("router-1:201",),
        (
            ("encode", ENCODE_STAGES_MS, ("10.0.0.11:8001", "10.0.0.12:8001")),
            ("prefill_decode", AFTER_ENCODE_STAGES_MS, ("10.0.0.21:8002", "10.0.0.22:8002")),
        ),
    ),
    TrafficShape(
        "pd", 540, "meta-llama/Llama-3.1-8B-Instruct", "router", ("router-2:202",),
        (
            ("prefill", PREFILL_STAGES_MS, ("10.0.0.31:8003", "10.0.0.32:8003")),
            ("decode", DECODE_STAGES_MS, ("10.0.0.41:8004",)),
        ),
    ),
    # An `encode` span that is outermost, as a server of an older version has it: no TTFT.
    TrafficShape(
        "encode", 60, "Qwen/Qwen2.5-VL-7B-Instruct", "encode", ("10.0.0.11:8001",),
        (("encode", ENCODE_STAGES_MS, ()),),
    ),
)  # fmt: skip
# What makes the slow ones slow, by kind: (rows, which leg, which stage).
CAUSES: Final = {
    "text": (18, 0, "prefill.queue"),
    "epd": (12, 0, "encoder.queue"),
    "pd": (10, 1, "kv.transfer"),
}


def build_known_requests(seed: int = 7, portions: int = 5) -> list[KnownRequest]:
    """All rows. Portion 0 holds a quarter, every series and all failures; the others share the rest."""
    draw = random.Random(seed)
    rows: list[KnownRequest] = []
    for shape in TRAFFIC_SHAPES:
        made = [_build_row(draw, shape, turn) for turn in range(shape.many)]
        rows += _add_trouble(draw, shape, made)
    rows = [
        replace(row, number=number, trace_id=f"{draw.getrandbits(128) | 1:032x}")
        for number, row in enumerate(rows)
    ]
    portion = [0] * (TOTAL_ROWS // FIRST)
    portion += [1 + turn % (portions - 1) for turn in range(TOTAL_ROWS - len(portion))]
    draw.shuffle(portion)
    seen: set[tuple[object, ...]] = set()
    for row in rows:
        if row.error or row.series not in seen:
            seen.add(row.series)
            portion[row.number] = 0
    return [replace(row, portion=portion[row.number]) for row in rows]


def _build_row(draw: random.Random, shape: TrafficShape, turn: int) -> KnownRequest:
    instance = shape.instances[turn % len(shape.instances)]
    legs = []
    for role, base, places in shape.legs:
        place = places[(turn // 2) % len(places)] if places else instance
        hop = _draw_length(draw, 1.3) if shape.role == "router" else 0
        lengths = {name: _draw_length(draw, ms) for name, ms in base.items()}
        leg = KnownLeg(role, place, lengths, draw.randrange(40), hop)
        if role == "prefill_decode":  # one of the two encodes some items again
            leg = replace(leg, recomputed=turn % 3 if place == places[0] and turn % 20 < 4 else 0)
        legs.append(leg)
    own = {}
    if shape.role == "router":
        for name, ms in (("receive", 0.3), ("route", 0.15), ("egress", 0.2)):
            own[f"router.{name}"] = _draw_length(draw, ms)
        if turn % 48 < 2:
            own["router.retry"] = _draw_length(draw, 24.0)
    spare = ()
    if shape.kind == "epd" and turn % 5 == 0:  # a second image, encoded sooner
        quick = {name: us // 2 for name, us in legs[0].lengths.items()}
        spare = (replace(legs[0], lengths=quick, hop=400),)
    streaming = turn % 3 > 0
    if not streaming and shape.role == "mono":
        legs[0] = replace(legs[0], lengths=_drop_stage(legs[0].lengths, "egress"))
    if not streaming:
        own.pop("router.egress", None)
        if shape.role == "router":
            legs[-1] = replace(legs[-1], lengths=_drop_stage(legs[-1].lengths, "egress"))
    return KnownRequest(
        *(0, shape.kind, shape.model, shape.role, instance, tuple(legs), own, spare, streaming)
    )


def _add_trouble(
    draw: random.Random, shape: TrafficShape, rows: list[KnownRequest]
) -> list[KnownRequest]:
    """The slow and the failed ones among the rows of one kind; all others stay below 900 ms."""
    assert max(row.ttft for row in rows) < 900_000, "a seed that makes slow ones by chance"
    if shape.kind not in CAUSES:
        return rows
    many, leg, stage = CAUSES[shape.kind]
    chosen = draw.sample(range(8, len(rows)), many + FAILED_ROWS // 3)
    for turn, place in enumerate(chosen[:many]):
        extra = round(1_050_000 * (1 + 2.2 * turn / many)) + draw.randrange(9_000)
        rows[place] = _lengthen_stage(rows[place], leg, stage, extra)
    for turn, place in enumerate(chosen[many:]):
        row = rows[place]
        if turn % 2:
            row = _lengthen_stage(row, leg, stage, 4_000_000 + draw.randrange(2_000_000))
        kinds = (*SERVER_ERRORS, *LEFT_ERRORS, *REFUSED_ERRORS)
        rows[place] = replace(row, error=kinds[turn // 2 % len(kinds)], streaming=False)
    return rows


def _lengthen_stage(row: KnownRequest, place: int, stage: str, extra: int) -> KnownRequest:
    leg = row.legs[place]
    grown = replace(leg, lengths={**leg.lengths, stage: leg.lengths[stage] + extra})
    return replace(row, legs=(*row.legs[:place], grown, *row.legs[place + 1 :]))


def _draw_length(draw: random.Random, ms: float) -> int:
    """Around so many milliseconds, skewed as waits are."""
    return 1 + round(1000 * ms * min(3.0, draw.lognormvariate(0.0, 0.4)))


def _drop_stage(lengths: Mapping[str, int], name: str) -> dict[str, int]:
    return {stage: us for stage, us in lengths.items() if stage != name}


# Rows -> Records -> spans.


SourcedRecord = tuple[Record, str]  # and the instance that tells it
LaidStage = tuple[str, int, Attributes]  # name, length in microseconds
ROUTE: Final = "POST /v1/chat/completions"


def build_known_records(row: KnownRequest, end_ns: int) -> list[SourcedRecord]:
    """The Records of a row, its response over at `end_ns`."""
    return _RecordBuilder(row, end_ns).build_records()


def list_known_records(rows: Iterable[KnownRequest], end_ns: int | None = None) -> list[Record]:
    """The Records of these rows, their responses over at `end_ns`, or now."""
    return [
        record
        for row in rows
        for record, _ in build_known_records(row, time.time_ns() if end_ns is None else end_ns)
    ]


def sum_queues_us(
    rows: Iterable[KnownRequest], divide: Callable[[int], Mapping[str, int]]
) -> dict[str, int]:
    """Microseconds in queues of all servers, of spare encoders and lone ones too, as each is divided."""
    sums: Counter[str] = Counter()
    for leg in (leg for row in rows for leg in (*row.legs, *row.spare)):
        for stage in QUEUE_STAGES:
            sums.update(divide(leg.lengths.get(stage, 0)))
    return sums


def divide_by_work(us: int) -> dict[str, int]:
    """What held a known request in a queue that long; some kinds are missing, as in most queues."""
    kinds = ("prefill", "decode", "encoder", "idle")[us % 2 :: 2]
    first = us // 3
    found = dict(zip(kinds, (first, us - first), strict=True))
    return {kind: length for kind, length in found.items() if length}


def get_reason(us: int) -> str:
    """Why a known request waited for so long; each queue has one reason."""
    return ("max_num_seqs", "token_budget", "in_step")[us % 3]


class _RecordBuilder:
    """Builds the Records of one row."""

    def __init__(self, row: KnownRequest, end_ns: int) -> None:
        self.row = row
        self.draw = random.Random(row.trace_id)
        self.response_us = 40_000 if row.streaming else 300
        self.start_ns = end_ns - (row.ttft + self.response_us) * 1000

    def build_records(self) -> list[SourcedRecord]:
        """Those of all its processes; the router's comes last."""
        row = self.row
        if not row.routed:
            return [self.build_server_record(row.legs[0], self.start_ns, self.response_us, "")]
        calls: list[Call] = []
        found: list[SourcedRecord] = []
        at = sum(row.own.get(f"router.{name}", 0) for name in ("receive", "route", "retry"))
        if lost := row.own.get("router.retry", 0):
            calls.append(self.build_call(row.legs[0], at - lost, at, 503))
        for leg in row.legs:
            after_us = self.response_us if leg is row.legs[-1] else 0
            for each in (leg, *(row.spare if leg.role == "encode" else ())):
                call = self.build_call(each, at, at + each.hop + each.ttft + after_us, 200)
                calls.append(call)
                begin_ns = self.start_ns + (at + each.hop // 2) * 1000
                server = self.build_server_record(each, begin_ns, after_us or 100, call.span_id)
                found.append(server)
            at += leg.hop + leg.ttft
        return [*found, (self.build_router_record(tuple(calls)), row.instance)]

    def draw_id(self) -> str:
        """The ID of a span."""
        return f"{self.draw.getrandbits(64) | 1:016x}"

    def build_call(self, leg: KnownLeg, start: int, end: int, status: int) -> Call:
        """The router's call of a server."""
        host, _, port = leg.instance.partition(":")
        place: Attributes = {keys.SERVER_ADDRESS: host, keys.SERVER_PORT: int(port)}
        attributes = {keys.HTTP_METHOD: "POST", **place}
        error = "" if status < 400 else str(status)
        return Call(self.draw_id(), ROUTE, leg.role, start, end, status, attributes, error)

    def build_server_record(
        self, leg: KnownLeg, start_ns: int, after_us: int, parent: str
    ) -> SourcedRecord:
        """What one server records; outermost when no router called it."""
        laid: list[LaidStage] = []
        for name, us in leg.lengths.items():
            waited: Attributes = {}
            if name in QUEUE_STAGES:
                held = {
                    keys.name_held_attribute(kind): us for kind, us in divide_by_work(us).items()
                }
                waited = {keys.QUEUE_REASON: get_reason(us), **held}
            laid.append((name, us, waited))
        pieces = _lay_pieces([*laid, (UNATTRIBUTED, leg.lost, {})])
        for each in [piece for piece in pieces if piece.name == "preprocess"]:
            end = each.start + (each.end - each.start) // 2
            pieces.insert(pieces.index(each) + 1, Piece("part", "tokenize", each.start, end))
        attributes: Attributes = {keys.INPUT_TOKENS: 512}
        if leg.recomputed is not None:
            attributes[keys.EC_RECOMPUTED_ITEMS] = leg.recomputed
        lengths = dict(leg.lengths)
        told = (lengths, leg.lost, pieces, attributes, start_ns, after_us, parent)
        return self.build_record(leg.role, *told), leg.instance

    def build_router_record(self, calls: tuple[Call, ...]) -> Record:
        """What the router records: its own stages around its legs', laid end to end."""
        row = self.row
        before = ("receive", "tokenize", "lookup", "route", "retry")
        laid: list[LaidStage] = [
            (f"router.{name}", row.own.get(f"router.{name}", 0), {}) for name in before
        ]
        for leg in row.legs:
            where: Attributes = {keys.INSTANCE: leg.instance}
            laid.append((f"router.hop.{leg.role}", leg.hop, where))
            laid += [(f"{leg.role}.{name}", us, where) for name, us in leg.lengths.items()]
            laid.append((UNATTRIBUTED, leg.lost, {}))
        laid.append(("router.egress", row.own.get("router.egress", 0), {}))
        told = (
            row.stages,
            row.unattributed,
            _lay_pieces(laid),
            {},
            self.start_ns,
            self.response_us,
        )
        return self.build_record("router", *told, "", calls)

    def build_record(
        self,
        role: Role,
        lengths: dict[str, int],
        lost: int,
        pieces: list[Piece],
        more: Attributes,
        start_ns: int,
        after_us: int,
        parent: str,
        calls: tuple[Call, ...] = (),
    ) -> Record:
        """What one process records; `more` belongs to its first token."""
        row, replaced = self.row, msgspec.structs.replace
        error = row.error if role == row.role else ""
        died = f"{row.legs[-1].role}.prefill.queue" if role == "router" else "prefill.queue"
        made = make_leg_record(
            role, lengths, row.trace_id, parent, start_ns, row.request_id, role == row.role, lost
        )
        ttft = replaced(
            made.ttft,
            span_id=self.draw_id(),
            pieces=tuple(pieces),
            attributes={keys.STREAMING: row.streaming, **more},
            error=error,
            died=died if error else "",
        )
        status = int(error) if error.isdigit() else 504 if error else 200
        served: Attributes = {keys.HTTP_METHOD: "POST", keys.HTTP_ROUTE: ROUTE.split()[1]}
        # Only instances that decode know it, and only of answers.
        if not error and role not in ("router", *stages.INTERMEDIATE_ROLES):
            served[keys.TIME_PER_OUTPUT_TOKEN_US] = 5_000 + row.number
        return replaced(
            made,
            version=RECORD_VERSION,
            span_id=self.draw_id(),
            attributes={
                keys.OPERATION: "chat",
                keys.PROVIDER: keys.PROVIDER_VLLM,
                keys.MODEL: row.model,
                keys.STREAM: row.streaming,
            },
            ttft=ttft,
            server=Server(ROUTE, ttft.end + after_us, status, served, error),
            calls=calls,
        )


def _lay_pieces(laid: Iterable[LaidStage]) -> list[Piece]:
    """Stages one after the other, without those that took no time."""
    pieces, at = [], 0
    for name, us, attributes in laid:
        if us:
            pieces.append(Piece("stage", name, at, at + us, attributes))
        at += us
    return pieces


def build_known_spans(rows: Iterable[KnownRequest], end_ns: int) -> list[ReadableSpan]:
    """The exporter's own spans of these rows, each process under its own resource."""
    resources: dict[tuple[str, str], Resource] = {}
    found: list[ReadableSpan] = []
    for row in rows:
        for record, instance in build_known_records(row, end_ns):
            key = (record.service, instance)
            if key not in resources:
                own = {"service.name": key[0], "service.instance.id": key[1]}
                resources[key] = Resource(own)
            found += exporter.build_spans(record, resources[key])
    return found


def send_rows(url: str, rows: Sequence[KnownRequest], batch: int = SPANS_PER_BATCH) -> None:
    """Ship rows to an OTLP/HTTP receiver as if they had just ended, `batch` spans to a message."""
    export_spans(url, build_known_spans(rows, time.time_ns()), batch)


def export_spans(
    url: str, known_spans: Sequence[ReadableSpan], batch: int = SPANS_PER_BATCH
) -> None:
    """Ship spans."""
    client = OTLPSpanExporter(endpoint=f"{url}/v1/traces", timeout=30)
    try:
        for first in range(0, len(known_spans), batch):
            result = client.export(known_spans[first : first + batch])
            assert result is SpanExportResult.SUCCESS, f"{url} refused spans"
    finally:
        client.shutdown()


class KnownTruth:
    """What is true of some rows; encoders that were asked directly answer nobody and are left out."""

    def __init__(self, rows: Iterable[KnownRequest]) -> None:
        self.all = [row for row in rows if row.role != "encode"]
        self.good = [row for row in self.all if not row.error]

    def select_rows(self, **wanted: str) -> KnownTruth:
        """The rows with these values: `model`, `role`, `instance`, `kind`."""
        return KnownTruth(
            row
            for row in self.all
            if all(getattr(row, name) == value for name, value in wanted.items())
        )

    def compute_quantile_s(self, share: float) -> float:
        """Of the TTFT of those that got a first token; seconds, nearest rank."""
        ordered = sorted(row.ttft for row in self.good)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] / 1e6

    def compute_mean_s(self) -> float:
        """Mean TTFT of those that got a first token, in seconds."""
        return fmean(row.ttft for row in self.good) / 1e6

    def compute_stage_means_s(self) -> dict[str, float]:
        """Mean seconds by full stage name; with the remainder they add up to the mean TTFT."""
        sums: dict[str, int] = {}
        for row in self.good:
            for name, us in (row.stages | {UNATTRIBUTED: row.unattributed}).items():
                sums[name] = sums.get(name, 0) + us
        return {name: us / len(self.good) / 1e6 for name, us in sums.items()}

    def compute_share_over(self, ms: float = SLO_MS) -> float:
        """Share of requests that had no first token by an objective, or that a server failed."""
        judged = [row for row in self.all if row.error not in REFUSED_ERRORS]
        missed = [row for row in judged if row.ttft > 1000 * ms or row.error in SERVER_ERRORS]
        return len(missed) / len(judged)

    def compute_share_ended(self, errors: Sequence[str]) -> float:
        """Share of requests that ended without a first token, by one of these errors."""
        return sum(row.error in errors for row in self.all) / len(self.all)

    def list_slow_rows(self, ms: int = SLO_MS) -> list[KnownRequest]:
        """The requests that took so many milliseconds or more, failed ones among them, longest first."""
        return sorted(
            (row for row in self.all if row.ttft // 1000 >= ms), key=lambda row: -row.ttft
        )
