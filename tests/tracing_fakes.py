# SPDX-License-Identifier: Apache-2.0
"""Fakes for tests: a clock that stands still, records and spans in memory; whole and short Records.

The context managers restore what they replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
from ttft_otel.tracing import clock, handoff
from ttft_otel.tracing.engine_report import decode_message
from ttft_otel.tracing.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


class FakeClock:
    """A clock that moves only by tick(); `at` is the time it shows, in microseconds."""

    def __init__(self, at: int = 1_000_000) -> None:
        self.at = at

    def __call__(self) -> int:
        return self.at

    def tick(self, us: int) -> int:
        """Advance the clock by `us` microseconds; returns the new time."""
        self.at += us
        return self.at


class MemorySender(handoff.RecordSender):
    """A sender that keeps records in memory and starts no exporter; `full` makes it refuse them."""

    def __init__(self) -> None:
        # No exporter is started: RecordSender starts it with the first send(), which is replaced.
        super().__init__(Settings(on=True))
        self.kept: list[Record] = []
        self.full = False

    def send(self, data: bytes) -> bool:
        """Decode `data` as the exporter would and append it to `kept`; refuse it while `full`."""
        if self.full:
            self.dropped += 1
            return False
        # Through the decoder, so that what cannot cross the process boundary fails in the test.
        self.kept.append(decode_message(data))
        self.sent += 1
        return True

    def build_spans(self) -> list[ReadableSpan]:
        """The spans that the exporter would build from the records in `kept`."""
        # Imported here because the SDK takes 0.2 s, which tests without spans need not pay.
        from ttft_otel.exporter import span_batch
        from ttft_otel.exporter.span_batch import ResourceCache

        resources = ResourceCache(0)
        return [
            span
            for each in self.kept
            for span in span_batch.build_spans(each, resources.get(each.service))
        ]


@contextmanager
def frozen_clock(at: int = 1_000_000) -> Iterator[FakeClock]:
    """Replace the clock of all marks: `with frozen_clock() as clock: ...; clock.tick(250)`.

    at: its first time, in microseconds.
    """
    # Modules call both functions by their module, so that replacing one here reaches all of them.
    real, fake = clock.monotonic_ns, FakeClock(at)
    clock.monotonic_ns = lambda: fake.at * 1000
    try:
        yield fake
    finally:
        clock.monotonic_ns = real


@contextmanager
def captured_records() -> Iterator[MemorySender]:
    """Keep in memory what this process would send: `with captured_records() as sender:`."""
    real, fake = handoff._process_sender, MemorySender()
    handoff._process_sender = fake
    try:
        yield fake
    finally:
        handoff._process_sender = real


# Every field is set, for tests of its way on the wire.
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
