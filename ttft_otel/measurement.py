# SPDX-License-Identifier: Apache-2.0
"""Measurement: what metrics count of one request; all that an unsampled one sends to the exporter.

recorder.py and router/ make its bytes of a Record that is not exported, exporter/request_metrics.py counts
them; of a sampled request it makes the same from the Record itself.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ttft_otel import names
from ttft_otel.context import SAMPLED_FLAG
from ttft_otel.record import Record, RecordDecodeError, encode_record

# Host and exporter are one installation, but a restarted exporter may be a newer one.
MEASUREMENT_VERSION: Final = 1
# A Record is a MessagePack array; this byte cannot begin one, it is the number 109.
PREFIX: Final = b"m"
# Not 0, which says that a consumer of encodings encoded nothing again.
NOT_MEASURED: Final = -1


class MeasurementHead(msgspec.Struct, frozen=True, array_like=True):
    """What the labels of a request's series are made of: few values, which recur.

    service: as in Record. model, operation, error: "" without one; `error` is that of the TTFT.
    is_outermost: whether its TTFT is the client's; of another request only encodings are counted.
    is_encoder: its TTFT is an encoder's, which the semantic convention does not count.
    stages: (full name, host:port of the server behind a router or "") of each piece of the TTFT.
    """

    service: str
    role: str
    model: str
    operation: str
    error: str
    is_outermost: bool
    is_encoder: bool
    stages: tuple[tuple[str, str], ...]


class Measurement(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of one request under a head.

    times_us: the TTFT, then each piece's length, as many as the head has stages.
    recomputed_items: media items encoded again, NOT_MEASURED where nothing can be.
    """

    version: int
    head: MeasurementHead
    times_us: tuple[int, ...]
    recomputed_items: int


class RawMeasurement(msgspec.Struct, frozen=True, array_like=True):
    """A Measurement whose head is not decoded: its bytes are the key of series that are known already."""

    version: int
    head: msgspec.Raw
    times_us: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    recomputed_items: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RawMeasurement)
_head_decoder = msgspec.msgpack.Decoder(MeasurementHead)


def measure_record(record: Record) -> Measurement | None:
    """The measurement of `record`; None for the half without a TTFT, and where nothing is to count."""
    ttft = record.ttft
    if ttft is None:
        return None
    items = ttft.attributes.get(names.EC_RECOMPUTED_ITEMS)
    # An encoder's own encodings are never "again".
    recomputed = items if isinstance(items, int) and ttft.name == names.TTFT else NOT_MEASURED
    # The outermost server counts the client's TTFT; every leg would count it once more.
    if not record.outermost and recomputed == NOT_MEASURED:
        return None
    pieces = [piece for piece in ttft.pieces if piece.kind == "stage"] if record.outermost else []
    head = MeasurementHead(
        record.service,
        record.role,
        str(record.attributes.get(names.MODEL, "")),
        str(record.attributes.get(names.OPERATION, "")),
        ttft.error,
        record.outermost,
        ttft.name != names.TTFT,
        tuple([(piece.name, str(piece.attributes.get(names.INSTANCE, ""))) for piece in pieces]),
    )
    # A span that ends before it begins is exported with no length.
    times_us = (
        max(0, ttft.end - ttft.start),
        *[max(0, piece.end - piece.start) for piece in pieces],
    )
    return Measurement(MEASUREMENT_VERSION, head, times_us, recomputed)


def encode_for_exporter(record: Record) -> bytes:
    """The bytes that the exporter gets of `record`: all of it if it is sampled, else its measurement.

    b"" when there is nothing to export or to count.
    """
    if record.flags & SAMPLED_FLAG:
        return encode_record(record)
    measurement = measure_record(record)
    return b"" if measurement is None else PREFIX + _encoder.encode(measurement)


def decode_measurement(data: bytes) -> RawMeasurement:
    """Bytes with PREFIX -> measurement. Raises RecordDecodeError for another version's, and for others."""
    try:
        found = _decoder.decode(data[len(PREFIX) :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordDecodeError(str(error)) from error
    # An array has no names: another version's fields would be read as this one's.
    if found.version != MEASUREMENT_VERSION:
        raise RecordDecodeError(f"measurement version {found.version}, not {MEASUREMENT_VERSION}")
    return found


def encode_head(head: MeasurementHead) -> bytes:
    """The bytes of a head, as they are in RawMeasurement."""
    return _encoder.encode(head)


def decode_head(data: bytes) -> MeasurementHead:
    """Bytes of a head -> head. Raises RecordDecodeError for anything else."""
    try:
        return _head_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordDecodeError(str(error)) from error
