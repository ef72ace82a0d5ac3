# SPDX-License-Identifier: Apache-2.0
"""HOT: the measurement of a RequestTrace that metrics count and that is not sampled, without a Record.

recorder.py sends its bytes. It equals what measurement.measure_record() makes of the same request's Record;
most of such a request's cost was making one.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ttft_otel.model import stages
from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.wait_reasons import ReasonSlice
from ttft_otel.tracing import record_parts
from ttft_otel.tracing.measurement import (
    MEASUREMENT_VERSION,
    NOT_MEASURED,
    PREFIX,
    REASON_CODES,
    MeasurementHead,
    RawMeasurement,
    Waits,
    encode_head,
)
from ttft_otel.tracing.request_trace import RequestTrace
from ttft_otel.tracing.roles import identity, is_outermost, resolve_role

MAX_HEADS: Final = 1024  # encoded heads that are kept; a server has a dozen
_encoder: Final = msgspec.msgpack.Encoder()
# The fields of a MeasurementHead after its service, with names alone for its stages -> its bytes.
_heads: dict[tuple[object, ...], msgspec.Raw] = {}


def encode_trace_measurement(trace: RequestTrace, cut: Breakdown | None, with_end: bool) -> bytes:
    """The bytes of what is to count of `trace` now; b"" where that is nothing.

    cut: its TTFT, None where that was sent already. with_end: it has ended.
    """
    role = resolve_role(trace)
    outermost = is_outermost(trace)
    is_encoder = cut is not None and role == "encode"
    recomputed = NOT_MEASURED if cut is None or is_encoder else _count_recomputed(trace)
    reasons, held = ((), ()) if cut is None or not cut.reasons else _list_waits(cut)
    if not (outermost or recomputed != NOT_MEASURED or reasons or held):
        cut = None
        is_encoder = False
    times_us: list[int] = []
    stage_names: tuple[str, ...] = ()
    if cut is not None:
        times_us.append(max(0, cut.end - cut.start))
        if outermost:
            stage_names = tuple([piece[0] for piece in cut.pieces])
            times_us += [high - low for _, low, high in cut.pieces]
    end_error = None
    if with_end and outermost and not trace.is_background:
        end_error = _find_end_error(trace)
        times_us.append(max(0, trace.end - trace.arrive))
    token_time_us = record_parts.measure_token_time(trace, role) if with_end else 0
    if token_time_us:
        times_us.append(token_time_us)
    if not times_us:
        return b""
    error = trace.error if cut is not None and not trace.has_first_token else ""
    operation = record_parts.name_operation(trace)
    key = (
        *(role, identity.model, operation, error, outermost, is_encoder, stage_names),
        *(cut is not None, end_error, token_time_us > 0),
    )
    head = _heads.get(key)
    if head is None:
        service = stages.SERVICE_NAMES.get(role, "vllm")  # type: ignore[call-overload]
        # No stage of ours has an instance: those of a router's legs do.
        pairs = tuple([(name, "") for name in stage_names])
        head = _keep_head(key, MeasurementHead(service, *key[:6], pairs, *key[7:]))
    return PREFIX + _encoder.encode(
        RawMeasurement(MEASUREMENT_VERSION, head, tuple(times_us), recomputed, reasons, held)
    )


def _keep_head(key: tuple[object, ...], head: MeasurementHead) -> msgspec.Raw:
    """Encode `head` and keep it: that takes as long as all of the rest."""
    if len(_heads) >= MAX_HEADS:
        _heads.clear()
    found = _heads[key] = msgspec.Raw(encode_head(head))
    return found


def _list_waits(cut: Breakdown) -> tuple[Waits, Waits]:
    """Parts of queues by reason and by what held them, of reasons as many as a Record has pieces for."""
    reasons: list[tuple[int, int]] = []
    several: list[ReasonSlice] = []
    for part in cut.reasons:
        # One reason that fills its piece is an attribute in a Record, and not bounded with the others.
        if (part.stage, part.start, part.end) not in cut.pieces:
            several.append(part)
        elif part.stage in stages.QUEUE_STAGES:
            reasons.append((REASON_CODES[part.reason], part.end - part.start))
    reasons += [
        (REASON_CODES[part.reason], part.end - part.start)
        for part in several[: record_parts.MAX_REASON_PIECES]
        if part.stage in stages.QUEUE_STAGES
    ]
    held = [
        (code, length)
        for piece in cut.held
        if piece.stage in stages.QUEUE_STAGES
        for code, length in enumerate(piece.lengths)
        if length
    ]
    return tuple(reasons), tuple(held)


def _count_recomputed(trace: RequestTrace) -> int:
    if trace.timeline is None or not identity.ec_connector:
        return NOT_MEASURED
    counts = record_parts.count_trace_items(trace)
    return NOT_MEASURED if counts is None or counts.recomputed is None else counts.recomputed


def _find_end_error(trace: RequestTrace) -> str:
    # A refusal is the client's error, but a duration without it would be that of a success.
    if trace.status >= 400:
        return (trace.error if trace.status >= 500 else "") or str(trace.status)
    return trace.error
