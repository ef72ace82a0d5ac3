# SPDX-License-Identifier: Apache-2.0
"""Fakes for tests, ours and yours: a clock that stands still, records and spans kept in memory, sizes.

Use them as context managers; each puts back what it replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ttft_otel import clock, handoff, record
from ttft_otel.record import Record
from ttft_otel.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

# Where state of requests under way is kept; read only where the module is imported already.
STATE: Final = {
    "recorder.awaiting": ("ttft_otel.recorder", "awaiting"),
    "scheduler.running": ("ttft_otel.hooks.scheduler", "running"),
    "scheduler.dead": ("ttft_otel.hooks.scheduler", "dead"),
    "kv.moving": ("ttft_otel.hooks.kv", "moving"),
    "kv.gone": ("ttft_otel.hooks.kv", "gone"),
    "worker.opened": ("ttft_otel.hooks.worker", "opened"),
    "worker.bound": ("ttft_otel.hooks.worker", "bound"),
}


class Clock:
    """A clock that moves only when told to; `at` is in microseconds."""

    def __init__(self, at: int = 1_000_000) -> None:
        self.at = at

    def __call__(self) -> int:
        return self.at

    def tick(self, us: int) -> int:
        """Let time pass; give the new time."""
        self.at += us
        return self.at


class Records(handoff.Sender):
    """A sender that keeps records in memory and starts no exporter; `full` makes it refuse them."""

    def __init__(self) -> None:
        super().__init__(Settings(on=True))
        self.kept: list[Record] = []
        self.full = False

    def send(self, data: bytes) -> bool:
        """Keep one record, decoded as the exporter would."""
        if self.full:
            self.dropped += 1
            return False
        self.kept.append(record.decode(data))
        self.sent += 1
        return True

    def spans(self) -> list[ReadableSpan]:
        """The spans that the exporter would make of what was kept."""
        from ttft_otel.exporter import spans  # the SDK takes 0.2 s: only who wants spans pays
        from ttft_otel.exporter.identity import Resources

        resources = Resources(0)
        return [
            span for each in self.kept for span in spans.build(each, resources.get(each.service))
        ]


@contextmanager
def frozen(at: int = 1_000_000) -> Iterator[Clock]:
    """All marks come from a Clock: `with frozen() as clock: ...; clock.tick(250)`."""
    real, fake = clock.now, Clock(at)
    clock.now = fake
    try:
        yield fake
    finally:
        clock.now = real


@contextmanager
def captured() -> Iterator[Records]:
    """Whatever this process hands to the exporter is kept instead: `with captured() as records:`."""
    real, fake = handoff._own, Records()
    handoff._own = fake
    try:
        yield fake
    finally:
        handoff._own = real


def sizes() -> dict[str, int]:
    """State of requests under way in this process, by place; all zero when none is."""
    found = {}
    for place, (module, name) in STATE.items():
        loaded = sys.modules.get(module)
        found[place] = len(getattr(loaded, name)) if loaded is not None else 0
    return found
