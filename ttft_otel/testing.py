# SPDX-License-Identifier: Apache-2.0
"""Fakes for tests, ours and yours: a clock that stands still, records and spans in memory.

The context managers restore what they replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ttft_otel.model.record import Record
from ttft_otel.tracing import clock, handoff, recorder
from ttft_otel.tracing.engine_report import decode_message
from ttft_otel.tracing.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_WRAP_MODULE: Final = "ttft_otel.hooks.wrap"


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
        from ttft_otel.exporter.spans import span_builder
        from ttft_otel.exporter.spans.resource_cache import ResourceCache

        resources = ResourceCache(0)
        return [
            span
            for each in self.kept
            for span in span_builder.build_spans(each, resources.get(each.service))
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


def find_tracers() -> tuple[Any, ...]:
    """The objects that own the state of this process's hooks; none where no hooks are installed."""
    # Only if it is there: a test that uses no hooks need not import them.
    loaded = sys.modules.get(_WRAP_MODULE)
    patcher = loaded.find_patcher() if loaded is not None else None
    return patcher.tracers if patcher is not None else ()


def state_sizes(tracers: Sequence[Any] | None = None) -> dict[str, int]:
    """How much is kept of unfinished requests, by place; all zero when there are none.

    tracers: EngineCoreTracer, WorkerTracer and DirectCallTracer objects; by default those of this process's
        hooks.
    """
    sizes = {
        "recorder.awaiting": len(recorder.awaiting_traces),
        "recorder.unended": len(recorder.unended_requests),
    }
    for tracer in find_tracers() if tracers is None else tracers:
        sizes |= tracer.count_requests()
    return sizes


def drop_state(tracers: Sequence[Any] | None = None) -> None:
    """Forget all unfinished requests, as in a new process; `tracers` as for state_sizes()."""
    recorder.awaiting_traces.clear()
    recorder.unended_requests.clear()
    for tracer in find_tracers() if tracers is None else tracers:
        tracer.drop_all()
