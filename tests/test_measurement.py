# SPDX-License-Identifier: Apache-2.0
"""What an unsampled request sends: all that metrics count of its Record, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from ttft_otel import measurement, names
from ttft_otel.measurement import MEASUREMENT_VERSION, NOT_MEASURED, MeasurementHead
from ttft_otel.record import (
    RECORD_VERSION,
    Piece,
    Record,
    RecordDecodeError,
    Server,
    Ttft,
    decode_record,
)

PIECES = (
    Piece("stage", "router.receive", 0, 10),
    Piece("stage", "mono.prefill.compute", 10, 90, {names.INSTANCE: "a:1"}),
    Piece("part", "tokenize", 0, 5),
    Piece("stage", "unattributed", 90, 100),
)
TTFT = Ttft("00f067aa0ba902b8", names.TTFT, 0, 100, {"router.receive": 10}, 10, 0, PIECES)
RECORD = Record(
    version=RECORD_VERSION,
    trace_id="0af7651916cd43dd8448eb211c80319c",
    span_id="00f067aa0ba902b7",
    parent_id="",
    flags=0,
    state="",
    start_ns=1_700_000_000_000_000_000,
    role="router",
    outermost=True,
    service="ttft-otel-router",
    request_id="secret",
    attributes={names.MODEL: "m", names.OPERATION: "chat"},
    ttft=TTFT,
)


def change_record(**fields: object) -> Record:
    """RECORD with other fields."""
    return msgspec.structs.replace(RECORD, **fields)


def change_ttft(**fields: object) -> Record:
    """RECORD with other fields of its TTFT."""
    return change_record(ttft=msgspec.structs.replace(TTFT, **fields))


def test_round_trip() -> None:
    """The exporter gets each stage's length under the labels that its span would have had."""
    data = measurement.encode_for_exporter(RECORD)
    found = measurement.decode_measurement(data)

    assert found.times_us == (100, 10, 80, 10)
    assert found.recomputed_items == NOT_MEASURED
    assert measurement.decode_head(bytes(found.head)) == MeasurementHead(
        "ttft-otel-router",
        "router",
        "m",
        "chat",
        "",
        True,
        False,
        (("router.receive", ""), ("mono.prefill.compute", "a:1"), ("unattributed", "")),
    )
    assert b"secret" not in data and RECORD.trace_id.encode() not in data


def test_sampled_is_sent_whole() -> None:
    """A sampled request's Record travels as it is, and can be told from a measurement."""
    sampled = change_record(flags=1)
    data = measurement.encode_for_exporter(sampled)

    assert decode_record(data) == sampled
    assert not data.startswith(measurement.PREFIX)
    with pytest.raises(RecordDecodeError):
        measurement.decode_measurement(data)
    with pytest.raises(RecordDecodeError):
        decode_record(measurement.encode_for_exporter(RECORD))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(change_record(ttft=None, server=Server("POST", 5, 200)), id="server's half"),
        pytest.param(change_record(outermost=False), id="behind a router"),
    ],
)
def test_nothing_to_count(record: Record) -> None:
    """What no metric counts is not sent."""
    assert measurement.encode_for_exporter(record) == b""


def test_items_behind_a_router() -> None:
    """Of a consumer of encodings behind a router the items count, and no time."""
    inner = msgspec.structs.replace(
        change_ttft(attributes={names.EC_RECOMPUTED_ITEMS: 2}), outermost=False
    )
    found = measurement.measure_record(inner)

    assert found is not None and not found.head.is_outermost
    assert (found.recomputed_items, found.head.stages) == (2, ())


def test_backwards() -> None:
    """A span that ends before it begins has no length; neither has its measurement one below 0."""
    found = measurement.measure_record(
        change_ttft(start=200, pieces=(Piece("stage", "ipc", 9, 3),))
    )

    assert found is not None and found.times_us == (0, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"m",
        b"m\xff",
        measurement.encode_for_exporter(RECORD)[:-1],
        measurement.encode_for_exporter(RECORD) + b"x",
        b"m" + msgspec.msgpack.encode((MEASUREMENT_VERSION + 1, (), (1,), -1)),
        b"m" + msgspec.msgpack.encode((MEASUREMENT_VERSION, (), (-1,), -1)),
        b"m" + msgspec.msgpack.encode((MEASUREMENT_VERSION, (), (1.5,), -1)),
    ],
)
def test_foreign(data: bytes) -> None:
    """Anything else is refused, a length below 0 included."""
    with pytest.raises(RecordDecodeError):
        measurement.decode_measurement(data)


def test_foreign_head() -> None:
    """A head of another form is refused when it is first read."""
    with pytest.raises(RecordDecodeError):
        measurement.decode_head(msgspec.msgpack.encode(("vllm", 1)))
