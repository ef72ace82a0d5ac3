# SPDX-License-Identifier: Apache-2.0
"""Who held a request, on one real server: what is attributed to another request is what removing it changes.

Pairs of the same moment, with the other request and without it. The server of `features` has one place
and steps of 512 tokens, so that a request behind a long answer or a long prompt waits for all of it.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lab.evidence import CONFIDENCE, MAX_ROUNDS, MIN_ROUNDS, estimate_median
from tests.live.bench import LiveDeployment, make_parent_header
from ttft_otel.model import stages
from ttft_otel.model.names import keys

MAX_ERROR = 0.05
HEAD_START_S = 0.1  # the other one is at the engine then, and has not ended
LONG_ANSWER = {"words": 1, "max_tokens": 150, "extra": {"ignore_eos": True}}
LONG_PROMPT = {"words": 4000, "max_tokens": 1}
HEAD_STARTS_S = (0.02, 0.03, 0.04, 0.06)
MIN_WAIT_US = 15_000  # of a request that was behind the other one


def measure_small(
    bench: LiveDeployment, other: dict[str, Any] | None, head_start_s: float = HEAD_START_S
) -> tuple[int, Any, str]:
    """TTFT of a small request in microseconds, its queue's span, and the ID of the other's trace.

    The span's attributes, and its length as `us`.
    """
    trace, other_trace = os.urandom(16).hex(), os.urandom(16).hex()
    with ThreadPoolExecutor(1) as pool:
        future = None
        if other is not None:
            fields = other | {"prompt": str(bench.new_picture_seed())}
            headers = make_parent_header(other_trace)
            future = pool.submit(bench.send_request, bench.front_url, headers=headers, **fields)
            time.sleep(head_start_s)
        bench.send_request(bench.front_url, max_tokens=1, headers=make_parent_header(trace))
        if future is not None:
            assert future.result().status == 200
    spans = bench.wait_for_trace(
        trace, lambda got: {"ttft", "prefill.queue"} <= {s["name"] for s in got}
    )
    found = {span["name"]: span["attributes"] for span in spans}
    queue = found["prefill.queue"]
    lengths = [queue.get(keys.name_held_attribute(kind), 0) for kind in stages.HOLDING_KINDS]
    assert sum(lengths) == found["ttft"]["ttft.prefill.queue_us"]
    return found["ttft"][keys.TOTAL_US], queue | {"us": sum(lengths)}, other_trace


def check_error(errors: list[float]) -> bool:
    """Whether the interval of the median error lies within MAX_ERROR; fails after too many rounds."""
    if len(errors) < MIN_ROUNDS:
        return False
    found = estimate_median(errors, CONFIDENCE)
    if -MAX_ERROR <= found.low and found.high <= MAX_ERROR:
        return True
    assert len(errors) < MAX_ROUNDS or abs(found.median) <= MAX_ERROR, (found, errors)
    return len(errors) >= MAX_ROUNDS


def test_long_answer(features: LiveDeployment) -> None:
    """An answer that took the only place: the time attributed to it is the difference, within 5 %.

    A tiny model's steps take about a millisecond; a fifth as long is the turnaround, which is theirs.
    """
    errors: list[float] = []
    for _ in range(2 * MAX_ROUNDS):
        if check_error(errors):
            return
        without_us, plain, _ = measure_small(features, None)
        with_us, queue, other_trace = measure_small(features, LONG_ANSWER)
        # The answer had ended, or not begun: the first one takes longer.
        if queue["us"] < MIN_WAIT_US:
            continue
        first = json.loads(queue[keys.HELD_BY])[0]
        errors.append(first["us"] / (with_us - without_us) - 1)

        # The other one is named, by its kind and with its trace, and nobody where nobody was.
        assert (first["kind"], first["trace_id"]) == ("decode", other_trace)
        assert abs(first["us"] - queue[keys.name_held_attribute("decode")]) <= 0.05 * first["us"]
        assert keys.HELD_BY not in plain
    raise AssertionError(f"too few requests waited behind the answer: {errors}")


def test_long_prompt(features: LiveDeployment) -> None:
    """A prompt of 4000 tokens in eight steps: how much longer the wait is, is attributed to it, within 5 %.

    Of the wait, not of the TTFT: the API server prepares the small request while it works on the long one.
    A tiny model computes it in some ten milliseconds, and when it is at the engine depends on the machine:
    pairs count in which the small request has waited, and in all of these the prompt is named.
    """
    errors: list[float] = []
    for number in range(6 * MAX_ROUNDS):
        if check_error(errors):
            return
        head_start_s = HEAD_STARTS_S[number % len(HEAD_STARTS_S)]
        _, plain, _ = measure_small(features, None)
        _, queue, other_trace = measure_small(features, LONG_PROMPT, head_start_s)
        if queue["us"] < MIN_WAIT_US:
            continue
        first = json.loads(queue[keys.HELD_BY])[0]
        errors.append(first["us"] / (queue["us"] - plain["us"]) - 1)

        assert (first["kind"], first["trace_id"]) == ("prefill", other_trace)
    raise AssertionError(f"too few requests waited behind the prompt: {errors}")
