# SPDX-License-Identifier: Apache-2.0
"""A Record in which every field is set, for tests of its way on the wire; and short ones.

Tests of records, measurements and spans name only the fields that they are about.
"""

from __future__ import annotations

import msgspec

from ttft_otel.model.record import (
    RECORD_VERSION,
    Call,
    Handover,
    HandoverCall,
    HeldBy,
    Piece,
    Record,
    Server,
    Ttft,
)

FULL_RECORD = Record(
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
        pieces=(
            Piece("stage", "receive", 0, 4, {"ttft.preemptions": 1}),
            Piece(
                "stage",
                "prefill.queue",
                4,
                9,
                {},
                (HeldBy(3, 7, "decode", "r1", "a" * 32, "b" * 16),),
            ),
        ),
        attributes={"gen_ai.usage.input_tokens": 7},
        error="Died",
        died="receive",
    ),
    server=Server("POST /v1/completions", 20, 500, {"http.route": "/v1/completions"}, "Died"),
    calls=(Call("00f067aa0ba902b9", "POST", "encode", 1, 2, 200, {"ttft.attempt": 1}, "Late"),),
    late=(Piece("late", "decode", 10, 20),),
    handover=Handover(
        10, 20, True, (HandoverCall("decode", 11, 19, 30, True, 15, "ttft;dur=0.005"),)
    ),
)
# What a Record may leave out.
OPTIONAL_FIELDS = {
    "rank": -1,
    "attributes": {},
    "ttft": None,
    "server": None,
    "calls": (),
    "late": (),
    "handover": None,
}


def change_full_record(**fields: object) -> Record:
    """FULL_RECORD with other values in `fields`."""
    return msgspec.structs.replace(FULL_RECORD, **fields)


def make_short_record(**fields: object) -> Record:
    """A trace's first Record that has nothing but what it must have, and `fields`."""
    first = {"parent_id": "", "state": "", **OPTIONAL_FIELDS}
    return change_full_record(**{**first, **fields})
