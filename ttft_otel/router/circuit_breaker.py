# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker of one instance, and the answers that the instance owes; Instance holds both.

upstream/instance_pool.py calls the breaker's transitions and runs its timers; Attempt and the pool report
what was sent and what was begun to be answered. Policies read both. Nothing here waits or logs.
"""

from __future__ import annotations

import random
from typing import Final, Literal

# An instance that has recovered gets a trial after this time at the latest, give or take jitter.
MAX_OPEN_PERIOD_S: Final = 30.0
MAX_DOUBLINGS: Final = 16  # of the open period
OVERDUE_AFTER_S: Final = 30.0  # a long prompt may keep an engine as long as this
_US_PER_SECOND: Final = 1_000_000

BreakerState = Literal["closed", "open", "half-open"]


class CircuitBreaker:
    """Closed: requests pass. Open: none does. Half-open: one does, the trial, and others wait for it.

    The trial keeps others away until the instance responds to anything, the trial ends, or
    `release_trial` is called because it takes too long or a health probe succeeded.
    """

    __slots__ = (
        "state",
        "consecutive_failures",
        "opening_number",
        "is_trial_in_flight",
        "_consecutive_openings",
        "_trial_number",
    )

    def __init__(self) -> None:
        self.state: BreakerState = "closed"
        self.consecutive_failures = 0  # of requests, in a row
        self.opening_number = 0  # of the current open period: timers of earlier ones are ignored
        self.is_trial_in_flight = False
        self._consecutive_openings = 0  # doubles the open period
        self._trial_number = 0

    @property
    def admits_requests(self) -> bool:
        """Whether a request may be sent now."""
        return self.state != "open" and not self.is_trial_in_flight

    def record_failure(self, max_failures: int) -> bool:
        """Count a failure; returns whether it is one too many, so that `open` has to follow."""
        self.consecutive_failures += 1
        return self.state != "open" and (
            self.state == "half-open" or self.consecutive_failures >= max_failures
        )

    def record_success(self) -> None:
        """Record that a request was answered to its end without a failure."""
        self.consecutive_failures = self._consecutive_openings = 0

    def open(self, first_period_s: float) -> float:
        """Admit nothing; returns the seconds after which `half_open` has to be called.

        first_period_s: of the first opening, doubled with each further one in a row.
        """
        # MAX_DOUBLINGS keeps the power small, however long an instance is away.
        doubled_s: float = first_period_s * 2**self._consecutive_openings
        period_s = min(doubled_s, MAX_OPEN_PERIOD_S)
        self.state = "open"
        self.is_trial_in_flight = False
        self._consecutive_openings = min(self._consecutive_openings + 1, MAX_DOUBLINGS)
        self.opening_number += 1
        # Jitter, so that several routers do not try a recovering instance at the same time.
        return period_s * random.uniform(0.8, 1.2)

    def half_open(self) -> bool:
        """Admit a trial; returns whether the breaker was open."""
        was_open = self.state == "open"
        if was_open:
            self.state = "half-open"
        return was_open

    def begin_trial(self) -> int:
        """Keep other requests away while a trial is in flight; returns its number."""
        self.is_trial_in_flight = True
        self._trial_number += 1
        return self._trial_number

    def release_trial(self, trial_number: int = 0) -> bool:
        """Admit the next trial, also if this one is not over; returns whether one was in flight.

        trial_number: only if it is this one that keeps the others away; 0: whichever it is.
        """
        # The timer of a trial that is over must not release a later one.
        was_in_flight = self.is_trial_in_flight and trial_number in (0, self._trial_number)
        if was_in_flight:
            self.is_trial_in_flight = False
        return was_in_flight

    def close(self) -> bool:
        """Admit everything, because the instance responds; returns whether it was not closed."""
        was_closed = self.state == "closed"
        self.state = "closed"
        self.is_trial_in_flight = False
        return not was_closed


class OwedAnswers:
    """The requests that an instance has not begun to answer, and since when it has begun no answer."""

    __slots__ = ("_count", "_silent_since_us")

    def __init__(self) -> None:
        self._count = self._silent_since_us = 0

    def record_sent(self, now_us: int) -> None:
        """A request goes to the instance."""
        if not self._count:
            self._silent_since_us = now_us
        self._count += 1

    def record_begun(self, now_us: int) -> None:
        """The first byte of an answer is here, of a call that needs all of it the last."""
        self._count = max(self._count - 1, 0)
        self._silent_since_us = now_us

    def record_unanswered(self) -> None:
        """A request is over without an answer: it failed, or its client left."""
        self._count = max(self._count - 1, 0)

    def measure_overdue_s(self, now_us: int) -> float:
        """Seconds beyond OVERDUE_AFTER_S for which it owes answers and has begun none; 0 for none."""
        if not self._count:
            return 0.0
        return max((now_us - self._silent_since_us) / _US_PER_SECOND - OVERDUE_AFTER_S, 0.0)
