# SPDX-License-Identifier: Apache-2.0
"""The engine's model against vLLM's own Scheduler on random loads, and against queueing theory."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.explain.whatif.scheduler_truth import (
    BASE_US,
    GAP_US,
    TOKEN_US,
    Arrival,
    draw_arrivals,
    run_scheduler,
)
from ttft_otel.explain.whatif.engine_model import (
    EngineLimits,
    EngineModel,
    QueuedPrompt,
    Step,
    StepLength,
)


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
