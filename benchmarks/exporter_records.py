# SPDX-License-Identifier: Apache-2.0
"""Requests for benchmarks/exporter.py: a streamed request's two Records, and the 15 spans of them."""

from __future__ import annotations

from typing import Final

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from benchmarks.otlp_bodies import SERVER_STAGES, build_benchmark_record
from ttft_otel.exporter.span_batch import build_spans
from ttft_otel.model.names import keys
from ttft_otel.model.record import Attributes, Piece, Record, encode_record
from ttft_otel.tracing.measurement import encode_for_exporter

STAGE_US: Final = 1000
QUEUE: Final = "prefill.queue"  # says why it waited, and behind what
PARTS: Final = ("tokenize", "collect", "detokenize")
SPANS_PER_REQUEST: Final = 15  # server, ttft, 9 stages, unattributed, 3 parts


def build_request_halves(number: int) -> list[Record]:
    """The `ttft` half, which is sent with the first token, and the `server` half of its end."""
    # Lengths differ from request to request: equal spans would let an encoder keep all of them.
    lengths_us = {stage: STAGE_US + number % 97 for stage in SERVER_STAGES["mono"]}
    whole = build_benchmark_record("mono", lengths_us, number, True, ())
    assert whole.ttft is not None
    # Inside the first stages, as parts are: they do not add to the sum of the stages.
    parts = tuple(
        Piece("part", name, place * STAGE_US + 1, place * STAGE_US + 900)
        for place, name in enumerate(PARTS)
    )
    waits = _describe_queue(lengths_us[QUEUE])
    told = {keys.QUEUE_REASON: "token_budget"} | waits
    pieces = [
        msgspec.structs.replace(piece, attributes=told) if piece.name == QUEUE else piece
        for piece in whole.ttft.pieces
    ]
    sums = waits | {keys.name_reason_attribute(QUEUE, "token_budget"): lengths_us[QUEUE]}
    ttft = msgspec.structs.replace(
        whole.ttft, pieces=(*pieces, *parts), attributes=whole.ttft.attributes | sums
    )
    return [
        msgspec.structs.replace(whole, ttft=ttft, server=None),
        msgspec.structs.replace(whole, ttft=None),
    ]


def _describe_queue(length_us: int) -> Attributes:
    """What held a queue of this length: prompts, tokens of answers, and an idle rest."""
    prefill_us, decode_us = length_us // 2, length_us // 3
    rest_us = length_us - prefill_us - decode_us
    lengths = {"prefill": prefill_us, "decode": decode_us, "idle": rest_us}
    return {keys.name_held_attribute(kind): length for kind, length in lengths.items()}


def encode_request(number: int) -> list[bytes]:
    """The halves as they travel to the exporter."""
    return [encode_record(half) for half in build_request_halves(number)]


def encode_unsampled_request(number: int) -> bytes:
    """What is sent of the same request when it is not sampled, but counted."""
    ttft_half = build_request_halves(number)[0]
    return encode_for_exporter(msgspec.structs.replace(ttft_half, flags=0))


def build_request_spans(number: int) -> list[ReadableSpan]:
    """The request's spans, parents before their children."""
    # Of no matter: these spans are templates, and the SDK's provider brings its own resource.
    resource = Resource({})
    ttft, server = build_request_halves(number)
    spans = build_spans(server, resource) + build_spans(ttft, resource)
    assert len(spans) == SPANS_PER_REQUEST
    return spans
