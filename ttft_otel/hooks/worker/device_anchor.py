# SPDX-License-Identifier: Apache-2.0
"""The host time of a device event, estimated from what the host saw of later events.

device.py adds a pair of bounds per step that was read, and places all events relative to the anchor.
"""

from __future__ import annotations

from typing import Any, Final

UNKNOWN: Final = float("inf")
# How fast the two clocks drift apart, as a rule; bounds widen with their age by as much. A host whose
# time is being corrected drifts faster: ntpd slews by 500e-6, chrony by more.
DRIFT_SHARE: Final = 50e-6
# From the end of a step's work until a thread that slept for its copy has read it, as a rule.
READING_US: Final = 100
ROUNDING_US: Final = 2  # of events' times and the host's


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
        drift = now * DRIFT_SHARE
        if low + drift > self.low:
            self.low = low + drift
        high -= drift
        if high < self.high:
            self.second = self.high
            self.high = high
        elif high < self.second:
            self.second = high

    def shift(self, us: float) -> TimeBounds:
        """The bounds of a time `us` later."""
        return TimeBounds(self.low + us, self.high + us, self.second + us)


class Anchor:
    """A recorded event, and what is known of its host time.

    before: the anchor whose successor this is; what its steps have shown is valid for this one, too. What was
    inherited is not passed on, so that nothing older than two anchors counts. excess: by how much the
    clocks drifted apart faster than DRIFT_SHARE within the last two anchors. steps: read so far.
    """

    __slots__ = ("before", "bounds", "event", "excess", "inherited", "recorded_at", "steps")

    def __init__(self, event: Any, recorded_at: int, before: Anchor | None) -> None:
        self.event = event
        self.recorded_at = recorded_at
        self.before = before
        self.bounds = TimeBounds()
        self.inherited = TimeBounds()
        self.excess = 0.0
        self.steps = 0

    def estimate_time(
        self, now: int, new_low: float, new_high: float, limit: float
    ) -> tuple[float, int]:
        """The anchor's host time, and the estimated error of it.

        new_low, new_high: what a step that was read now says of it. limit: no bound that holds for
        later steps, but it is certain that the anchor was not after it.

        A lower bound is tight when the stream was idle, and off by the queue's length otherwise. An
        upper bound is off by what the reader took. So the truth is at most READING_US before the
        least upper bound, unless a lower bound says that it is nearer.
        """
        # Only now: elapsed_time() of two events is defined once both are complete.
        if self.before is not None:  # the first step after a renewal
            self._inherit_bounds(self.before)
            self.before = None
        self.steps += 1
        self.bounds.add(now, new_low, new_high)
        own = self.bounds
        old = self.inherited
        drift = now * DRIFT_SHARE
        low = (own.low if own.low > old.low else old.low) - drift
        better, other = (own, old) if own.high < old.high else (old, own)
        # No upper bound yet: the truth is between the lower one and the limit.
        if better.high == UNKNOWN:
            if low > limit + ROUNDING_US:
                return self._start_anew(now, new_low, new_high, limit, low - limit)
            base = min(low, limit)
            return base, round(max(0.0, limit - base))
        high = better.high + drift
        base = min(high, max(low, high - READING_US), limit)
        contradiction = low - min(high, limit)
        if contradiction > ROUNDING_US:
            # This step's own bounds are certain; of those the one that is nearest to what was known.
            return self._start_anew(now, new_low, new_high, max(base, new_low), contradiction)
        # How much later the second-best reader was shows how far the best one may be off.
        second = other.high if other.high < better.second else better.second
        spread = second + drift - high if second != UNKNOWN else 0.0
        error = min(max(0.0, high - low), READING_US + spread + 2 * self.excess)
        return base, round(error)

    def _inherit_bounds(self, before: Anchor) -> None:
        shift = before.event.elapsed_time(self.event) * 1000.0
        self.inherited = before.bounds.shift(shift)
        # Both are the best of their time: what was known before is too early by so much.
        if before.inherited.high < before.bounds.high < UNKNOWN:
            self.excess = before.bounds.high - before.inherited.high

    def _start_anew(
        self, now: int, low: float, high: float, base: float, contradiction: float
    ) -> tuple[float, int]:
        """Drop what was known: the clocks have drifted faster than assumed, or one was set."""
        self.inherited, self.bounds = TimeBounds(), TimeBounds()
        self.bounds.add(now, low, base if high == UNKNOWN else high)
        return base, round(contradiction + READING_US)
