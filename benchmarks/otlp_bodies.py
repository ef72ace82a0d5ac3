# SPDX-License-Identifier: Apache-2.0
"""Export requests for benchmarks/collector.py, with span trees as routers and servers export them."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from ttft_otel.exporter import span_batch as exporter
from ttft_otel.model import stages
from ttft_otel.model.endpoints import CHAT_PATH
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import RECORD_VERSION, Attributes, Call, Piece, Record, Server, Ttft

SPANS_PER_BATCH: Final = 512  # spans of one request, as our exporter sends them
BATCH_COUNT: Final = 24  # different ones, sent in turn with new trace ids
_FIRST_STAGES: Final = ("receive", "preprocess", "ipc")
_TEXT_STAGES: Final = (*_FIRST_STAGES, "prefill.queue", "dispatch", "prefill.compute")
_LAST_STAGES: Final = ("sample", "output", "egress")
# By role, in the order of a request.
SERVER_STAGES: Final[dict[stages.Role, tuple[str, ...]]] = {
    "mono": (*_TEXT_STAGES, *_LAST_STAGES),
    "encode": (
        *(*_FIRST_STAGES, "encoder.queue", "dispatch"),
        *("encoder.compute", "ec.transfer", "output", "egress"),
    ),
    "prefill": (*_TEXT_STAGES, "ec.transfer", *_LAST_STAGES),
    "prefill_decode": (*_TEXT_STAGES, "ec.transfer", *_LAST_STAGES),
    "decode": (*_TEXT_STAGES, "kv.transfer", *_LAST_STAGES),
}


def draw_stage_lengths(names_: tuple[str, ...], draw: random.Random) -> dict[str, int]:
    """Random lengths of stages in microseconds."""
    # Log-normal, as times of servers are: median e^9 us, 8 ms; never 0, which would be no span.
    return {name: 1 + round(draw.lognormvariate(9, 1)) for name in names_}


def build_benchmark_record(
    role: stages.Role,
    stages_us: dict[str, int],
    number: int,
    outermost: bool,
    calls: tuple[Call, ...],
) -> Record:
    """One process's record of a request; the trace id's first half is `number`, the rest is put in later."""
    pieces, offset_us = [], 0
    for name, us in stages_us.items():
        leg = stages.split_stage(name)[0]
        where: Attributes = {keys.INSTANCE: f"10.0.0.{number % 4}:8000"} if leg else {}
        pieces.append(Piece("stage", name, offset_us, offset_us + us, where))
        offset_us += us
    # A rest on every request: its span and its statement in the collector cost, too.
    pieces.append(Piece("stage", stages.UNATTRIBUTED, offset_us, offset_us + 7))
    # Eight ids for a request's processes, of which there are fewer roles.
    span = f"{number * 8 + stages.ROLES.index(role) + 1:016x}"
    return Record(
        version=RECORD_VERSION,
        # The second half marks the place in the serialized message: pack_spans() looks for it.
        trace_id=f"{number:016x}" + "f" * 16,
        span_id=span,
        parent_id="",
        # Sampled.
        flags=1,
        state="",
        start_ns=time.time_ns() - offset_us * 1000,
        role=role,
        outermost=outermost,
        service=stages.SERVICE_NAMES[role],
        request_id=f"{number:032x}",
        attributes={
            keys.OPERATION: "chat",
            keys.PROVIDER: keys.PROVIDER_VLLM,
            keys.MODEL: "Qwen/Qwen2.5-VL-7B-Instruct",
            keys.STREAM: True,
        },
        ttft=Ttft(
            span_id=f"f{span[1:]}",
            name=span_names.ENCODE if role == "encode" else span_names.TTFT,
            start=0,
            end=offset_us + 7,
            stages=stages_us,
            unattributed=7,
            clamped=0,
            pieces=tuple(pieces),
            attributes={keys.STREAMING: True, keys.INPUT_TOKENS: 512, keys.PREFILL_CHUNKS: 1},
        ),
        server=Server(
            f"POST {CHAT_PATH}",
            # The stream ends 90 ms after the first token.
            offset_us + 90_000,
            200,
            {keys.HTTP_METHOD: "POST", keys.HTTP_ROUTE: CHAT_PATH},
        ),
        calls=calls,
    )


def build_request_records(
    legs: tuple[stages.Role, ...], number: int, draw: random.Random
) -> list[Record]:
    """One request through a router and an instance of each of `legs`; without any, on a single server."""
    if not legs:
        own_stages = draw_stage_lengths(SERVER_STAGES["mono"], draw)
        return [build_benchmark_record("mono", own_stages, number, True, ())]
    records = []
    router_stages = draw_stage_lengths(("router.receive", "router.route"), draw)
    for leg in legs:
        own_stages = draw_stage_lengths(SERVER_STAGES[leg], draw)
        records.append(build_benchmark_record(leg, own_stages, number, False, ()))
        router_stages |= draw_stage_lengths((f"router.hop.{leg}",), draw)
        router_stages |= {f"{leg}.{name}": us for name, us in own_stages.items()}
    router_stages |= draw_stage_lengths(("router.egress",), draw)
    calls = tuple(
        Call(f"c{number * 4 + place:015x}", f"POST {CHAT_PATH}", leg, 0, 100_000, 200)
        for place, leg in enumerate(legs)
    )
    return [*records, build_benchmark_record("router", router_stages, number, True, calls)]


@dataclass
class OtlpBody:
    """A serialized export request, and the offsets of its trace IDs."""

    data: bytearray
    id_offsets: list[tuple[int, int]]  # offset, number
    spans: int

    def renew_trace_ids(self, turn: int) -> None:
        """Other trace ids: the halves that the generator left open."""
        for offset, number in self.id_offsets:
            # Odd constants spread the IDs over all bits: samplers and shards decide by some of them.
            mixed = (number * 0x9E3779B97F4A7C15 + turn * 0xC2B2AE3D27D4EB4F) & (2**64 - 1)
            self.data[offset : offset + 8] = mixed.to_bytes(8, "big")


def build_otlp_bodies() -> list[OtlpBody]:
    """BATCH_COUNT requests of about SPANS_PER_BATCH spans, service by service as separate exporters would."""
    draw = random.Random(5)
    resources = {
        service: Resource({"service.name": service, "service.instance.id": f"{service}:1"})
        for service in stages.SERVICE_NAMES.values()
    }
    waiting: dict[str, list[ReadableSpan]] = {}
    requests: list[OtlpBody] = []
    number = 0
    while len(requests) < BATCH_COUNT:
        number += 1
        # Every other one text on a single server.
        legs: tuple[stages.Role, ...] = () if number % 2 else ("encode", "prefill_decode")
        for each in build_request_records(legs, number, draw):
            spans = waiting.setdefault(each.service, [])
            spans += exporter.build_spans(each, resources[each.service])
            if len(spans) >= SPANS_PER_BATCH:
                # What does not fill a batch in the end is left out: all bodies have about the same size.
                requests.append(pack_spans(spans))
                waiting[each.service] = []
    return requests


def pack_spans(spans: list[ReadableSpan]) -> OtlpBody:
    """Serialize spans, and find the offsets of their trace IDs."""
    # In place later: to serialize anew for every export would cost the sender more than sending.
    data = bytearray(encode_spans(spans).SerializeToString())
    # The generated trace IDs end with eight bytes 0xff, which occur nowhere else in the message.
    places, at = [], data.find(b"\xff" * 8)
    while at >= 0:
        places.append((at, int.from_bytes(data[at - 8 : at], "big")))
        at = data.find(b"\xff" * 8, at + 8)
    # One place a span: parents are named by their span ids alone, and no span has links.
    assert len(places) == len(spans)
    return OtlpBody(data, places, len(spans))
