# SPDX-License-Identifier: Apache-2.0
"""The partition of a trip adds up whatever legs say; exchanges, attempts and breakers, steps in any order."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttft_otel.model import stages
from ttft_otel.model.timing import ServerTiming
from ttft_otel.router import timeline as timelines
from ttft_otel.router.disagg.encoders import select_critical_attempts
from ttft_otel.router.timeline import (
    Attempt,
    Exchange,
    Hold,
    RequestTimeline,
    find_failed_stage,
    partition_timeline,
)
from ttft_otel.router.types import OVERDUE_AFTER_S, CircuitBreaker, Instance, parse_instance_url
from ttft_otel.tracing import context


def build_attempt(leg: str = "mono", sent: int = 0, first: int = 0, **more: object) -> Attempt:
    """An attempt with nothing special."""
    instance = Instance("http://h:1", leg, "h", 1)
    return Attempt(leg, "/v1/completions", instance, "0" * 16, sent, first_byte_us=first, **more)  # type: ignore[arg-type]


def build_timing(rest: int | None = None, unattributed: int = 0, **lengths: int) -> ServerTiming:
    """A leg's Server-Timing; underscores stand for dots."""
    parts = {name.replace("_", "."): value for name, value in lengths.items()}
    return ServerTiming(parts, unattributed, sum(parts.values()) + unattributed, rest)


def test_example_in_full() -> None:
    """Encoder, then backend: each piece has its place and length, the hop before the leg's stages."""
    e = build_attempt(
        "encode", 110, 200, server_timing=build_timing(receive=10, encoder_compute=60)
    )
    pd = build_attempt(
        "prefill_decode",
        205,
        300,
        server_timing=build_timing(egress=5, prefill_queue=50, unattributed=7),
    )
    cut = partition_timeline(RequestTimeline(0, 100, [[e], [pd]], ended_us=303))
    assert cut.pieces == [
        ("router.receive", 0, 100),
        ("router.route", 100, 110),
        ("router.hop.encode", 110, 130),
        ("encode.receive", 130, 140),
        ("encode.encoder.compute", 140, 200),
        ("router.route", 200, 205),
        ("router.hop.prefill_decode", 205, 238),
        ("prefill_decode.prefill.queue", 238, 288),
        ("prefill_decode.egress", 288, 293),
        ("unattributed", 293, 300),
        ("router.egress", 300, 303),
    ]
    assert (cut.stages["router.route"], cut.unattributed, cut.clamped) == (15, 7, 0)


def test_a_hold_lies_between_encoders_and_prompt() -> None:
    """A request is held after its encoders; its piece touches the choice of the instance on both sides."""
    e = build_attempt("encode", 110, 200)
    pd = build_attempt("prefill_decode", 905, 1000)
    hold = Hold(203, 900)
    cut = partition_timeline(RequestTimeline(0, 100, [[e], [pd]], ended_us=1003, hold=hold))
    assert cut.pieces == [
        ("router.receive", 0, 100),
        ("router.route", 100, 110),
        ("unattributed", 110, 200),
        ("router.route", 200, 203),
        ("router.queue", 203, 900),
        ("router.route", 900, 905),
        ("unattributed", 905, 1000),
        ("router.egress", 1000, 1003),
    ]


def test_a_hold_without_an_end_lasts_to_the_end() -> None:
    """Of a request that was refused, or whose client left, while it was held."""
    timeline = RequestTimeline(0, 100, [], ended_us=700, hold=Hold(110))
    assert partition_timeline(timeline).stages == {
        "router.receive": 100,
        "router.route": 10,
        "router.queue": 590,
    }
    assert find_failed_stage(timeline) == "router.queue"


def test_a_lying_leg_is_cut() -> None:
    """A leg that accounts for more than it took is cut to its time, and the cut is counted."""
    one = build_attempt("mono", 10, 110, server_timing=build_timing(receive=80, prefill_compute=50))
    cut = partition_timeline(RequestTimeline(0, 10, [[one]], ended_us=110))
    assert (cut.clamped, cut.stages["mono.prefill.compute"]) == (30, 20)


def test_a_leg_with_another_clock_is_unattributed() -> None:
    """What a server tells of its stages is not believed when it is far longer than the leg was."""
    timing = build_timing(receive=3_000, ipc=864_000_000_000, prefill_compute=50_000)
    one = build_attempt("mono", 10, 63_010, server_timing=timing)
    cut = partition_timeline(RequestTimeline(0, 10, [[one]], ended_us=63_020))
    assert cut.stages == {"router.receive": 10, "router.egress": 10}
    assert (cut.unattributed, cut.clamped) == (63_000, 0)


