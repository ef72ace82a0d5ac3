# SPDX-License-Identifier: Apache-2.0
"""Clocks for a worker's marks: the host's, a device's that reads its events, and lengths alone.

model_runners.py stamps the steps with the one that choose_clock() picks. A device's events are placed
relative to an Anchor, whose host time is estimated from what the host saw of later events. Never waits.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable
from typing import Any, Final

from ttft_otel.tracing import clock

UNKNOWN: Final = float("inf")
# How fast the two clocks drift apart, as a rule; bounds widen with their age by as much. A host whose
# time is being corrected drifts faster, as the third anchor can tell: ntpd slews by so much, chrony by more.
DRIFT_SHARE: Final = 50e-6
SLEW_SHARE: Final = 500e-6
# From the end of a step's work until a thread that slept for its copy has read it, as a rule.
READING_US: Final = 100
# ... and until one that is woken has the interpreter's lock, beside a thread that computes in pure Python:
# 5 ms as a rule, 22 at the 99th percentile on two busy cores.
LOCK_WAIT_US: Final = 25_000
ROUNDING_US: Final = 2  # of events' times and the host's
# What is known of an anchor's host time gets worse with its age, because the clocks drift apart.
ANCHOR_RENEWAL_US: Final = 1_000_000
# An anchor of which few steps are known stays longer: one of these may have been read late.
MIN_ANCHOR_STEPS: Final = 4
SPARSE_RENEWAL_US: Final = 5_000_000
# ... and where no step was read yet; then elapsed_time(), a float32 of ms, is off by 4 us.
MAX_ANCHOR_AGE_US: Final = 60_000_000
MAX_POOLED_EVENTS: Final = 64  # once there are so many, a step's events are not added to them
MAX_STAMPS: Final = 1 << 30  # more than a step can have
# An event that is recorded on an idle stream happens 4 to 10 us later, but after a pause, or behind other
# streams in the same hardware queue, up to milliseconds later: for so long it is looked at whether it has.
IDLE_LATENCY_US: Final = 30
# So seldom is the stream asked whether it is idle: what is known of an idle step is worth 3 us less by then.
IDLE_PROBE_US: Final = 100_000


# Where the stamps of a step are: their host times in microseconds, 0 where the device had not come by at the
# reading; host time of that reading, 0 where all have places or none can be compared with it; the estimated
# error of the places.
Placement = tuple[list[int], int, int]


class StepClock:
    """Stamps are added while work is being queued, and placed when the results have been read.

    kind: CLOCK_HOST for a CPU, where work is done when the call returns: a stamp is the time itself.
    CLOCK_NONE for a platform without timing events: launch times would look like compute, so that nothing has
    a place. Other platforms' clocks do what they can do better.
    """

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def open_step(self) -> list[Any]:
        """Before a step's first work: the list of its stamps; may have one that only the clock needs."""
        return []

    def add_stamp(self, stamps: Any) -> None:
        """Append a stamp of this point of the work to the step's `stamps`."""
        stamps.append(clock.now_us())

    def note_pending(self, stamps: Any, awaited: int) -> bool:
        """Before something waits for the device to reach stamp `awaited`: whether it has not yet.

        If so, note_reached() is to be called by the same thread when the wait is over.
        """
        return False

    def note_reached(self, stamps: Any) -> None:
        """The wait of which note_pending() was told is over."""

    def place_stamps(self, stamps: Any) -> Placement:
        """Where `stamps` are, as far as the device has reached them; does not wait."""
        return stamps if self.kind == clock.CLOCK_HOST else [0] * len(stamps), 0, 0

    def find_queued(self, stamps: Any, index: int) -> int:
        """When the host had queued the work before stamp `index`, us; 0 where it is done at once."""
        return 0

    def release_stamps(self, stamps: Any) -> None:
        """Nobody asks for the places of `stamps` again."""


