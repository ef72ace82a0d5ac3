# SPDX-License-Identifier: Apache-2.0
"""The partition of a trip adds up whatever the legs say, and puts each delay where it was."""

from __future__ import annotations

import random

from ttft_otel import stages
from ttft_otel.router.fan import critical
from ttft_otel.router.path import Attempt, Look, Trip, partition
from ttft_otel.timing import Timing


def attempt(leg: str = "mono", sent: int = 0, first: int = 0, **more: object) -> Attempt:
    """An attempt with nothing special."""
    return Attempt(leg, "/v1/completions", "h", 1, "0" * 16, sent, first=first, **more)  # type: ignore[arg-type]


def said(rest: int | None = None, unattributed: int = 0, **lengths: int) -> Timing:
    """A leg's Server-Timing; underscores stand for dots."""
    parts = {name.replace("_", "."): value for name, value in lengths.items()}
    return Timing(parts, unattributed, sum(parts.values()) + unattributed, rest)


def test_example_in_full() -> None:
    """Encoder, then backend: each piece has its place and length, the hop before the leg's stages."""
    e = attempt("encode", 110, 200, timing=said(receive=10, encoder_compute=60))
    pd = attempt(
        "prefill_decode", 205, 300, timing=said(egress=5, prefill_queue=50, unattributed=7)
    )
    cut = partition(Trip(0, 100, [[e], [pd]], end=303))
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


def test_plain_answer_ends_at_the_first_token() -> None:
    """What the instance did after the first token is not TTFT, and there is no egress."""
    one = attempt("mono", 10, 1000, timing=said(prefill_compute=100, rest=800))
    cut = partition(Trip(0, 10, [[one]]))
    assert cut.end == 200
    assert cut.stages == {"router.receive": 10, "router.hop.mono": 90, "mono.prefill.compute": 100}


def test_a_silent_leg_is_unattributed() -> None:
    """Without Server-Timing the whole leg is unattributed, never guessed."""
    cut = partition(Trip(0, 10, [[attempt("mono", 20, 500)]], end=510))
    assert cut.unattributed == 480
    assert cut.stages == {"router.receive": 10, "router.route": 10, "router.egress": 10}


def test_a_lying_leg_is_cut() -> None:
    """A leg that accounts for more than it took is cut to its time, and the cut is counted."""
    one = attempt("mono", 10, 110, timing=said(receive=80, prefill_compute=50))
    cut = partition(Trip(0, 10, [[one]], end=110))
    assert (cut.clamped, cut.stages["mono.prefill.compute"]) == (30, 20)


def test_foreign_stage_names_stay_out() -> None:
    """Another router's stages, or invented ones, are unattributed: the vocabulary stays closed."""
    one = attempt("mono", 1, 101, timing=said(receive=10, router_route=20, bogus=30))
    cut = partition(Trip(0, 1, [[one]], end=101))
    assert set(cut.stages) == {"router.receive", "mono.receive", "router.hop.mono"}
    assert cut.unattributed == 50


def test_slowest_encoder_decides() -> None:
    """Of several encoder legs the last one in is on the critical path; a failed one always is."""
    fast, slow = [attempt("encode", 0, 50)], [attempt("encode", 0, 90)]
    failed = [attempt("encode", 0, 10, status=500)]
    running = [attempt("encode", 0, 0)]
    assert critical([fast, slow, []]) is slow
    assert critical([slow, running, fast]) is running
    assert critical([slow, failed, running]) is failed
    assert critical([[], []]) == []


def test_always_adds_up() -> None:
    """Ten thousand random trips, sane or not: contiguous, never negative, known names, exact sum."""
    chance = random.Random(7)
    for _ in range(10_000):
        cut = partition(trip(chance))
        assert sum(cut.stages.values()) + cut.unattributed == cut.end - cut.start
        at = cut.start
        for name, low, high in cut.pieces:
            assert low == at and high > low and stages.known(name)
            at = high
        assert at == cut.end


def trip(chance: random.Random) -> Trip:
    """Any trip a request may have made, with clocks and headers that need not make sense."""
    at = chance.randrange(1, 1 << 40)
    made = Trip(at)

    def mark() -> int:
        nonlocal at
        at += chance.choice((0, 1, 7, 1000, 90_000))
        return at

    made.parsed = mark()
    if chance.random() < 0.5:
        made.look = Look(mark())
        made.look.read, made.look.found = chance.choice(((0, 0), (mark(), 0), (mark(), mark())))
    for leg in chance.choice((("mono",), ("encode", "prefill_decode"), ())):
        chain = []
        for _ in range(chance.choice((1, 1, 1, 3))):
            one = attempt(leg, mark())
            if chance.random() < 0.2:
                one.lost, one.ended = True, mark()
            else:
                one.first = mark()
            if chance.random() < 0.8:
                lengths = chance.sample(stages.NAMES, chance.randrange(6))
                parts = {name: chance.randrange(60_000) for name in lengths}
                lost = chance.randrange(3000)
                rest = chance.choice((None, 0, 500, 200_000))
                one.timing = Timing(parts, lost, sum(parts.values()) + lost, rest)
            chain.append(one)
        made.path.append(chain)
    if not made.path or not made.path[-1][-1].first or chance.random() < 0.6:
        made.end = mark()
    return made
