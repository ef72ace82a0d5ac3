# SPDX-License-Identifier: Apache-2.0
"""Two clocks behind one contract: the host's, and a device's whose events are read once they are done.

worker.py stamps with one of them; lengths on a device come from its events, their place from a device
clock calibrated against the host's. Never synchronizes.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Final, Protocol

from ttft_otel import clock

RENEW: Final = 20_000_000  # us; elapsed_time is float32 ms: 2 us of resolution after 20 s
RECENT: Final = 64


class Clock(Protocol):
    """stamp() while the work is being queued, place() when its results have been read."""

    def stamp(self) -> Any:
        """Mark this point of the work."""

    def place(self, stamps: list[Any]) -> list[int] | None:
        """Host microseconds of the stamps, or None when the device has not reached one of them."""


class HostClock:
    """Work is done when the call returns: a stamp is the time itself."""

    def stamp(self) -> int:
        """Microseconds now."""
        return clock.now()

    def place(self, stamps: list[int]) -> list[int]:
        """Stamps are places already."""
        return stamps


class DeviceClock:
    """Events on the current stream; `event` makes one with timing (torch.cuda.Event-style).

    An event cannot happen before it was recorded, so `recorded - elapsed(anchor, event)` is a lower
    bound of the anchor's host time, tight whenever the stream was idle; the greatest of the recent
    bounds places the anchor. A place is never later than the moment it was read.
    """

    def __init__(self, event: Any) -> None:
        self.event = event
        self.pool: list[Any] = []
        self.anchor: Any = None
        self.since = 0
        self.bounds: deque[float] = deque(maxlen=RECENT)

    def stamp(self) -> tuple[Any, int]:
        """Record an event (a few us, no synchronization) and the host's time."""
        now = clock.now()
        if self.anchor is None or now - self.since > RENEW:
            self.anchor, self.since = self._record(), now
            self.bounds.clear()
        return self._record(), now

    def _record(self) -> Any:
        event = self.pool.pop() if self.pool else self.event()
        event.record()
        return event

    def place(self, stamps: list[tuple[Any, int]]) -> list[int] | None:
        """Lengths from the events, place from the calibrated anchor."""
        if not all(event.query() for event, _ in stamps):
            return None
        anchor, now = self.anchor, clock.now()
        try:
            after = [anchor.elapsed_time(event) * 1000.0 for event, _ in stamps]
        except RuntimeError:  # the anchor was renewed in this very step and is not done yet
            return None
        self.bounds.extend(host - elapsed for (_, host), elapsed in zip(stamps, after, strict=True))
        base = max(self.bounds)
        if after:
            base = min(base, now - max(after))
        self.pool.extend(event for event, _ in stamps[: RECENT - len(self.pool)])
        return [round(base + elapsed) for elapsed in after]


def pick() -> Clock:
    """The clock of this worker's platform; device events only where they are real (not on CPU)."""
    platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    torch = sys.modules.get("torch")
    if platform is None or torch is None or platform.is_cpu():
        return HostClock()
    if platform.is_cuda_alike():
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
    if hasattr(torch, "accelerator") and torch.accelerator.is_available():
        return DeviceClock(lambda: torch.Event(enable_timing=True))
    return HostClock()
