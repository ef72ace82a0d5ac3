# SPDX-License-Identifier: Apache-2.0
"""Windows that vLLM's own Scheduler has served, as traces would tell them, and what it gives instead."""

from __future__ import annotations

from typing import Any

import numpy

from tests.explain.whatif.scheduler_truth import STREAM_US, Arrival, Served, run_scheduler
from ttft_otel.explain.whatif import what_if
from ttft_otel.explain.whatif.engine_model import EngineLimits
from ttft_otel.explain.whatif.planned_change import PlannedChange
from ttft_otel.explain.whatif.replay_facts import EngineVisit, Recording, ReplayRequest
from ttft_otel.explain.whatif.what_if_figures import TTFT
from ttft_otel.model.names import keys

BEFORE_US = 1500  # from the arrival at the server to that at its engine
SMALL = EngineLimits(4, 512)
REPETITIONS = 4


def record(
    arrivals: list[Arrival], limits: EngineLimits, *, tells_answers: bool = False
) -> Recording:
    """The window as traces would tell it."""
    found = [
        build_request(number, each, one, tells_answers)
        for number, (each, one) in enumerate(
            zip(arrivals, run_scheduler(arrivals, limits), strict=True)
        )
    ]
    reported = {
        keys.ENGINE_MAX_SEQS: limits.max_num_seqs,
        keys.ENGINE_MAX_TOKENS: limits.max_batched_tokens,
        keys.ENGINE_ASYNC: int(limits.async_scheduling),
        **({keys.ENGINE_KV_TOKENS: limits.kv_tokens} if limits.kv_tokens else {}),
    }
    return Recording(tuple(found), {"chat-1": reported}, roles=frozenset({"mono"}))


def build_request(
    number: int, arrival: Arrival, one: Served, tells_answers: bool = False
) -> ReplayRequest:
    stages = {
        "prefill.queue": one.queue,
        "prefill.compute": one.compute,
        "prefill.stall": one.stall,
        "dispatch": one.dispatch,
        "sample": 0,
    }
    visit = EngineVisit(
        instance="chat-1",
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
        reasons={"kv_blocks": one.blocked, "in_step": one.queue - one.blocked},
        answer_us=one.end - one.first_token,
        after_us=STREAM_US,
    )
    whole = {"preprocess": BEFORE_US, **stages, "output": STREAM_US}
    return ReplayRequest(f"r{number}", arrival.at_us - BEFORE_US, visit, whole)


def find_truth(arrivals: list[Arrival], limits: EngineLimits) -> Any:
    """p50 and p95 of the TTFT that vLLM's Scheduler gives."""
    ttfts = [
        BEFORE_US + one.first_token - each.at_us + STREAM_US
        for each, one in zip(arrivals, run_scheduler(arrivals, limits), strict=True)
    ]
    return numpy.quantile(ttfts, [0.5, 0.95])


def predict(recording: Recording, change: PlannedChange, given: PlannedChange | None = None) -> Any:
    answer = what_if.predict_change(recording, change, given or PlannedChange(), REPETITIONS)
    return answer, [each.predicted for each in answer.figures[TTFT][:2]]