class TimeBounds:
    """The best bounds of one time, in microseconds of the host's clock.

    All bounds widen equally with their age, so that the best one stays the best: it is kept as if it
    had been learned at time 0. prompt: the best upper bound of those that a thread read which did not
    wait for the interpreter's lock, learned at the time `prompt_at`; second: the second best of these.
    """

    __slots__ = ("high", "low", "prompt", "prompt_at", "second")

    def __init__(self) -> None:
        self.low = -UNKNOWN
        self.prompt_at = 0
        self.high = self.prompt = self.second = UNKNOWN

    def add(self, now: int, low: float, high: float, is_prompt: bool) -> None:
        """It was not before `low` and not after `high`, as is known since `now`."""
        drift = now * DRIFT_SHARE
        if low + drift > self.low:
            self.low = low + drift
        high -= drift
        if high < self.high:
            self.high = high
        if not is_prompt:
            return
        if high < self.prompt:
            self.second = self.prompt
            self.prompt, self.prompt_at = high, now
        elif high < self.second:
            self.second = high

    def shift(self, us: float) -> TimeBounds:
        """The bounds of a time `us` later."""
        later = TimeBounds()
        later.low = self.low + us
        later.high, later.prompt, later.second = self.high + us, self.prompt + us, self.second + us
        later.prompt_at = self.prompt_at
        return later


class Anchor:
    """A recorded event, and what is known of its host time.

    before: the anchor whose successor this is; what its steps have shown is valid for this one, too. What was
    inherited is not passed on, so that nothing older than two anchors counts. excess: by how much the
    clocks drifted apart faster than DRIFT_SHARE within the last two anchors, None: that is not known yet.
    steps: read so far.
    """

    __slots__ = ("before", "bounds", "event", "excess", "inherited", "recorded_at", "steps")

    def __init__(self, event: Any, recorded_at: int, before: Anchor | None) -> None:
        self.event = event
        self.recorded_at = recorded_at
        self.before = before
        self.bounds = TimeBounds()
        self.inherited = TimeBounds()
        self.excess: float | None = None
        self.steps = 0

    def estimate_time(
        self, now: int, new_low: float, new_high: float, is_prompt: bool, limit: float
    ) -> tuple[float, int]:
        """The anchor's host time, and the estimated error of it.

        new_low, new_high: what a step that was read now says of it; is_prompt: the reader of new_high did
        not wait for the interpreter's lock. limit: no bound that holds for later steps, but it is certain
        that the anchor was not after it.

        A lower bound is tight when the stream was idle, and off by the queue's length otherwise. An
        upper bound is off by what the reader took. So the truth is at most READING_US before the
        least upper bound, unless a lower bound says that it is nearer, or every reader waited for the
        interpreter's lock: then it is up to LOCK_WAIT_US before it.
        """
        # Only now: elapsed_time() of two events is defined once both are complete.
        if self.before is not None:  # the first step after a renewal
            self._inherit_bounds(self.before)
            self.before = None
        self.steps += 1
        self.bounds.add(now, new_low, new_high, is_prompt)
        own = self.bounds
        old = self.inherited
        drift = now * DRIFT_SHARE
        low = (own.low if own.low > old.low else old.low) - drift
        high = own.high if own.high < old.high else old.high
        # No upper bound yet: the truth is between the lower one and the limit.
        if high == UNKNOWN:
            if low > limit + ROUNDING_US:
                self._start_anew(now, new_low, limit, is_prompt)
                return limit, round(low - limit + READING_US)
            base = min(low, limit)
            return base, round(max(0.0, limit - base))
        high += drift
        base = min(high, max(low, high - READING_US), limit)
        contradiction = low - min(high, limit)
        if contradiction > ROUNDING_US:
            # This step's own bounds are certain; of those the one that is nearest to what was known.
            base = max(base, new_low)
            self._start_anew(now, new_low, min(new_high, limit), is_prompt)
            return base, round(contradiction + READING_US)
        error = min(max(0.0, high - low), LOCK_WAIT_US)
        better, other = (own, old) if own.prompt < old.prompt else (old, own)
        if better.prompt < UNKNOWN:
            # How much later the second-best reader was shows how far the best one may be off.
            second = other.prompt if other.prompt < better.second else better.second
            spread = (second if second < UNKNOWN else better.prompt) + drift - high
            error = min(error, READING_US + spread)
            # Of the lower bounds as well, whose age is not known.
            if self.excess is None:
                error += (now - better.prompt_at) * SLEW_SHARE
            else:
                error += 2 * self.excess
        return base, round(error)

    def _inherit_bounds(self, before: Anchor) -> None:
        shift = before.event.elapsed_time(self.event) * 1000.0
        self.inherited = before.bounds.shift(shift)
        # Both are the best of their time: what was known before is too early by so much.
        if max(before.inherited.prompt, before.bounds.prompt) < UNKNOWN:
            self.excess = max(0.0, before.bounds.prompt - before.inherited.prompt)

    def _start_anew(self, now: int, low: float, high: float, is_prompt: bool) -> None:
        """Drop what was known: the clocks have drifted faster than assumed, or one was set."""
        self.inherited, self.bounds = TimeBounds(), TimeBounds()
        self.bounds.add(now, low, high, is_prompt)


