# SPDX-License-Identifier: Apache-2.0
"""The models of engine and fleet against vLLM's Scheduler, queueing theory and tables worked out by hand."""

from __future__ import annotations

import heapq
import itertools
import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.explain.stored_records import (
    BASE_US,
    GAP_US,
    TOKEN_US,
    Arrival,
    draw_arrivals,
    run_scheduler,
)
from tests.report.sample_records import assemble_trace
from ttft_otel.explain.whatif.engine_model import (
    EngineLimits,
    EngineModel,
    FleetModel,
    QueuedPrompt,
    Step,
    StepLength,
)
from ttft_otel.explain.whatif.replay_facts import (
    EngineVisit,
    ReplayRequest,
    collect_recording,
)
from ttft_otel.explain.whatif.step_fit import StepTimes
from ttft_otel.explain.whatif.what_if import plan_cached
from ttft_otel.explain.whatif.window_check import parse_more, parse_rate, parse_share
from ttft_otel.model.names import keys, span_names
from ttft_otel.report.report_types import ReadRequest, StoredSpan


def measure_step(step: Step) -> StepLength:
    """Steps that take BASE_US and TOKEN_US for each token."""
    return StepLength(0, 0, BASE_US + TOKEN_US * step.tokens, 0, GAP_US)


def run_model(
    arrivals: Sequence[Arrival],
    limits: EngineLimits,
    measure: Callable[[Step], StepLength] = measure_step,
    wake_us: int = 0,
    prompts: Sequence[QueuedPrompt] = (),
) -> tuple[Sequence[QueuedPrompt], EngineModel]:
    """The arrivals' prompts, or these instead, after the engine has served them."""
    queue: list[tuple[int, int, Callable[[int], None]]] = []
    order = itertools.count()

    def add_event(when: int, action: Callable[[int], None]) -> None:
        heapq.heappush(queue, (when, next(order), action))

    model = EngineModel(limits, measure, wake_us, add_event)
    prompts = prompts or [QueuedPrompt(each.tokens, output_tokens=each.answer) for each in arrivals]
    for arrival, prompt in zip(arrivals, prompts, strict=True):
        add_event(arrival.at_us, partial(model.add_prompt, prompt))
    while queue:
        when, _, action = heapq.heappop(queue)
        action(when)
    return prompts, model


SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3)))
LIMITS = (
    EngineLimits(64, 2048),
    EngineLimits(4, 512),
    EngineLimits(1, 256),
    EngineLimits(16, 96),
    EngineLimits(8, 2048, chunked=False),
    EngineLimits(64, 2048, async_scheduling=True),
    EngineLimits(4, 256, async_scheduling=True),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_scheduler(limits: EngineLimits, seed: int) -> None:
    """The model's queue and first token of each request are those of vLLM's Scheduler, to 1 µs."""
    arrivals = draw_arrivals(seed)
    truth = [(each.queue, each.first_token) for each in run_scheduler(arrivals, limits)]
    prompts, model = run_model(arrivals, limits)

    assert [(each.queue, each.first_token) for each in prompts] == truth
    assert (model.running, model.decoding, model.kv_tokens) == (0, 0, 0)
    assert max(queue for queue, _ in truth) > BASE_US


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "limits",
    [
        EngineLimits(64, 2048, kv_tokens=3200),
        EngineLimits(16, 512, kv_tokens=2400),
        EngineLimits(8, 2048, chunked=False, kv_tokens=2400),
        EngineLimits(64, 128, kv_tokens=2000),
    ],
    ids=str,
)
def test_few_blocks(limits: EngineLimits, seed: int) -> None:
    """Where blocks are waited for and requests preempted, too; and how long, and how often, is told."""
    arrivals = draw_arrivals(seed, mean_gap_us=15_000, answer=(1, 80))
    served = run_scheduler(arrivals, limits)
    prompts, model = run_model(arrivals, limits)

    assert [(each.queue, each.first_token, each.last_token) for each in prompts] == [
        (each.queue, each.first_token, each.end) for each in served
    ]
    assert [each.preemptions for each in prompts] == [each.preemptions for each in served]
    assert (model.running, model.decoding, model.kv_tokens) == (0, 0, 0)
    assert model.memory.free == limits.kv_tokens // 16 - 1
    assert sum(each.preemptions for each in served) > 0
    assert model.blocked_us == pytest.approx(sum(each.blocked for each in served), rel=0.2)
    # Counter-test: with enough memory they come sooner.
    free, _ = run_model(arrivals, replace(limits, kv_tokens=0))
    assert sum(each.queue for each in free) < 0.9 * sum(each.queue for each in prompts)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "wrong", [{"max_num_seqs": 5}, {"max_batched_tokens": 540}, {"chunked": False}], ids=str
)
def test_wrong_limits(wrong: dict[str, Any]) -> None:
    """With other limits than the scheduler's the model does not agree: the comparison can fail."""
    limits = EngineLimits(4, 512)
    arrivals = tuple(replace(each, tokens=min(each.tokens, 500)) for each in draw_arrivals(1))
    truth = [(each.queue, each.first_token) for each in run_scheduler(arrivals, limits)]
    prompts, _ = run_model(arrivals, replace(limits, **wrong))

    assert [(each.queue, each.first_token) for each in prompts] != truth


