# SPDX-License-Identifier: Apache-2.0
"""The breaker's transitions in any order, and what an instance owes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.test_exchange import ROUTER, list_writes
from ttft_otel.router.types import OVERDUE_AFTER_S, CircuitBreaker, OwedAnswers

STEPS: dict[str, Callable[[CircuitBreaker], object]] = {
    "failure": lambda it: it.open(2.0) if it.record_failure(3) else None,
    "success": lambda it: it.record_success(),
    "half-open": lambda it: it.half_open(),
    "trial": lambda it: it.begin_trial() if it.state == "half-open" else None,
    "release": lambda it: it.release_trial(),
    "close": lambda it: it.close(),
}


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=40))
def test_a_closed_breaker_admits_and_an_open_one_does_not(names: list[str]) -> None:
    """Whatever happens: only a half-open breaker has a trial, and nothing but time shuts it for good."""
    breaker = CircuitBreaker()
    for name in names:
        STEPS[name](breaker)
        assert breaker.admits_requests == (
            breaker.state == "closed"
            or (breaker.state == "half-open" and not breaker.is_trial_in_flight)
        )
        assert not (breaker.state != "half-open" and breaker.is_trial_in_flight)
        assert breaker.consecutive_failures >= 0
    breaker.half_open()
    breaker.release_trial()
    assert breaker.admits_requests


def test_openings_in_a_row_are_longer_and_bounded() -> None:
    """Doubled each time, up to half a minute; a success begins anew."""
    breaker = CircuitBreaker()
    periods_s = [breaker.open(2.0) for _ in range(30)]

    assert all(0.8 * 2 * 2**n <= periods_s[n] <= 1.2 * 2 * 2**n for n in range(3))
    assert all(24 <= each <= 36 for each in periods_s[4:])
    breaker.record_success()
    assert breaker.open(2.0) <= 2.4


def test_the_end_of_an_old_trial_releases_no_new_one() -> None:
    """The first trial took too long; when it ends at last, the second still keeps others away."""
    breaker = CircuitBreaker()
    breaker.open(2.0)
    breaker.half_open()
    first = breaker.begin_trial()
    assert breaker.release_trial(first)
    breaker.begin_trial()

    assert not breaker.release_trial(first) and not breaker.admits_requests
    assert breaker.release_trial() and breaker.admits_requests


def test_only_the_breaker_writes_its_state() -> None:
    """Other modules call its methods."""
    own = {name for name in CircuitBreaker.__slots__ if not name.startswith("_")}
    writes = [each for path in ROUTER.rglob("*.py") for each in list_writes(path)]
    assert own and not [name for owner, name in writes if owner.endswith("breaker") and name in own]


@pytest.mark.parametrize("waited_s", [0, OVERDUE_AFTER_S - 1, OVERDUE_AFTER_S + 12])
def test_only_a_long_silence_is_overdue(waited_s: float) -> None:
    """A long prompt is none; an instance that begins other answers is none; nor one that owes nothing."""
    now_us = int(1e6 + waited_s * 1e6)
    owed = OwedAnswers()
    assert owed.measure_overdue_s(now_us) == 0
    owed.record_sent(1_000_000)
    owed.record_sent(1_500_000)
    assert owed.measure_overdue_s(now_us) == max(waited_s - OVERDUE_AFTER_S, 0)
    owed.record_begun(now_us)
    assert owed.measure_overdue_s(now_us + 1) == 0
    owed.record_unanswered()
    assert owed.measure_overdue_s(now_us + 10**9) == 0
