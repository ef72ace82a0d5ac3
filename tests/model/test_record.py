# SPDX-License-Identifier: Apache-2.0
"""The Record is a contract between processes: its shape on the wire changes only on purpose."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from tracing_fakes import FULL_RECORD, change_full_record

from ttft_otel.model.record import (
    RECORD_VERSION,
    Record,
    RecordDecodeError,
    decode_record,
    encode_record,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "record.schema.json"


def test_round_trip() -> None:
    """What is decoded equals what was encoded, every field of it."""
    assert decode_record(encode_record(FULL_RECORD)) == FULL_RECORD


def test_schema_in_step() -> None:
    """The golden schema is the code's; a change of it must raise RECORD_VERSION.

    After an intended change: write `json.dumps(msgspec.json.schema(Record), indent=1)` into it.
    """
    golden = json.loads(GOLDEN.read_text())
    assert golden["version"] == RECORD_VERSION
    schemas = [json.dumps(each) for each in (golden["schema"], msgspec.json.schema(Record))]
    # Python 3.13 takes the indentation out of docstrings, which are the descriptions.
    first, second = (json.loads(re.sub(r"\\n +", r"\\n", text)) for text in schemas)
    assert first == second


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"no record at all",
        encode_record(FULL_RECORD)[:-1],
        encode_record(FULL_RECORD) + b"x",
        msgspec.msgpack.encode({"version": 1}),
        encode_record(change_full_record(version=RECORD_VERSION + 1)),
        encode_record(FULL_RECORD).replace(b"cmpl-1", b"\xff\xfe\xfd\xfc\xfb\xfa"),
        # A field more, of a depth that no parser follows.
        msgspec.msgpack.encode(
            [*msgspec.msgpack.decode(encode_record(FULL_RECORD)), msgspec.Raw(b"\x91" * 20_000)]
        ),
    ],
)
def test_foreign(data: bytes) -> None:
    """Anything else, another version included, raises RecordDecodeError and nothing worse."""
    with pytest.raises(RecordDecodeError):
        decode_record(data)


def test_longer_is_understood() -> None:
    """Fields that a later release appends do not stop this one from reading the rest."""
    longer = [*msgspec.msgpack.decode(encode_record(FULL_RECORD)), "one field more"]
    assert decode_record(msgspec.msgpack.encode(longer)) == FULL_RECORD
