# SPDX-License-Identifier: Apache-2.0
"""Windows that vLLM's own Scheduler has served, as traces would tell them, and what it gives instead."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy

from tests.explain.whatif.scheduler_truth import (
    BEFORE_US,
    LINEAR,
    STREAM_US,
    Arrival,
    Device,
    Served,
    draw_arrivals,
    run_scheduler,
)
from ttft_otel.explain.whatif import what_if
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.explain.whatif.planned_change import PlannedChange
from ttft_otel.explain.whatif.replay_facts import EngineVisit, Recording, ReplayRequest
from ttft_otel.explain.whatif.what_if import Fleet
from ttft_otel.explain.whatif.what_if_figures import TTFT
from ttft_otel.model.names import keys

SMALL = EngineLimits(4, 512)
BUSY = draw_arrivals(11, 200, 40_000, (5, 25))
REPETITIONS = 2  # the first is without noise, and decides what is refused


def record(
    arrivals: tuple[Arrival, ...],
    limits: EngineLimits,
    *,
    tells_answers: bool = False,
    devices: tuple[Device, ...] = (LINEAR,),
) -> Recording:
    """The window as traces would tell it; requests take turns at engines with these devices."""
    served = serve(arrivals, limits, devices)
    found = [
        build_request(number, each, one, f"chat-{1 + number % len(devices)}", tells_answers)
        for number, (each, one) in enumerate(zip(arrivals, served, strict=True))
    ]
    reported = {
        keys.ENGINE_MAX_SEQS: limits.max_num_seqs,
        keys.ENGINE_MAX_TOKENS: limits.max_batched_tokens,
        keys.ENGINE_ASYNC: int(limits.async_scheduling),
        **({keys.ENGINE_KV_TOKENS: limits.kv_tokens} if limits.kv_tokens else {}),
    }
    settings = {f"chat-{1 + number}": reported for number in range(len(devices))}
    return Recording(tuple(found), settings, roles=frozenset({"mono"}))


def serve(
    arrivals: tuple[Arrival, ...], limits: EngineLimits, devices: tuple[Device, ...] = (LINEAR,)
) -> list[Served]:
    """What becomes of requests that take turns at engines with these devices."""
    count = len(devices)
    parts = [
        run_scheduler(arrivals[number::count], limits, device)
        for number, device in enumerate(devices)
    ]
    return [parts[number % count][number // count] for number in range(len(arrivals))]


def build_request(
    number: int, arrival: Arrival, one: Served, instance: str, tells_answers: bool = False
) -> ReplayRequest:
    stages = {
        "prefill.queue": one.queue,
        "prefill.compute": one.compute,
        "prefill.stall": one.stall,
        "dispatch": one.dispatch,
        "sample": 0,
    }
    visit = EngineVisit(
        instance=instance,
        role="mono",
        arrived=arrival.at_us,
        computed=arrival.tokens,
        cached=0,
        stages=stages,
        chunks=one.chunks,
        own_tokens=arrival.tokens,
        step_tokens=one.step_tokens,
        output_tokens=arrival.answer if tells_answers else 0,
        token_us=(one.end - one.first_token) // (arrival.answer - 1) if tells_answers else 0,
        preemptions=one.preemptions,
        reasons={
            "in_step": one.in_step,
            "kv_blocks": one.blocked,
            "max_num_seqs": one.queue - one.in_step - one.blocked,
        },
        answer_us=one.end - one.first_token,
        after_us=STREAM_US,
    )
    whole = {"preprocess": BEFORE_US, **stages, "output": STREAM_US}
    return ReplayRequest(f"r{number}", arrival.at_us - BEFORE_US, visit, whole)


def find_truth(
    arrivals: tuple[Arrival, ...],
    limits: EngineLimits,
    devices: tuple[Device, ...] = (LINEAR,),
    shares: Sequence[float] = (0.5, 0.95),
) -> Any:
    """p50 and p95 of the TTFT that vLLM's Scheduler gives."""
    ttfts = [
        BEFORE_US + one.first_token - each.at_us + STREAM_US
        for each, one in zip(arrivals, serve(arrivals, limits, devices), strict=True)
    ]
    return numpy.quantile(ttfts, shares)


def find_token_times(
    arrivals: tuple[Arrival, ...],
    limits: EngineLimits,
    devices: tuple[Device, ...] = (LINEAR,),
) -> Any:
    """p50, p95 and p99 of the time per output token that vLLM's Scheduler gives."""
    times = [
        (one.end - one.first_token) / (each.answer - 1)
        for each, one in zip(arrivals, serve(arrivals, limits, devices), strict=True)
    ]
    return numpy.quantile(times, (0.5, 0.95, 0.99))


def learn(
    arrivals: tuple[Arrival, ...] = BUSY,
    limits: EngineLimits = SMALL,
    tells_answers: bool = False,
    devices: tuple[Device, ...] = (LINEAR,),
) -> Fleet:
    """What is learned of the window that record() has; several tests ask it for changes."""
    return _learn(arrivals, limits, tells_answers, devices)


@functools.cache
def _learn(
    arrivals: tuple[Arrival, ...],
    limits: EngineLimits,
    tells_answers: bool,
    devices: tuple[Device, ...],
) -> Fleet:
    recording = record(arrivals, limits, tells_answers=tells_answers, devices=devices)
    return what_if.learn_fleet(recording, PlannedChange())


def ask(fleet: Fleet, change: PlannedChange, repetitions: int = REPETITIONS) -> Any:
    """The answer, and p50 and p95 of the predicted TTFT."""
    answer = what_if.predict_fleet(fleet, change, repetitions)
    return answer, [each.predicted for each in answer.figures[TTFT][:2]]


def predict(recording: Recording, change: PlannedChange, repetitions: int = REPETITIONS) -> Any:
    """The same of a recording that is no window of record()."""
    return ask(what_if.learn_fleet(recording, PlannedChange()), change, repetitions)
