# SPDX-License-Identifier: Apache-2.0
"""The host time of a device event, estimated from what the host saw of later events.

device.py adds a pair of bounds per step that was read, and places all events relative to the anchor.
"""

from __future__ import annotations

from typing import Any, Final

UNKNOWN: Final = float("inf")
# How fast the two clocks drift apart, at most; bounds widen with their age by as much.
DRIFT_SHARE: Final = 30e-6
# From the end of a step's work until a thread that slept for its copy has read it, as a rule.
READING_US: Final = 100


class TimeBounds:
    """The best bounds of one time, in microseconds of the host's clock.

    All bounds widen equally with their age, so that the best one stays the best: it is kept as if it
    had been learned at time 0. second: the second-best upper bound.
    """

    __slots__ = ("high", "low", "second")

    def __init__(self, low: float = -UNKNOWN, high: float = UNKNOWN, second: float = UNKNOWN):
        self.low = low
        self.high = high
        self.second = second

    def add(self, now: int, low: float, high: float) -> None:
        """It was not before `low` and not after `high`, as is known since `now`."""
        self.low = max(self.low, low + now * DRIFT_SHARE)
        high -= now * DRIFT_SHARE
        if high < self.high:
            self.high, self.second = high, self.high
        elif high < self.second:
            self.second = high

    def shift(self, us: float) -> TimeBounds:
        """The bounds of a time `us` later."""
        return TimeBounds(self.low + us, self.high + us, self.second + us)


class Anchor:
    """A recorded event, and what is known of its host time.

    before: the anchor whose successor this is; what its steps told holds for this one, too. What was
    inherited is not passed on, so that nothing older than two anchors counts.
    """

    __slots__ = ("before", "bounds", "event", "inherited", "recorded_at")

    def __init__(self, event: Any, recorded_at: int, before: Anchor | None) -> None:
        self.event = event
        self.recorded_at = recorded_at
        self.before = before
        self.bounds = TimeBounds()
        self.inherited = TimeBounds()

    def add_bounds(self, now: int, low: float, high: float) -> None:
        """A step says that the anchor was not before `low` and not after `high`."""
        before, self.before = self.before, None
        if before is not None:  # the first step after a renewal
            shift = before.event.elapsed_time(self.event) * 1000.0
            self.inherited = before.bounds.shift(shift)
        self.bounds.add(now, low, high)

    def estimate_time(self, now: int, limit: float) -> tuple[float, int]:
        """The anchor's host time, and the estimated error of it.

        limit: no bound of the past, but it is certain that the anchor was not after it.

        A lower bound is tight when the stream was idle, and off by the queue's length otherwise. An
        upper bound is off by what the reader took. So the truth is at most READING_US before the
        least upper bound, unless a lower bound says that it is nearer.
        """
        own, old, drift = self.bounds, self.inherited, now * DRIFT_SHARE
        low = max(own.low, old.low) - drift
        high = min(own.high, old.high)
        second = min(max(own.high, old.high), own.second, old.second)
        if high == UNKNOWN:
            base = min(low, limit)
            return base, round(max(0.0, limit - base))
        high += drift
        base = min(high, max(low, high - READING_US), limit)
        # How much later the second-best reader was shows how far the best one may be off.
        spread = second + drift - high if second != UNKNOWN else 0.0
        return base, round(min(max(0.0, high - low), READING_US + spread))
