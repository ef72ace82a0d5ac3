# SPDX-License-Identifier: Apache-2.0
"""Replays behind encoders and routers against tables worked out by hand, and what is read of spans."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.report.sample_records import assemble_trace
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.explain.whatif.fleet_model import FleetModel
from ttft_otel.explain.whatif.planned_change import parse_more, parse_rate, parse_share
from ttft_otel.explain.whatif.replay_facts import (
    EngineVisit,
    ReplayRequest,
    collect_recording,
)
from ttft_otel.explain.whatif.step_fit import StepTimes
from ttft_otel.explain.whatif.what_if import plan_cached
from ttft_otel.model.names import keys, span_names
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.window_sample import ReadRequest

MS = 1000
ITEM_US, STEP_US = 100 * MS, 20 * MS


def make_times(forward_us: int, item_us: int) -> StepTimes:
    """Steps of one length, and of one for each item."""
    return StepTimes(
        forward=(forward_us, forward_us, 0, 0, 0, 0),
        knee=0,
        seen=(1, 1),
        encoder=(0, item_us),
        moments=[0],
        ratios=[1.0],
        leads=[0],
        samplings=[0],
        gap_us=0,
        wake_us=0,
    )


def make_visit(instance: str, role: str, arrived: int, **fields: Any) -> EngineVisit:
    stages = {"encoder.compute": ITEM_US} if role == "encode" else {"prefill.compute": STEP_US}
    return EngineVisit(instance, role, arrived, 10, 0, stages, **fields)


def make_request(number: int, start: int) -> ReplayRequest:
    """An image is encoded for 100 ms, then 5 ms on the way, then a prefill of 20 ms."""
    encode = make_visit("enc-1", "encode", start + 2 * MS, items=1, after_us=3 * MS)
    main = make_visit("pd-1", "prefill_decode", start + 110 * MS, after_us=MS)
    stages = {
        "router.route": 2 * MS,
        "encode.encoder.compute": ITEM_US,
        "encode.output": 3 * MS,
        "router.hop.prefill_decode": 5 * MS,
        "prefill_decode.prefill.compute": STEP_US,
        "prefill_decode.output": MS,
    }
    return ReplayRequest(f"r{number}", start, main, stages, (encode,), "prefill_decode.")


def replay(encoders: int, starts: list[int]) -> list[Any]:
    limits = EngineLimits(8, 512)
    one_item = EngineLimits(8, 512, max_items=1)
    model = FleetModel(
        [make_request(number, start) for number, start in enumerate(starts)],
        engines={"pd-1": (limits, make_times(STEP_US, 0))},
        encoders={
            f"enc-{number + 1}": (one_item, make_times(0, ITEM_US)) for number in range(encoders)
        },
        cached=[0] * len(starts),
        outputs=[1] * len(starts),
        encoder_policy="least_requests" if encoders > 1 else "",
    )
    return model.run().replayed


def test_encoders() -> None:
    """One item a step: the second image waits for the first; with two encoders neither waits."""
    starts = [0, 30 * MS]
    alone = 131 * MS

    assert [each.ttft_us for each in replay(1, starts)] == [alone, alone + 70 * MS]
    assert [each.ttft_us for each in replay(2, starts)] == [alone, alone]
    assert replay(1, starts)[1].stages["encode.encoder.queue"] == 70 * MS


def test_main_engine() -> None:
    """Two prompts reach an engine whose step is running: both wait for its end, and share the next."""
    limits, times = EngineLimits(8, 512), make_times(STEP_US, 0)
    requests = [
        ReplayRequest(
            f"r{number}",
            at,
            make_visit("chat", "mono", at + MS),
            {"preprocess": MS, "prefill.compute": STEP_US},
        )
        for number, at in enumerate([0, 5 * MS, 8 * MS])
    ]
    model = FleetModel(requests, {"chat": (limits, times)}, {}, [0, 0, 0], [1, 1, 1])
    replayed = model.run().replayed

    assert [each.stages["prefill.queue"] for each in replayed[1:]] == [15 * MS, 12 * MS]
    assert [each.ttft_us for each in replayed] == [21 * MS, 36 * MS, 33 * MS]


def test_cached() -> None:
    """So much more of all tokens is cached, no prompt as a whole; less is possible, too."""
    requests = [
        ReplayRequest(f"r{tokens}", 0, EngineVisit("a", "mono", 0, tokens, 100, {}), {})
        for tokens in (100, 300)
    ]
    assert plan_cached(requests, 0.0) == [100, 100]
    assert plan_cached(requests, 0.2) == [130, 190]  # 120 of 600 tokens
    assert plan_cached(requests, 1.0) == [199, 399]
    assert plan_cached(requests, -0.1) == [85, 85]


def test_words() -> None:
    """Options as a user writes them."""
    assert (parse_more("+2"), parse_rate("1.5x"), parse_rate("2")) == (2, 1.5, 2.0)
    assert (parse_share("+20%"), parse_share("-5%")) == (0.2, -0.05)
    for parse, text in (
        (parse_more, "2"),
        (parse_more, "+1001"),
        (parse_more, "+1" + "0" * 5000),
        (parse_rate, "0x"),
        (parse_share, "20"),
        (parse_rate, "x"),
    ):
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            parse(text)


def make_span(
    name: str, number: int, parent: int, start: int, end: int, **fields: Any
) -> StoredSpan:
    return StoredSpan(
        *("t" * 32, f"{number:016x}", f"{parent:016x}" if parent else "", name),
        kind=fields.pop("kind", 1),
        start_ns=start * MS,
        end_ns=end * MS,
        scope=span_names.SCOPE,
        **fields,
    )


def name_stages(lengths: dict[str, int]) -> dict[str, int]:
    """The attributes of stages with these lengths in us."""
    return {keys.name_stage_attribute(stage): us for stage, us in lengths.items()}


def test_collect_recording() -> None:
    """A routed request's engine, tokens, end of the answer and settings are read from its spans."""
    leg = {
        keys.ROLE: "mono",
        keys.OUTERMOST: False,
        keys.TOTAL_US: 900,
        keys.INPUT_TOKENS: 40,
        keys.CACHED_TOKENS: 16,
        keys.PREFILL_CHUNKS: 2,
        keys.PREFILL_STEP_TOKENS: 60,
        keys.PREFILL_OWN_TOKENS: 24,
        keys.RANK: 1,
        **name_stages(
            {
                "preprocess": 100,
                "prefill.queue": 200,
                "prefill.compute": 500,
                "output": 100,
            }
        ),
    }
    router = {
        keys.ROLE: "router",
        keys.OUTERMOST: True,
        keys.TOTAL_US: 1000,
        **name_stages(
            {
                "router.hop.mono": 100,
                "mono.preprocess": 100,
                "mono.prefill.queue": 200,
                "mono.prefill.compute": 500,
                "mono.output": 100,
            }
        ),
    }
    resource = {"service.instance.id": "chat-1", keys.ENGINE_MAX_SEQS: 64, keys.ENGINE_ASYNC: 0}
    call = {keys.LEG: "mono", keys.ROUTE_POLICY: "least_requests"}
    spans = [
        make_span("POST", 1, 0, 5000, 9000, kind=2),
        make_span(span_names.TTFT, 2, 1, 5000, 6000, attributes=router),
        make_span("POST", 3, 1, 5040, 8900, kind=3, attributes=call),
        make_span("POST", 4, 3, 5050, 8850, kind=2, resource=resource),
        make_span(span_names.TTFT, 5, 4, 5050, 5950, attributes=leg, resource=resource),
    ]
    found = assemble_trace(spans).requests
    recording = collect_recording([ReadRequest(each, spans) for each in found], found[0].start_ns)
    (request,) = recording.requests
    main = request.main

    assert (request.policy, request.prefix, request.ttft_us) == ("least_requests", "mono.", 1000)
    assert (main.instance, main.computed, main.cached, main.chunks) == ("chat-1 rank 1", 24, 16, 2)
    assert (main.arrived, main.sampled, main.after_us) == (150, 850, 100)
    assert main.answer_us == 8850 - 5950
    assert recording.settings == {"chat-1 rank 1": {keys.ENGINE_MAX_SEQS: 64, keys.ENGINE_ASYNC: 0}}
