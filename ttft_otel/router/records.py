# SPDX-License-Identifier: Apache-2.0
"""Turns an Exchange into Records for the exporter; exchange_reporter.py asks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

from ttft_otel.model import stages
from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.endpoints import find_route
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import (
    RECORD_VERSION,
    Attributes,
    Call,
    Handover,
    HandoverCall,
    Piece,
    Record,
    Server,
    Ttft,
)
from ttft_otel.model.stages import ENCODE
from ttft_otel.model.timing import MAX_HEADER_CHARS
from ttft_otel.router.exchange import Exchange
from ttft_otel.router.timeline import Attempt, RequestTimeline
from ttft_otel.router.types import DEFAULT_POLICY, MODE_STRIP, Decision
from ttft_otel.tracing import clock
from ttft_otel.tracing.context import new_span_id
from ttft_otel.tracing.measurement import encode_for_exporter

MAX_CLIENT_STRING_CHARS: Final = 256  # characters of a string the client chose
MAX_REPORTED_CANDIDATES: Final = 16  # candidates of a decision on a span, the best ones
_ROUTE: Final = "router.route"
_NO_ATTRIBUTES: Final[Attributes] = {}  # shared, since Records are not modified


def encode_known_parts(
    exchange: Exchange, breakdown: Breakdown | None, ended_us: int, is_counted: bool
) -> bytes:
    """What the exporter gets of `exchange`, arguments as of build_record(); b"" for nothing.

    is_counted: metrics count every request; of one that is not sampled they get its numbers alone.
    """
    is_told = exchange.trace_context.sampled or is_counted
    return encode_for_exporter(build_record(exchange, breakdown, ended_us)) if is_told else b""


def build_record(exchange: Exchange, breakdown: Breakdown | None, ended_us: int = 0) -> Record:
    """Build a Record of the known parts: `breakdown` gives the TTFT, `ended_us` the server span."""
    context = exchange.trace_context
    arrived_us = exchange.timeline.arrived_us
    return Record(
        RECORD_VERSION,
        context.trace_id,
        context.span_id,
        context.parent_id,
        context.flags,
        context.tracestate,
        clock.to_wall_ns(arrived_us),
        "router",
        exchange.is_outermost,
        stages.SERVICE_NAMES["router"],
        exchange.request_id,
        attributes=_build_identity(exchange),
        ttft=None if breakdown is None else _build_ttft(exchange, breakdown),
        server=_build_server(exchange, ended_us - arrived_us) if ended_us else None,
        calls=tuple(_build_calls(exchange, ended_us)) if ended_us else (),
        handover=_build_handover(exchange) if ended_us else None,
    )


def _build_identity(exchange: Exchange) -> Attributes:
    attributes: Attributes = {keys.PROVIDER: keys.PROVIDER_VLLM}
    if exchange.operation:
        attributes[keys.OPERATION] = exchange.operation
        attributes[keys.STREAM] = exchange.wants_stream
    # Only names that an instance knows: it may become a label of metrics, of which each value is a series.
    if exchange.model and (exchange.is_model_listed or exchange.has_answered):
        attributes[keys.MODEL] = exchange.model[:MAX_CLIENT_STRING_CHARS]
    return attributes


def _build_ttft(exchange: Exchange, breakdown: Breakdown) -> Ttft:
    # Instance attributes by leg, so that a slow instance can be found.
    # Of a leg that was retried only the last attempt has stages; the others are router.retry.
    servers: dict[str, Attributes] = {
        chain[-1].leg: {keys.INSTANCE: f"{chain[-1].instance.host}:{chain[-1].instance.port}"}
        for chain in exchange.timeline.critical_path
        if chain
    }
    start = breakdown.start
    decisions = _describe_decisions(exchange.timeline)
    hold = exchange.timeline.hold
    held: Attributes = {} if hold is None else {keys.QUEUE_REASON: hold.reason}
    return Ttft(
        span_id=new_span_id(),
        name=span_names.TTFT,
        start=0,
        end=breakdown.end - start,
        stages=breakdown.stages,
        unattributed=breakdown.unattributed,
        clamped=breakdown.clamped,
        # A list within: a generator would be resumed for each piece.
        pieces=tuple(
            [
                Piece(
                    "stage",
                    name,
                    low - start,
                    high - start,
                    # our own stages have no server; of choices only the last piece tells
                    decisions.get(high, _NO_ATTRIBUTES)
                    if name == _ROUTE
                    else held
                    if name == stages.HOLD
                    else servers.get(_find_stage_leg(name), _NO_ATTRIBUTES),
                )
                for name, low, high in breakdown.pieces
            ]
        ),
        attributes=_describe_first_token(exchange),
        error="" if exchange.has_answered else exchange.error,
        died=exchange.failed_stage,
    )


def _describe_first_token(exchange: Exchange) -> Attributes:
    attributes: Attributes = {keys.STREAMING: exchange.is_streaming}
    mode, reason = exchange.first_token_outcome
    if mode:
        attributes[keys.FIRST_TOKEN] = mode
    if reason:
        attributes[keys.FIRST_TOKEN_REASON] = reason
    for chain in exchange.timeline.critical_path:
        load_entry = chain[-1].load_entry if chain else None
        if load_entry is None or load_entry.predicted_ttft_s is None or chain[-1].leg == ENCODE:
            continue
        attributes[keys.PREDICTED_MS] = round(load_entry.predicted_ttft_s * 1000)
        if load_entry.prediction_error_s is not None:
            attributes[keys.PREDICTION_ERROR_MS] = round(load_entry.prediction_error_s * 1000)
    return attributes


def _describe_decisions(timeline: RequestTimeline) -> dict[int, Attributes]:
    """Attributes of each routing decision, by the time when the request was sent."""
    decisions = {}
    for chain in timeline.critical_path:
        for attempt in chain:
            # round_robin adds nothing to the attributes of the call spans
            if attempt.policy != DEFAULT_POLICY and attempt.decision is not None:
                decisions[attempt.sent_us] = _describe_decision(attempt, attempt.decision)
    return decisions


def _describe_decision(attempt: Attempt, decision: Decision) -> Attributes:
    # seconds become microseconds: no doubles
    unit = 1 if decision.predicted_ttft_s is None else 1e6
    scores = decision.candidate_scores
    cached_tokens = decision.candidate_cached_tokens
    best_positions = sorted(range(len(scores)), key=scores.__getitem__)[:MAX_REPORTED_CANDIDATES]
    candidates = attempt.candidates
    attributes: Attributes = {
        keys.ROUTE_POLICY: attempt.policy,
        keys.ROUTE_REASON: decision.reason,
        keys.ROUTE_CANDIDATES: len(candidates),
    }
    if scores:
        attributes[keys.ROUTE_SCORE] = round(decision.score * unit)
        attributes[keys.ROUTE_SCORES] = tuple(
            round(scores[position] * unit) for position in best_positions
        )
        attributes[keys.ROUTE_INSTANCES] = tuple(
            f"{candidates[position].host}:{candidates[position].port}"
            for position in best_positions
        )
    if cached_tokens:
        attributes[keys.ROUTE_CACHED_TOKENS] = tuple(
            cached_tokens[position] for position in best_positions
        )
    return attributes


def _build_handover(exchange: Exchange) -> Handover | None:
    """The wait between P's token and D's next one; None without one, or if it has no end."""
    timeline = exchange.handover_timeline
    arrived_us = exchange.timeline.arrived_us
    if timeline is None or not timeline.ended_us:
        return None
    return Handover(
        timeline.arrived_us - arrived_us,
        timeline.ended_us - arrived_us,
        exchange.first_token_outcome[0] == MODE_STRIP,
        tuple(
            [
                HandoverCall(
                    each.leg,
                    each.sent_us - arrived_us,
                    each.first_byte_us and each.first_byte_us - arrived_us,
                    each.ended_us and each.ended_us - arrived_us,
                    each.is_lost,
                    each.resumed_us and each.resumed_us - arrived_us,
                    _clean_timing(each.timing_header),
                )
                for chain in timeline.critical_path
                for each in chain
            ]
        ),
    )


def _clean_timing(header: str) -> str:
    """A Server-Timing header as a Record can hold it; "" for one that nobody would parse."""
    if len(header) > MAX_HEADER_CHARS:
        return ""
    # Bytes that are no text are lone surrogates here, and no entry of ours has any such character.
    return header if header.isascii() else header.encode("ascii", "replace").decode()


@functools.cache  # as many as there are stages
def _find_stage_leg(stage: str) -> str:
    return stages.split_stage(stage)[0] or stage.removeprefix("router.hop.")


def _build_server(exchange: Exchange, duration_us: int) -> Server:
    return Server(
        name=f"POST {exchange.route}",
        end=duration_us,
        status=exchange.status,
        attributes={
            keys.HTTP_METHOD: "POST",
            keys.HTTP_ROUTE: exchange.route,
            # Cut: a path may be as long as --max-target allows.
            keys.URL_PATH: exchange.path[:MAX_CLIENT_STRING_CHARS],
            keys.URL_SCHEME: exchange.scheme,
            **({keys.FIRST_TOKEN_MISMATCH: True} if exchange.first_token_mismatch else {}),
            **({keys.BACKGROUND: True} if exchange.is_queued_only else {}),
        },
        # a 4xx is the client's error, not this server's
        error="" if 400 <= exchange.status < 500 else exchange.error,
    )


def _build_calls(exchange: Exchange, ended_us: int) -> Iterable[Call]:
    arrived_us = exchange.timeline.arrived_us
    for attempt in (attempt for chain in exchange.attempt_chains for attempt in chain):
        attributes: Attributes = {
            keys.HTTP_METHOD: "POST",
            keys.SERVER_ADDRESS: attempt.instance.host,
            keys.SERVER_PORT: attempt.instance.port,
        }
        if attempt.policy:
            attributes[keys.ROUTE_POLICY] = attempt.policy
            attributes[keys.ROUTE_CANDIDATES] = len(attempt.candidates)
        if attempt.number > 1:
            attributes[keys.ATTEMPT] = attempt.number
        yield Call(
            attempt.span_id,
            f"POST {find_route(attempt.path)}",
            attempt.leg,
            attempt.sent_us - arrived_us,
            (attempt.ended_us or ended_us) - arrived_us,
            attempt.status,
            attributes,
            attempt.error,
        )
