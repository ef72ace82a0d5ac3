# SPDX-License-Identifier: Apache-2.0
"""HOT: Measurement: what metrics count of one request; all that an unsampled one sends to the exporter.

recorder.py makes its bytes of a RequestTrace, the router of a Record that is not exported; request_metrics.py
counts them. Of a sampled request it makes the same from the Record itself.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from ttft_otel.model import stages
from ttft_otel.model.breakdown import Breakdown
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Piece, Record, RecordDecodeError, Ttft, encode_record
from ttft_otel.model.waits import ReasonSlice
from ttft_otel.tracing import request_trace
from ttft_otel.tracing.context import SAMPLED_FLAG
from ttft_otel.tracing.request_trace import RequestTrace, identity, is_outermost, resolve_role

# Host and exporter are one installation, but a restarted exporter may be a newer one.
MEASUREMENT_VERSION: Final = 3
# A Record is a MessagePack array; this byte cannot begin one, it is the number 109.
PREFIX: Final = b"m"
# Not 0, which says that a consumer of encodings encoded nothing again.
NOT_MEASURED: Final = -1
MAX_HEADS: Final = 1024  # encoded heads that are kept; a server has a dozen
# Position in stages.WAIT_REASON_NAMES by name.
_REASON_CODES: Final = {name: code for code, name in enumerate(stages.WAIT_REASON_NAMES)}
_HELD_CODES: Final = {
    keys.name_held_attribute(kind): code for code, kind in enumerate(stages.HOLDING_KIND_NAMES)
}
# (code, microseconds) of parts of queues.
Waits: TypeAlias = tuple[tuple[int, int], ...]
_Length = Annotated[int, msgspec.Meta(ge=0)]
_ReasonCode = Annotated[int, msgspec.Meta(ge=0, lt=len(_REASON_CODES))]
_HeldCode = Annotated[int, msgspec.Meta(ge=0, lt=len(_HELD_CODES))]


class MeasurementHead(msgspec.Struct, frozen=True, array_like=True):
    """What the labels of a request's series are made of: few values, which recur.

    service: as in Record. model, operation, error: "" without one; `error` is that of the TTFT.
    is_outermost: whether its TTFT is the client's; of others queues, encodings and decoding are counted.
    is_encoder: its TTFT is an encoder's, which the semantic convention does not count.
    stages: (full name, host:port of the server behind a router or "") of each piece of the TTFT.
    has_ttft: a stream's TTFT is sent with its first token, and what follows at its end.
    end_error: of the whole request, "" without one; None where its end is not measured.
    has_token_time: whether it has a time per output token.
    """

    service: str
    role: str
    model: str
    operation: str
    error: str
    is_outermost: bool
    is_encoder: bool
    stages: tuple[tuple[str, str], ...]
    has_ttft: bool = True
    end_error: str | None = None
    has_token_time: bool = False


class Measurement(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of one request under a head.

    head: bytes of a MeasurementHead, which are not decoded where their series are known already.
    times_us: in this order, what the head has of them: the TTFT, then each piece's length, as many as it
    has stages; the whole request; the time per output token.
    recomputed_items: media items encoded again, NOT_MEASURED where nothing can be.
    reasons, held: the parts of its queues by the reason (a position in stages.WAIT_REASON_NAMES), and by the
    work that ran (in HOLDING_KIND_NAMES). Not in the head: there are too many combinations of them.
    """

    version: int
    head: msgspec.Raw
    times_us: tuple[_Length, ...]
    recomputed_items: int
    reasons: tuple[tuple[_ReasonCode, _Length], ...] = ()
    held: tuple[tuple[_HeldCode, _Length], ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Measurement)
_head_decoder = msgspec.msgpack.Decoder(MeasurementHead)
# The fields of a MeasurementHead after its service, with names alone for its stages -> its bytes.
_heads: dict[tuple[object, ...], msgspec.Raw] = {}


def measure_record(record: Record) -> tuple[MeasurementHead, Measurement] | None:
    """The head and the measurement of `record`; None where nothing is to count."""
    ttft = record.ttft
    recomputed = _count_recomputed(ttft)
    reasons, held = _list_waits(ttft)
    # The outermost server counts the client's TTFT; every leg would count it once more.
    is_inner = not record.outermost and recomputed == NOT_MEASURED
    if ttft is not None and is_inner and not (reasons or held):
        ttft = None
    end_error, token_time_us = _measure_end(record)
    if ttft is None and end_error is None and not token_time_us:
        return None
    pieces: list[Piece] = []
    times_us: list[int] = []
    if ttft is not None:
        # A span that ends before it begins is exported with no length.
        times_us.append(max(0, ttft.end - ttft.start))
        if record.outermost:
            pieces = [piece for piece in ttft.pieces if piece.kind == "stage"]
            times_us += [max(0, piece.end - piece.start) for piece in pieces]
    if end_error is not None and record.server is not None:
        times_us.append(max(0, record.server.end))
    if token_time_us:
        times_us.append(token_time_us)
    head = MeasurementHead(
        record.service,
        record.role,
        str(record.attributes.get(keys.MODEL, "")),
        str(record.attributes.get(keys.OPERATION, "")),
        ttft.error if ttft else "",
        record.outermost,
        ttft is not None and ttft.name != span_names.TTFT,
        tuple([(piece.name, str(piece.attributes.get(keys.INSTANCE, ""))) for piece in pieces]),
        ttft is not None,
        end_error,
        token_time_us > 0,
    )
    data = msgspec.Raw(_encoder.encode(head))
    measured = Measurement(MEASUREMENT_VERSION, data, tuple(times_us), recomputed, reasons, held)
    return head, measured


