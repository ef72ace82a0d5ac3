# SPDX-License-Identifier: Apache-2.0
"""Write Visits as a real deployment sends them: Records, their spans as OTLP, through the receiver's decoder
into a store, which the commands then read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from benchmarks.answers.known_engine import Chance
from benchmarks.answers.known_fleet import ServerLeg, Visit
from ttft_otel.exporter.span_writer import write_spans
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import (
    RECORD_VERSION,
    Attributes,
    Call,
    HeldBy,
    Piece,
    Record,
    Server,
    Ttft,
)
from ttft_otel.report.receive.otlp_decoder import chunk_export
from ttft_otel.report.store.span_store import SpanStore

BEGIN_S: Final = 1_790_000_000  # Unix seconds of the first hour's begin
TENANT: Final = "tenant"  # attribute by which tenants are told apart
PIECE_FROM: Final = 5_000  # us of waiting, from which on the queue's span is written
BATCH: Final = 500  # requests of an export
ROUTE: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Sampling:
    """What does not reach the store: of requests kept by chance, of fast ones, of single records."""

    head: float = 1.0  #: the share that is kept
    tail_us: int = 0  #: of requests that are faster, only a tenth is kept
    lost: float = 0.0  #: share of servers' records that never arrive


def store_visits(
    path: Path,
    visits: Sequence[Visit],
    chance: Chance,
    start_s: float = 0.0,
    sampling: Sampling | None = None,
) -> None:
    """Add the requests to the store at `path`, the first of them `start_s` after BEGIN_S."""
    sampling = sampling or Sampling()
    start_ns = int((BEGIN_S + start_s) * 1e9)
    store = SpanStore(path)
    try:
        kept = [each for each in visits if _is_kept(each, sampling, chance)]
        for at in range(0, len(kept), BATCH):
            export = _Export(start_ns, sampling, chance)
            for visit in kept[at : at + BATCH]:
                export.add(visit)
            body = export.message.SerializeToString()
            store.add_chunks(chunk_export(body).chunks).result(60)
    finally:
        store.close()


def _is_kept(visit: Visit, sampling: Sampling, chance: Chance) -> bool:
    if sampling.tail_us and visit.ttft < sampling.tail_us and not visit.error:
        return bool(chance.random() < 0.1)
    return bool(sampling.head >= 1 or chance.random() < sampling.head)


class _Export:
    """One export request, with the spans of some visits by their servers."""

    def __init__(self, start_ns: int, sampling: Sampling, chance: Chance) -> None:
        self.message = ExportTraceServiceRequest()
        self.start_ns = start_ns
        self.sampling = sampling
        self.chance = chance
        self.scopes: dict[str, Any] = {}
        kept = 1 - sampling.head
        self.state = f"ot=th:{round(kept * 16**4):04x}" if sampling.head < 1 else ""

    def add(self, visit: Visit) -> None:
        """Write the records of a visit's servers."""
        base = (self.start_ns // 1000 + visit.number) * 16
        trace_id = f"{base:032x}"
        call_ids = [f"{base + 1 + at:016x}" for at in range(len(visit.legs))]
        if visit.router:
            self._write(_build_router_record(visit, trace_id, call_ids), "router-0", None)
        for at, leg in enumerate(visit.legs):
            if self.sampling.lost and self.chance.random() < self.sampling.lost:
                continue
            parent = call_ids[at] if visit.router else ""
            record = _build_server_record(
                visit, leg, trace_id, parent, self.start_ns, base + 8 + at
            )
            self._write(record, leg.instance, leg)

    def _write(self, record: Record, instance: str, leg: ServerLeg | None) -> None:
        scope = self.scopes.get(instance)
        if scope is None:
            group = self.message.resource_spans.add()
            for name, value in _describe_resource(record.service, instance, leg).items():
                group.resource.attributes.append(KeyValue(key=name, value=_make_value(value)))
            scope = self.scopes[instance] = group.scope_spans.add()
            scope.scope.name = span_names.SCOPE
        shifted = _replace_start(record, self.start_ns, self.state)
        write_spans(shifted, scope.spans)


def _replace_start(record: Record, start_ns: int, state: str) -> Record:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return Record(**{**fields, "start_ns": start_ns + record.start_ns, "state": state})


def _describe_resource(service: str, instance: str, leg: ServerLeg | None) -> dict[str, Any]:
    found: dict[str, Any] = {"service.name": service, "service.instance.id": instance}
    if leg is not None and leg.settings is not None:
        found |= {
            keys.ENGINE_MAX_SEQS: leg.settings.max_num_seqs,
            keys.ENGINE_MAX_TOKENS: leg.settings.max_num_batched_tokens,
            keys.ENGINE_KV_TOKENS: leg.settings.kv_tokens,
            keys.ENGINE_BLOCK_TOKENS: 16,
            keys.ENGINE_ASYNC: 0,
            keys.ENGINE_CHUNKED: 1,
        }
    return found


def _make_value(value: Any) -> AnyValue:
    return (
        AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=str(value))
    )


def _describe_identity(visit: Visit, adapter: bool) -> dict[str, Any]:
    found: dict[str, Any] = {keys.PROVIDER: "vllm", keys.STREAM: True}
    # A server tells the name that it serves, the router the one that the client asked for.
    found[keys.MODEL] = (adapter and visit.ask.adapter) or visit.ask.model
    if visit.ask.tenant:
        found[TENANT] = visit.ask.tenant
    return found


