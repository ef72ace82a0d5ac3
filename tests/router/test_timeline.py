# SPDX-License-Identifier: Apache-2.0
"""The partition of a trip adds up whatever the legs say, and puts each delay where it was."""

from __future__ import annotations

import random

from ttft_otel.model import stages
from ttft_otel.model.timing import ServerTiming
from ttft_otel.router.disagg.encoders import select_critical_attempts
from ttft_otel.router.timeline import (
    Attempt,
    Hold,
    RequestTimeline,
    find_failed_stage,
    partition_timeline,
)
from ttft_otel.router.types import Instance


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