def _count_recomputed(ttft: Ttft | None) -> int:
    items = ttft.attributes.get(keys.EC_RECOMPUTED_ITEMS) if ttft else None
    # An encoder's own encodings are never "again".
    return (
        items if ttft and isinstance(items, int) and ttft.name == span_names.TTFT else NOT_MEASURED
    )


def _list_waits(ttft: Ttft | None) -> tuple[Waits, Waits]:
    """Measurement.reasons and Measurement.held: of its spans those that the collector would count."""
    reasons: list[tuple[int, int]] = []
    held: list[tuple[int, int]] = []
    for piece in ttft.pieces if ttft else ():
        # Nearly all pieces have none: only waiting ones say why, and behind what.
        if not piece.attributes:
            continue
        reason = _REASON_CODES.get(str(piece.attributes.get(keys.QUEUE_REASON)))
        if reason is not None:
            reasons.append((reason, max(0, piece.end - piece.start)))
        if piece.name in stages.QUEUE_STAGES and piece.kind == "stage":
            for key, length in piece.attributes.items():
                code = _HELD_CODES.get(key)
                if code is not None and isinstance(length, int):
                    held.append((code, max(0, length)))
    return tuple(reasons), tuple(held)


def _measure_end(record: Record) -> tuple[str | None, int]:
    """MeasurementHead.end_error, and the time per output token in microseconds, 0 without one."""
    server = record.server
    if server is None:
        return None, 0
    found = server.attributes.get(keys.TIME_PER_OUTPUT_TOKEN_US)
    token_time_us = found if isinstance(found, int) and found > 0 else 0
    # As the client sees it: once for each request, but for answers that only say "queued".
    is_whole = record.outermost and keys.OPERATION in record.attributes
    if not is_whole or keys.BACKGROUND in server.attributes:
        return None, token_time_us
    # Its span has no error for a refusal, which is the client's; a duration without it would be one.
    error = server.error or (str(server.status) if server.status >= 400 else "")
    return error, token_time_us


def encode_for_exporter(record: Record) -> bytes:
    """The bytes that the exporter gets of `record`: all of it if it is sampled, else its measurement.

    b"" when there is nothing to export or to count.
    """
    if record.flags & SAMPLED_FLAG:
        return encode_record(record)
    found = measure_record(record)
    return b"" if found is None else PREFIX + _encoder.encode(found[1])


def decode_measurement(data: bytes) -> Measurement:
    """Bytes with PREFIX -> measurement. Raises RecordDecodeError for another version's, and for others."""
    try:
        found = _decoder.decode(data[len(PREFIX) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordDecodeError(str(error)) from error
    # An array has no names: another version's fields would be read as this one's.
    if found.version != MEASUREMENT_VERSION:
        raise RecordDecodeError(f"measurement version {found.version}, not {MEASUREMENT_VERSION}")
    return found


def decode_head(data: bytes) -> MeasurementHead:
    """Bytes of a head -> head. Raises RecordDecodeError for anything else."""
    try:
        return _head_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordDecodeError(str(error)) from error


def encode_trace_measurement(trace: RequestTrace, cut: Breakdown | None, with_end: bool) -> bytes:
    """The bytes of what is to count of `trace` now; b"" where that is nothing.

    They equal those of measure_record() for the same request's Record; most of such a request's cost was
    making one.
    cut: its TTFT, None where that was sent already. with_end: it has ended.
    """
    role = resolve_role(trace)
    outermost = is_outermost(trace)
    is_encoder = cut is not None and role == "encode"
    recomputed = NOT_MEASURED if cut is None or is_encoder else _count_trace_recomputed(trace)
    reasons, held = ((), ()) if cut is None or not cut.reasons else _list_trace_waits(cut)
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
    token_time_us = request_trace.measure_token_time(trace, role) if with_end else 0
    if token_time_us:
        times_us.append(token_time_us)
    if not times_us:
        return b""
    error = trace.error if cut is not None and not trace.has_first_token else ""
    operation = request_trace.name_operation(trace)
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
        Measurement(MEASUREMENT_VERSION, head, tuple(times_us), recomputed, reasons, held)
    )


def _keep_head(key: tuple[object, ...], head: MeasurementHead) -> msgspec.Raw:
    """Encode `head` and keep it: that takes as long as all of the rest."""
    if len(_heads) >= MAX_HEADS:
        _heads.clear()
    found = _heads[key] = msgspec.Raw(_encoder.encode(head))
    return found


def _list_trace_waits(cut: Breakdown) -> tuple[Waits, Waits]:
    """Parts of queues by reason and by what held them, of reasons as many as a Record has pieces for."""
    reasons: list[tuple[int, int]] = []
    several: list[ReasonSlice] = []
    for part in cut.reasons:
        # One reason that fills its piece is an attribute in a Record, and not bounded with the others.
        if (part.stage, part.start, part.end) not in cut.pieces:
            several.append(part)
        elif part.stage in stages.QUEUE_STAGES:
            reasons.append((_REASON_CODES[part.reason], part.end - part.start))
    reasons += [
        (_REASON_CODES[part.reason], part.end - part.start)
        for part in several[: request_trace.MAX_REASON_PIECES]
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


def _count_trace_recomputed(trace: RequestTrace) -> int:
    if trace.timeline is None or not identity.ec_connector:
        return NOT_MEASURED
    counts = request_trace.count_trace_items(trace)
    return NOT_MEASURED if counts is None or counts.recomputed is None else counts.recomputed


def _find_end_error(trace: RequestTrace) -> str:
    # A refusal is the client's error, but a duration without it would be that of a success.
    if trace.status >= 400:
        return (trace.error if trace.status >= 500 else "") or str(trace.status)
    return trace.error
