# SPDX-License-Identifier: Apache-2.0
"""The Record is a contract between processes: its shape on the wire changes only on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ttft_otel.record import (
    RECORD_VERSION,
    Call,
    Piece,
    Record,
    RecordDecodeError,
    Server,
    Ttft,
    decode_record,
    encode_record,
)

GOLDEN = Path(__file__).parent / "golden" / "record.schema.json"

FULL = Record(
    version=RECORD_VERSION,
    trace_id="0af7651916cd43dd8448eb211c80319c",
    span_id="00f067aa0ba902b7",
    parent_id="00f067aa0ba902b6",
    flags=1,
    state="vendor=one",
    start_ns=1_700_000_000_000_000_000,
    role="mono",
    outermost=True,
    service="vllm",
    request_id="cmpl-1",
    rank=3,
    attributes={"text": "x", "whole": 1, "double": 0.5, "yes": True},
    ttft=Ttft(
        span_id="00f067aa0ba902b8",
        name="ttft",
        start=0,
        end=10,
        stages={"receive": 4, "prefill.queue": 5},
        unattributed=1,
        clamped=2,
        pieces=(Piece("stage", "receive", 0, 4, {"ttft.preemptions": 1}),),
        attributes={"gen_ai.usage.input_tokens": 7},
        error="Died",
        died="receive",
    ),
    server=Server("POST /v1/completions", 20, 500, {"http.route": "/v1/completions"}, "Died"),
    calls=(Call("00f067aa0ba902b9", "POST", "encode", 1, 2, 200, {"ttft.attempt": 1}, "Late"),),
)


def test_round_trip() -> None:
    """What is decoded equals what was encoded, every field of it."""
    assert decode_record(encode_record(FULL)) == FULL


def test_schema_in_step() -> None:
    """The golden schema is the code's; a change of it must raise RECORD_VERSION.

    After an intended change: write `json.dumps(msgspec.json.schema(Record), indent=1)` into it.
    """
    golden = json.loads(GOLDEN.read_text())
    assert golden["version"] == RECORD_VERSION
    assert golden["schema"] == json.loads(json.dumps(msgspec.json.schema(Record)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"no record at all",
        encode_record(FULL)[:-1],
        encode_record(FULL) + b"x",
        msgspec.msgpack.encode({"version": 1}),
        encode_record(msgspec.structs.replace(FULL, version=RECORD_VERSION + 1)),
        encode_record(FULL).replace(b"cmpl-1", b"\xff\xfe\xfd\xfc\xfb\xfa"),
    ],
)
def test_foreign(data: bytes) -> None:
    """Anything else, another version included, raises RecordDecodeError and nothing worse."""
    with pytest.raises(RecordDecodeError):
        decode_record(data)


def test_longer_is_understood() -> None:
    """Fields that a later release appends do not stop this one from reading the rest."""
    longer = [*msgspec.msgpack.decode(encode_record(FULL)), "one field more"]
    assert decode_record(msgspec.msgpack.encode(longer)) == FULL


def test_frozen() -> None:
    """Nobody changes a record on its way."""
    with pytest.raises(AttributeError):
        FULL.role = "decode"  # type: ignore[misc]
