# SPDX-License-Identifier: Apache-2.0
"""An exchange's steps: the phase never goes back, the head goes out once, and nobody else writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttft_otel.router import exchange as exchanges
from ttft_otel.router.exchange import Exchange, ExchangePhase
from ttft_otel.router.timeline import Attempt, RequestTimeline
from ttft_otel.router.types import parse_instance_url
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


def list_writes(path: Path) -> Iterator[tuple[str, str]]:
    """What a file assigns to attributes of: the owner's expression and the attribute's name."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in (inner for each in targets for inner in ast.walk(each)):
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                yield ast.unparse(target.value), target.attr


@pytest.mark.parametrize("path", sorted(ROUTER.rglob("*.py")), ids=lambda path: path.name)
def test_nobody_else_writes(path: Path) -> None:
    """Fields of exchanges, timelines and attempts are written in their own files alone."""
    owned = ("exchange", "timeline", "attempt", "attempts[-1]", "lookup", "prompt_lookup")
    free = {"exchange.py": ("self.timeline",)}.get(path.name, ())
    writes = [
        owner
        for owner, _ in list_writes(path)
        if owner.split(".")[-1] in owned and owner not in free
    ]

    assert not writes
