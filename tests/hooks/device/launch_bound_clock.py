# SPDX-License-Identifier: Apache-2.0
"""The device clock's first rule, which nothing uses any more: it shows that the simulation sees wrong places.

test_launch_bound_clock.py runs it in place of hooks/worker/device.py's DeviceClock, in the same cases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ttft_otel.hooks.worker.device import Placement
from ttft_otel.tracing import clock

RENEWAL_US: Final = 20_000_000
RECENT_BOUNDS: Final = 64


class LaunchBoundClock:
    """Events are placed by when they were recorded: an event does not happen before that.

    "recorded - elapsed since the anchor" is a lower bound of the anchor's host time, and the greatest of
    the recent bounds is taken for the time itself. It is, if one of these events was recorded on an idle
    stream. A step of which one event is pending has no places, and neither has one that is in flight
    while the anchor is renewed.
    """

    kind = clock.CLOCK_DEVICE

    def __init__(self, make_event: Callable[[], Any], is_idle: Callable[[], bool]) -> None:
        self.make_event = make_event
        self.pool: list[Any] = []
        self.anchor: Any = None
        self.anchored_at = 0
        self.bounds: deque[float] = deque(maxlen=RECENT_BOUNDS)

    def open_step(self) -> list[tuple[Any, int]]:
        """A step without stamps."""
        return []

    def find_queued(self, stamps: list[tuple[Any, int]], index: int) -> int:
        """The host's time at stamp `index`."""
        return stamps[index][1]

    def add_stamp(self, stamps: list[tuple[Any, int]]) -> None:
        """Record an event, and an anchor if there is none or it is old."""
        now = clock.now_us()
        if self.anchor is None or now - self.anchored_at > RENEWAL_US:
            self.anchor, self.anchored_at = self._record_event(), now
            self.bounds.clear()
        stamps.append((self._record_event(), now))

    def _record_event(self) -> Any:
        event = self.pool.pop() if self.pool else self.make_event()
        event.record()
        return event

    def note_pending(self, stamps: list[tuple[Any, int]], awaited: int) -> None:
        """It has no upper bounds."""

    def place_stamps(self, stamps: list[tuple[Any, int]]) -> Placement:
        """All places or none."""
        if not all(event.query() for event, _ in stamps):
            return Placement([0] * len(stamps), 0, 0)
        now = clock.now_us()
        try:
            elapsed = [self.anchor.elapsed_time(event) * 1000.0 for event, _ in stamps]
        except RuntimeError:  # renewed since, and not complete
            return Placement([0] * len(stamps), 0, 0)
        self.bounds.extend(at - each for (_, at), each in zip(stamps, elapsed, strict=True))
        base = max(self.bounds)
        if elapsed:
            base = min(base, now - max(elapsed))
        return Placement([round(base + each) for each in elapsed], 0, 0)

    def release_stamps(self, stamps: list[tuple[Any, int]]) -> None:
        """Use the events again."""
        self.pool += [event for event, _ in stamps[: RECENT_BOUNDS - len(self.pool)]]