def _build_server_record(
    visit: Visit, leg: ServerLeg, trace_id: str, parent: str, start_ns: int, number: int
) -> Record:
    at = 0
    pieces = []
    ids = start_ns // 1000
    for name, us in leg.stages.items():
        if name.endswith(".queue") and us >= PIECE_FROM:
            held = tuple(
                HeldBy(
                    length,
                    tokens,
                    "prefill",
                    f"r{other}",
                    f"{(ids + other) * 16:032x}",
                    f"{1:016x}",
                )
                for length, tokens, other in leg.holders
            )
            pieces.append(Piece("stage", name, at, at + us, {}, held))
        at += us
    is_encoder = leg.role == "encode"
    ttft = Ttft(
        span_id=f"{number + (1 << 60):016x}",
        name=span_names.ENCODE if is_encoder else span_names.TTFT,
        start=0,
        end=leg.ttft,
        stages={name: us for name, us in leg.stages.items() if us},
        unattributed=leg.unattributed,
        clamped=0,
        pieces=tuple(pieces),
        attributes=leg.attributes,
        error=leg.error,
        died="prefill.queue" if leg.error else "",
    )
    generated: dict[str, Any] = {}
    if not (is_encoder or leg.error):
        generated = {keys.OUTPUT_TOKENS: leg.output_tokens}
        if leg.token_us > 0:
            generated[keys.TIME_PER_OUTPUT_TOKEN_US] = leg.token_us
    return Record(
        version=RECORD_VERSION,
        trace_id=trace_id,
        span_id=f"{number + (1 << 61):016x}",
        parent_id=parent,
        flags=1,
        state="",
        start_ns=leg.start * 1000,
        role=leg.role,
        outermost=not parent,
        service="vllm-encoder" if is_encoder else "vllm",
        request_id=f"r{start_ns // 10**9 % 100_000}-{visit.number}",
        attributes=_describe_identity(visit, adapter=not parent),
        ttft=ttft,
        server=Server(f"POST {ROUTE}", max(leg.end, leg.ttft), 200, generated, leg.error),
    )


def _build_router_record(visit: Visit, trace_id: str, call_ids: Sequence[str]) -> Record:
    base = int(trace_id, 16)
    last = visit.legs[-1]
    error = visit.error
    ttft = Ttft(
        span_id=f"{base + (1 << 62):016x}",
        name=span_names.TTFT,
        start=0,
        end=visit.ttft,
        stages={name: us for name, us in visit.router.items() if us},
        unattributed=visit.unattributed,
        clamped=0,
        pieces=(),
        attributes={keys.STREAMING: True},
        error=error,
        died=f"{last.role}.prefill.queue" if error else "",
    )
    end = visit.ttft + max(0, last.end - last.ttft)
    return Record(
        version=RECORD_VERSION,
        trace_id=trace_id,
        span_id=f"{base + 6:016x}",
        parent_id="",
        flags=1,
        state="",
        start_ns=visit.ask.at * 1000,
        role="router",
        outermost=True,
        service="ttft-otel-router",
        request_id=f"r{base // 16 // 10**6 % 100_000}-{visit.number}",
        attributes=_describe_identity(visit, adapter=True),
        ttft=ttft,
        server=Server(f"POST {ROUTE}", end, 0 if error else 200, {}, error),
        calls=tuple(_list_calls(visit, base, call_ids, end)),
    )


def _list_calls(visit: Visit, base: int, call_ids: Sequence[str], end: int) -> list[Call]:
    """The calls of the router to servers, that of a first attempt that failed before them."""
    calls = [
        Call(
            call_id,
            f"POST {ROUTE}",
            leg.role,
            max(0, min(leg.start - visit.ask.at, visit.ttft)),
            end,
            0 if visit.error else 200,
            {
                keys.SERVER_ADDRESS: leg.instance,
                keys.SERVER_PORT: 8000,
                **_describe_call(visit, leg),
            },
        )
        for call_id, leg in zip(call_ids, visit.legs, strict=True)
    ]
    if visit.failed:
        sent = visit.router["router.receive"] + visit.router["router.route"]
        until = sent + visit.router["router.retry"]
        place: Attributes = {keys.SERVER_ADDRESS: visit.failed, keys.SERVER_PORT: 8000}
        calls.insert(
            0,
            Call(
                f"{base + 7:016x}",
                f"POST {ROUTE}",
                visit.legs[-1].role,
                sent,
                until,
                503,
                place | {keys.ROUTE_POLICY: "round_robin"},
                "503",
            ),
        )
    return calls


def _describe_call(visit: Visit, leg: ServerLeg) -> dict[str, Any]:
    found: dict[str, Any] = {keys.ROUTE_POLICY: "round_robin"}
    if visit.failed and leg is visit.legs[-1]:
        found[keys.ATTEMPT] = 2
    return found


def name_times(first_s: float, last_s: float) -> str:
    """The time between so many seconds after BEGIN_S, as a user writes it."""
    ends = (datetime.fromtimestamp(BEGIN_S + each, timezone.utc) for each in (first_s, last_s))
    return "..".join(end.isoformat() for end in ends)