class DeviceStamps(list[tuple[Any, int]]):
    """A step's events, each with a host time before which it did not happen.

    idle_until: the first one was recorded on an idle stream and had happened then; 0: it was not.
    pending_from: index of the one that was seen not to have happened yet. reached_at: the wait for it was
    over, 0: not yet. switches: of the waiting thread when it began, and then while it waited.
    """

    __slots__ = ("anchor", "idle_until", "pending_from", "reached_at", "switches")

    def __init__(self, anchor: Anchor) -> None:
        self.anchor = anchor
        self.idle_until = 0
        self.pending_from = MAX_STAMPS
        self.reached_at = 0
        self.switches = 0


class DeviceClock(StepClock):
    """Timing events on the current stream, which is the one that computes.

    make_event: creates an event with timing, like torch.cuda.Event(enable_timing=True).
    is_idle: whether everything queued on the current stream is done; must not wait.

    All stamps of a step are placed by the anchor of its first stamp. What is known of the anchor's
    host time comes from three observations: an event does not happen before it is recorded; on an
    idle stream it can be seen to have happened at once; and one that is pending before the output's
    copy is waited for, and complete after it, happened in between.

    A thread that sleeps once during that wait is woken by the device and goes on at once; one that
    then waits for the interpreter's lock, for 5 ms beside a busy thread, sleeps again.
    """

    def __init__(self, make_event: Callable[[], Any], is_idle: Callable[[], bool]) -> None:
        super().__init__(clock.CLOCK_DEVICE)
        self.make_event = make_event
        self.is_idle = is_idle
        self.pool: list[Any] = []
        self.anchor: Anchor | None = None
        self.probe_at = 0  # host time from which on is_idle() is asked again

    def open_step(self) -> DeviceStamps:
        """With an event in it if the stream was found idle, whose time is known to a few us."""
        now = clock.now_us()
        idle = False
        if now >= self.probe_at:
            self.probe_at = now + IDLE_PROBE_US
            idle = self.is_idle()  # before the anchor is recorded on the same stream
        anchor = self.anchor
        if anchor is None or now - anchor.recorded_at > ANCHOR_RENEWAL_US:
            anchor = self._renew_anchor(now)
        # The step keeps its anchor: the clock's may be renewed before this step is read.
        stamps = DeviceStamps(anchor)
        if idle:
            self.add_stamp(stamps)
            stamps.idle_until = _watch_event(stamps[0][0])
        return stamps

    def _renew_anchor(self, now: int) -> Anchor:
        before = self.anchor
        if before is not None and before.steps < MIN_ANCHOR_STEPS:
            max_age_us = SPARSE_RENEWAL_US if before.steps else MAX_ANCHOR_AGE_US
            if now - before.recorded_at <= max_age_us:
                return before
            before = before if before.steps else None  # nothing is known of it
        # Not of the pool, whose events are recorded again: steps in flight measure from it.
        self.anchor = anchor = Anchor(self.make_event(), now, before)
        anchor.event.record()
        return anchor

    def add_stamp(self, stamps: DeviceStamps) -> None:
        """Record an event (a few us, no synchronization) and the host's time."""
        now = clock.now_us()
        # Used again, so that a step need not create and destroy events of the device.
        event = self.pool.pop() if self.pool else self.make_event()
        event.record()
        stamps.append((event, now))

    def find_queued(self, stamps: DeviceStamps, index: int) -> int:
        return stamps[index][1]

    def note_pending(self, stamps: DeviceStamps, awaited: int) -> bool:
        """One query: all stamps up to `awaited` are complete when the wait is over."""
        # StepStamps.awaited is -1 for the last stamp.
        awaited %= len(stamps)
        event = stamps[awaited][0]
        now = clock.now_us()  # before the query: if it is false, the event is later than this
        if event.query():
            return False
        stamps[awaited] = (event, now)
        stamps.pending_from = awaited
        stamps.switches = clock.count_switches()
        return True

    def note_reached(self, stamps: DeviceStamps) -> None:
        """The time, and how often the thread has slept."""
        stamps.reached_at = clock.now_us()
        stamps.switches = clock.count_switches() - stamps.switches

    def place_stamps(self, stamps: DeviceStamps) -> Placement:
        """The anchor's estimated time plus the time elapsed since it."""
        reached = len(stamps)
        asked_at = 0
        if reached and not stamps[-1][0].query():
            asked_at = clock.now_us()
            # The device works in the order of recording: behind the first pending one all are.
            reached = bisect.bisect_left(stamps, True, key=lambda stamp: not stamp[0].query())
            if reached < len(stamps):  # else it was reached just now
                # Read again later, it is known not to have happened before this.
                stamps[reached] = (stamps[reached][0], asked_at)
        if not reached:
            return [0] * len(stamps), asked_at, 0
        now = clock.now_us()
        anchor = stamps.anchor
        measure = anchor.event.elapsed_time
        low = -UNKNOWN
        after = 0.0
        elapsed: list[float] = []
        for event, earliest in stamps if not asked_at else stamps[:reached]:
            after = measure(event) * 1000.0
            elapsed.append(after)
            if earliest - after > low:
                low = earliest - after
        high, is_prompt = UNKNOWN, False
        if stamps.reached_at and stamps.pending_from < reached:
            high = stamps.reached_at - elapsed[stamps.pending_from]
            is_prompt = stamps.switches == 1
        if stamps.idle_until and stamps.idle_until - elapsed[0] <= high:
            high, is_prompt = stamps.idle_until - elapsed[0], True
        base, error_us = anchor.estimate_time(now, low, high, is_prompt, now - after)
        places = [round(base + each) for each in elapsed]
        if asked_at:
            places += [0] * (len(stamps) - reached)
        return places, asked_at, error_us

    def release_stamps(self, stamps: DeviceStamps) -> None:
        """Use the events again; recording one that is still pending is allowed."""
        if len(self.pool) < MAX_POOLED_EVENTS:
            self.pool += [event for event, _ in stamps]


