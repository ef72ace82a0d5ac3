# SPDX-License-Identifier: Apache-2.0
"""Record: the only shape that crosses from vLLM (or the router) to the exporter; frozen plain data.

recorder.py and router/ make it, handoff.py sends its bytes, span_writer.py turns it into spans.
All times are integer microseconds after `Record.start_ns`, except that one.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

# Arrays have no names: a field that is added, removed or moved needs another number.
RECORD_VERSION: Final = 5
# What OTLP's AnyValue can hold, as far as our attributes need it.
Value: TypeAlias = str | int | float | bool | tuple[str | int, ...]
Attributes: TypeAlias = dict[str, Value]


class HeldBy(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """A request whose work held the engine while another one waited.

    us, tokens: of its work in that time. kind: one of stages.HOLDING_KINDS. request_id: the engine's.
    trace_id, span_id: of its server span; "" when it is not exported.
    """

    us: int
    tokens: int
    kind: str
    request_id: str
    trace_id: str = ""
    span_id: str = ""


class Piece(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """One span below `ttft`: a stage (or a piece of one), a part of a stage, or a sibling.

    kind: "stage" carries `ttft.stage`, "part" `ttft.part`, "reason" one of its own attributes that
    says why a stage waited; "sibling", "late" and "step" none of these.
    name: full name, with the leg's prefix on a router ("encode.preprocess").
    held_by: of a queue, the largest holders.
    """

    kind: str
    name: str
    start: int
    end: int
    attributes: Attributes = {}
    held_by: tuple[HeldBy, ...] = ()


class Ttft(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """The `ttft` (or `encode`) span: its stages and their remainder add up to end - start, exactly.

    stages: full stage name -> microseconds, in partition order; without "unattributed".
    error: `error.type` when the request ended before its first token, and `died` the stage it was in.
    """

    span_id: str
    name: str
    start: int
    end: int
    stages: dict[str, int]
    unattributed: int
    clamped: int
    # Beside the sums of `stages`: a stage may come in several pieces, with others between.
    pieces: tuple[Piece, ...]
    attributes: Attributes = {}
    error: str = ""
    died: str = ""


class Server(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """The HTTP server span, start 0; status 0 when no response was started."""

    name: str
    end: int
    status: int
    attributes: Attributes = {}
    error: str = ""


class Call(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """A client span of the router: one HTTP call to a leg; its id travelled in `traceparent`."""

    span_id: str
    name: str
    leg: str
    start: int
    end: int
    status: int = 0
    attributes: Attributes = {}
    error: str = ""


class HandoverCall(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """A call to the decode leg after the client had its first token; fields as of breakdown.LegTimes.

    server_timing: the header as the instance sent it, "" for none.
    """

    leg: str
    sent_us: int
    first_byte_us: int
    ended_us: int
    is_lost: bool = False
    resumed_us: int = 0
    server_timing: str = ""


class Handover(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """The wait between a prefill instance's token, which the client has, and the decode instance's next one.

    is_token_repeated: the decode instance generates the first token, too, before the next one.
    """

    start: int
    end: int
    is_token_repeated: bool
    calls: tuple[HandoverCall, ...]


class Record(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What one HTTP request left behind, or the half of it that is known now.

    A stream sends its `ttft` half when the first token is out (a later crash cannot lose it) and its
    `server` half at its end; everything else sends both at once. `attributes` go on both spans. `late`
    are spans below the server span of what came after the first token, each followed by its steps; of
    `handover` the exporter makes such spans.
    trace_id 32, span_id (the server span's) and parent_id 16 lower-case hex digits, parent "" if none.
    flags: W3C trace flags. start_ns: Unix time of the ASGI call. service: used when the operator
    named none. rank: data-parallel rank, -1 unknown.
    """

    version: int
    trace_id: str
    span_id: str
    # Hex text, as headers have it; the exporter checks it and makes bytes.
    parent_id: str
    flags: int
    state: str
    start_ns: int
    role: str
    outermost: bool
    service: str
    request_id: str
    rank: int = -1
    attributes: Attributes = {}
    ttft: Ttft | None = None
    server: Server | None = None
    calls: tuple[Call, ...] = ()
    late: tuple[Piece, ...] = ()
    handover: Handover | None = None


class RecordDecodeError(ValueError):
    """Bytes that are no Record of this version: dropped and counted by the exporter."""


# Made once: an encoder keeps its buffers, and a decoder compiles the types when it is built.
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """Record -> msgpack bytes (about 2 us)."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> Record:
    """Msgpack bytes -> Record. Raises RecordDecodeError for anything else, another version included."""
    try:
        record = _decoder.decode(data)
    # The bytes come through a socket: whatever they are, the exporter goes on.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordDecodeError(str(error)) from error
    # Another version's array may fit these types by chance.
    if record.version != RECORD_VERSION:
        raise RecordDecodeError(f"record version {record.version}, not {RECORD_VERSION}")
    return record
