# SPDX-License-Identifier: Apache-2.0
"""Fakes for tests: a clock that stands still, records and spans in memory.

The context managers restore what they replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ttft_otel.model.record import Record
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