def test_queueing_theory() -> None:
    """M/D/1: one place, equal requests of one token: the mean wait is rho / (2 (1 - rho)) services."""
    service = BASE_US + TOKEN_US * 10 + GAP_US
    for load in (0.3, 0.7):
        chance, at, arrivals = random.Random(5), 0.0, []
        for _ in range(10_000):
            at += chance.expovariate(load / service)
            arrivals.append(Arrival(round(at), 10, 1))
        prompts, model = run_model(arrivals, EngineLimits(1, 512))
        mean = statistics.fmean(each.queue for each in prompts)

        assert mean == pytest.approx(service * load / (2 * (1 - load)), rel=0.06)
        assert model.steps >= len(prompts)


def test_stages_add_up() -> None:
    """Queue, dispatch, compute, stall and sample of a prompt are the time until its first token."""

    def measure(step: Step) -> StepLength:
        return StepLength(700, 900 * step.items, 3000 + 10 * step.tokens, 200, 400)

    for is_async in (False, True):
        limits = EngineLimits(4, 300, async_scheduling=is_async)
        prompts, _ = run_model(draw_arrivals(7), limits, measure, 50)
        for each in prompts:
            stages = (
                each.queue,
                each.dispatch,
                each.encoder,
                each.compute,
                each.stall,
                each.sample,
            )
            assert sum(stages) == each.first_token - each.arrived
            # From a forward's end to the next chunk's: sampling, gap and lead, where no step left it out.
            turns = each.dispatch + each.stall - (0 if is_async else 700)
            assert turns >= (0 if is_async else 1300) * (each.chunks - 1)


def test_a_long_prompt_alone_does_not_stall() -> None:
    """All that lies between its chunks is its own turnaround; beside another one it waits for that one's."""
    limits = EngineLimits(4, 300)
    alone, _ = run_model([Arrival(0, 1200, 1)], limits)
    both, _ = run_model([Arrival(0, 1200, 1), Arrival(1, 1200, 1)], limits)

    assert (alone[0].chunks, alone[0].stall) == (4, 0)
    assert both[0].stall + both[1].stall == 0 and both[1].queue > both[0].compute


@pytest.mark.filterwarnings("ignore")
def test_held() -> None:
    """A request of unknown length leaves when it did; told as steps, they replay to the same tokens."""
    arrivals, limits = draw_arrivals(3), EngineLimits(6, 256)
    known, _ = run_model(arrivals, limits)
    ends = [each.end for each in run_scheduler(arrivals, limits)]
    held = [
        QueuedPrompt(each.tokens, output_tokens=0, answer_us=end - prompt.first_token)
        for each, end, prompt in zip(arrivals, ends, known, strict=True)
    ]
    run_model(arrivals, limits, prompts=held)

    assert [each.decode_steps + 1 for each in held] == [each.answer for each in arrivals]
    assert [each.first_token for each in held] == [each.first_token for each in known]


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


def replay(encoders: int, starts: list[int]) -> FleetModel:
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
    return model.run()


def test_encoders() -> None:
    """One item a step: the second image waits for the first; with two encoders neither waits."""
    starts = [0, 30 * MS]
    alone = 131 * MS

    assert [sum(each.values()) for each in replay(1, starts).stages] == [alone, alone + 70 * MS]
    assert [sum(each.values()) for each in replay(2, starts).stages] == [alone, alone]
    assert replay(1, starts).stages[1]["encode.encoder.queue"] == 70 * MS


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
