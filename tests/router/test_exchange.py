# SPDX-License-Identifier: Apache-2.0
"""States of exchanges, attempts and breakers: their steps in any order, and that nobody else writes them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttft_otel.router import exchange as exchanges
from ttft_otel.router.exchange import Exchange, ExchangePhase
from ttft_otel.router.timeline import Attempt, RequestTimeline
from ttft_otel.router.types import (
    OVERDUE_AFTER_S,
    CircuitBreaker,
    parse_instance_url,
)
from ttft_otel.tracing import context

ROUTER = Path(exchanges.__file__).parent
STEPS = {
    "parsed": lambda it: it.record_parsed("model", True),
    "answer": lambda it: it.record_answer(True),
    "answer without a token": lambda it: it.record_answer(True, "no_token"),
    "head": lambda it: it.record_head(200) if not it.status else None,
    "first chunk": lambda it: it.record_first_chunk(),
    "last": lambda it: it.record_last_send(),
    "failure": lambda it: it.record_failure("ClientPayloadError"),
    "error answer": lambda it: it.record_error_answer(502),
    "left": lambda it: it.record_client_left(),
    "ended": lambda it: it.record_ended(10),
}


def build_exchange() -> Exchange:
    """A chat that has just arrived."""
    path = "/v1/chat/completions"
    timeline = RequestTimeline(1)
    return Exchange(context.NO_CONTEXT, "r", path, path, "http", "chat", True, timeline)


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=12))
def test_the_phase_never_goes_back(names: list[str]) -> None:
    """Whatever happens in whatever order; a client that leaves after the end has left nothing."""
    exchange = build_exchange()
    for name in names:
        before = exchange.phase
        was_gone = exchange.is_client_gone
        STEPS[name](exchange)
        assert exchange.phase >= before
        if before == ExchangePhase.FINISHED:
            assert exchange.is_client_gone == was_gone


def test_an_answer_in_order() -> None:
    """Each step is one phase further, and the TTFT of a stream ends with its first chunk."""
    exchange = build_exchange()
    phases = [exchange.phase]
    for name in ("parsed", "head", "answer", "first chunk", "last"):
        STEPS[name](exchange)
        phases.append(exchange.phase)

    assert sorted(set(phases)) == list(ExchangePhase)
    assert exchange.has_answered and exchange.timeline.ended_us == exchange.first_chunk_us > 0
    assert not exchange.record_client_left() and not exchange.is_client_gone


def test_the_head_goes_out_once() -> None:
    """A second status would be an answer within an answer."""
    exchange = build_exchange()
    exchange.record_head(200)

    with pytest.raises(RuntimeError, match="status 200"):
        exchange.record_head(502)


def test_an_early_reason_outlives_its_error_answer() -> None:
    """The client is told 502; the span has what happened, and where."""
    exchange = build_exchange()
    exchange.record_parsed("model", False)
    exchange.record_failure("ServerDisconnectedError")
    exchange.record_error_answer(502)
    exchange.record_ended(9)

    assert exchange.error == "ServerDisconnectedError"
    assert (exchange.failed_stage, exchange.timeline.ended_us) == ("router.route", 9)


def test_a_late_failure_is_none_of_the_first_token() -> None:
    """Once a good answer has begun, its TTFT stays what it was."""
    exchange = build_exchange()
    for name in ("parsed", "answer", "head", "first chunk", "failure"):
        STEPS[name](exchange)
    ended_us = exchange.timeline.ended_us
    exchange.record_ended(ended_us + 1)

    assert (exchange.failed_stage, exchange.timeline.ended_us) == ("", ended_us)


def build_attempt() -> Attempt:
    """One that is under way."""
    return Attempt("mono", "/v1/completions", parse_instance_url("http://h:1", "mono"), "", 1)


def test_the_first_end_of_an_attempt_counts() -> None:
    """What ended is not cancelled any more, and not ended again."""
    attempt = build_attempt()
    attempt.record_whole_answer()
    ended_us = attempt.ended_us
    attempt.record_cancelled()
    attempt.record_ended()

    assert (attempt.error, attempt.ended_us, attempt.first_byte_us) == ("", ended_us, ended_us)


def test_a_lost_attempt_says_why() -> None:
    """By its exception, or by the status that it was refused with."""
    broken, refused = build_attempt(), build_attempt()
    broken.record_lost("ClientOSError")
    refused.record_head(503)
    refused.record_lost()

    assert (broken.error, refused.error) == ("ClientOSError", "503")
    assert broken.is_lost and refused.is_lost and broken.ended_us and refused.ended_us


BREAKER_STEPS: dict[str, Callable[[CircuitBreaker], object]] = {
    "failure": lambda it: it.open(2.0) if it.record_failure(3) else None,
    "success": lambda it: it.record_success(),
    "half-open": lambda it: it.half_open(),
    "trial": lambda it: it.begin_trial() if it.state == "half-open" else None,
    "release": lambda it: it.release_trial(),
    "close": lambda it: it.close(),
}


@given(st.lists(st.sampled_from(sorted(BREAKER_STEPS)), max_size=40))
def test_a_closed_breaker_admits_and_an_open_one_does_not(names: list[str]) -> None:
    """Whatever happens: only a half-open breaker has a trial, and nothing but time shuts it for good."""
    breaker = CircuitBreaker()
    for name in names:
        BREAKER_STEPS[name](breaker)
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


@pytest.mark.parametrize("waited_s", [0, OVERDUE_AFTER_S - 1, OVERDUE_AFTER_S + 12])
def test_only_a_long_silence_is_overdue(waited_s: float) -> None:
    """A long prompt is none; an instance that begins other answers is none; nor one that owes nothing."""
    now_us = int(1e6 + waited_s * 1e6)
    owed = parse_instance_url("http://h:1", "mono")
    assert owed.measure_overdue_s(now_us) == 0
    owed.record_sent(1_000_000)
    owed.record_sent(1_500_000)
    assert owed.measure_overdue_s(now_us) == max(waited_s - OVERDUE_AFTER_S, 0)
    owed.record_begun(now_us)
    assert owed.measure_overdue_s(now_us + 1) == 0
    owed.record_ended(was_begun=False)
    assert owed.measure_overdue_s(now_us + 10**9) == 0


def list_writes(path: Path) -> Iterator[tuple[str, str]]:
    """What a file assigns to attributes of: the owner's expression and the attribute's name."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        # Targets of assignments alone are stored to.
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node.value), node.attr


def test_nobody_else_writes() -> None:
    """Fields of exchanges, timelines and attempts are written in their own files, a breaker's by itself."""
    owned = ("exchange", "timeline", "attempt", "attempts[-1]")
    of_breaker = {name for name in CircuitBreaker.__slots__ if not name.startswith("_")}
    writes = [
        (path.name, owner, name)
        for path in ROUTER.rglob("*.py")
        for owner, name in list_writes(path)
        if owner.split(".")[-1] in owned or (owner.endswith("breaker") and name in of_breaker)
    ]

    assert of_breaker and {each[:2] for each in writes} == {("exchange.py", "self.timeline")}