def _watch_event(event: Any) -> int:
    """Look at an event that was recorded just now for IDLE_LATENCY_US: when it had happened, 0 if not yet."""
    now = clock.now_us()
    until = now + IDLE_LATENCY_US
    while now <= until:
        is_over = event.query()
        now = clock.now_us()
        if is_over:
            return now
    return 0


class LengthsClock(StepClock):
    """For a platform whose events are not placed: lengths are the device's, places mean nothing.

    Its events are not used again: what recording again does to them was not tried there.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        super().__init__(clock.CLOCK_LENGTHS)
        self.make_event = make_event

    def add_stamp(self, stamps: list[Any]) -> None:
        event = self.make_event()
        event.record()
        stamps.append(event)

    def place_stamps(self, stamps: list[Any]) -> Placement:
        """As if the first stamp were now, so that differences are right."""
        now = clock.now_us()
        complete = [event.query() for event in stamps]
        places = [
            round(now + stamps[0].elapsed_time(event) * 1000) if done and complete[0] else 0
            for event, done in zip(stamps, complete, strict=True)
        ]
        return places, 0, 0


def choose_clock() -> StepClock:
    """The clock for this worker's platform. On CPU torch's events do not time anything.

    The rules for places were worked out for CUDA's events; ROCm's, XPU's and others' give lengths.
    """
    platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    torch = sys.modules.get("torch")
    if platform is None or torch is None or platform.is_cpu():
        return StepClock(clock.CLOCK_HOST)
    if platform.is_cuda():
        return DeviceClock(
            lambda: torch.cuda.Event(enable_timing=True),
            lambda: torch.cuda.current_stream().query(),
        )
    if platform.is_cuda_alike():
        return LengthsClock(lambda: torch.cuda.Event(enable_timing=True))
    if hasattr(torch, "accelerator") and torch.accelerator.is_available():
        try:
            torch.Event(enable_timing=True)
        except (RuntimeError, TypeError):  # a backend without timing events
            return StepClock(clock.CLOCK_NONE)
        return LengthsClock(lambda: torch.Event(enable_timing=True))
    return StepClock(clock.CLOCK_NONE)