def test_foreign_stage_names_stay_out() -> None:
    """Another router's stages, or invented ones, are unattributed: the vocabulary stays closed."""
    one = build_attempt(
        "mono", 1, 101, server_timing=build_timing(receive=10, router_route=20, bogus=30)
    )
    cut = partition_timeline(RequestTimeline(0, 1, [[one]], ended_us=101))
    assert set(cut.stages) == {"router.receive", "mono.receive", "router.hop.mono"}
    assert cut.unattributed == 50


def test_slowest_encoder_decides() -> None:
    """Of several encoder legs the last one in is on the critical path; a failed one always is."""
    fast, slow = [build_attempt("encode", 0, 50)], [build_attempt("encode", 0, 90)]
    failed = [build_attempt("encode", 0, 10, status=500)]
    running = [build_attempt("encode", 0, 0)]
    assert select_critical_attempts([fast, slow, []]) is slow
    assert select_critical_attempts([slow, running, fast]) is running
    assert select_critical_attempts([slow, failed, running]) is failed
    assert select_critical_attempts([[], []]) == []


def test_always_adds_up() -> None:
    """Two thousand random trips, sane or not: contiguous, never negative, known names, exact sum."""
    chance = random.Random(7)
    for _ in range(2000):
        cut = partition_timeline(draw_timeline(chance))
        assert sum(cut.stages.values()) + cut.unattributed == cut.end - cut.start
        at = cut.start
        for name, low, high in cut.pieces:
            assert low == at and high > low and stages.is_known_stage(name)
            at = high
        assert at == cut.end


def draw_timeline(rng: random.Random) -> RequestTimeline:
    """Any trip a request may have made, with clocks and headers that need not make sense."""
    at = rng.randrange(1, 1 << 40)
    made = RequestTimeline(at)

    def draw_time() -> int:
        nonlocal at
        at += rng.choice((0, 1, 7, 1000, 90_000))
        return at

    made.parsed_us = draw_time()
    if rng.random() < 0.5:
        made.lookup_began_us = draw_time()
        steps = ((0, 0), (draw_time(), 0), (draw_time(), draw_time()))
        made.tokenized_us, made.looked_up_us = rng.choice(steps)
    for leg in rng.choice((("mono",), ("encode", "prefill_decode"), ())):
        chain = []
        for _ in range(rng.choice((1, 1, 1, 3))):
            one = build_attempt(leg, draw_time())
            if rng.random() < 0.2:
                one.is_lost, one.ended_us = True, draw_time()
            else:
                one.first_byte_us = draw_time()
            if rng.random() < 0.8:
                lengths = rng.sample(stages.STAGE_NAMES, rng.randrange(6))
                parts = {name: rng.randrange(60_000) for name in lengths}
                lost = rng.randrange(3000)
                rest = rng.choice((None, 0, 500, 200_000))
                one.server_timing = ServerTiming(parts, lost, sum(parts.values()) + lost, rest)
            chain.append(one)
        made.critical_path.append(chain)
    if not made.critical_path or not made.critical_path[-1][-1].first_byte_us or rng.random() < 0.6:
        made.ended_us = draw_time()
    return made


ROUTER = Path(timelines.__file__).parent
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
def test_what_is_finished_stays_so(names: list[str]) -> None:
    """Whatever happens in whatever order; a client that leaves after the end has left nothing."""
    exchange = build_exchange()
    for name in names:
        was_finished, was_gone = exchange.is_finished, exchange.is_client_gone
        STEPS[name](exchange)
        assert exchange.is_finished >= was_finished
        assert exchange.is_client_gone == was_gone or not was_finished


def test_the_head_goes_out_once() -> None:
    """A second status would be an answer within an answer."""
    exchange = build_exchange()
    exchange.record_head(200)

    with pytest.raises(RuntimeError, match="status 200"):
        exchange.record_head(502)


def test_a_late_failure_is_none_of_the_first_token() -> None:
    """Once a good answer has begun, its TTFT stays what it was."""
    exchange = build_exchange()
    for name in ("parsed", "answer", "head", "first chunk", "failure"):
        STEPS[name](exchange)
    ended_us = exchange.timeline.ended_us
    exchange.record_ended(ended_us + 1)

    assert (exchange.failed_stage, exchange.timeline.ended_us) == ("", ended_us)


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
    of_breaker = {name for name in CircuitBreaker.__struct_fields__ if not name.startswith("_")}
    writes = [
        (path.name, owner, name)
        for path in ROUTER.rglob("*.py")
        for owner, name in list_writes(path)
        if owner.split(".")[-1] in owned or (owner.endswith("breaker") and name in of_breaker)
    ]

    assert of_breaker and {each[:2] for each in writes} == {("timeline.py", "self.timeline")}
