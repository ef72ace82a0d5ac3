# SPDX-License-Identifier: Apache-2.0
"""Who held a request, on one real server: what is attributed to another request is what removing it changes.

Pairs of the same moment, with the other request and without it. The server of `features` has one place, so
that a request behind a long answer or a long prompt waits for all of it; every step is slowed down, so that
the machine's own delays are little beside that.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from lab.evidence import CONFIDENCE, MAX_ROUNDS, MIN_ROUNDS, estimate_median
from tests.live.bench import LiveDeployment
from ttft_otel.model import stages
from ttft_otel.model.names import keys

MAX_ERROR = 0.05
STEP_MS = 20.0
HEAD_START_S = 0.1  # the other one is at the engine then, and has not ended
# By what it holds the place with; 40 steps, and as many in chunks.
OTHERS: dict[str, dict[str, Any]] = {
    "decode": {"words": 1, "max_tokens": 40},
    "prefill": {"words": 4000, "max_tokens": 1},
}
MIN_WAIT_US = 300_000  # of a request that was behind the other one


class Measured(NamedTuple):
    """A small request: its TTFT and its wait in microseconds, its queue's span, the other one's trace."""

    ttft_us: int
    waited_us: int
    queue: dict[str, Any]
    other_trace: str


def measure_small(bench: LiveDeployment, other: dict[str, Any] | None) -> Measured:
    """Send a small request, behind the other one if there is one."""
    with ThreadPoolExecutor(1) as pool:
        future = None
        if other is not None:
            prompt = str(bench.new_picture_seed())
            future = pool.submit(bench.send_traced, prompt=prompt, **other)
            time.sleep(HEAD_START_S)
        _, trace = bench.send_traced(max_tokens=1)
        _, other_trace = future.result() if future else (None, "")
    spans = bench.wait_for_trace(
        trace, lambda got: {"ttft", "prefill.queue"} <= {s["name"] for s in got}
    )
    found = {span["name"]: span["attributes"] for span in spans}
    queue = found["prefill.queue"]
    waited_us = found["ttft"][keys.name_stage_attribute("prefill.queue")]
    held = [queue.get(keys.name_held_attribute(kind), 0) for kind in stages.HOLDING_KINDS]
    assert sum(held) == waited_us
    return Measured(found["ttft"][keys.TOTAL_US], waited_us, queue, other_trace)


def is_decided(errors: list[float]) -> bool:
    """Whether the interval of the median error lies within MAX_ERROR; fails after too many rounds."""
    if len(errors) < MIN_ROUNDS:
        return False
    found = estimate_median(errors, CONFIDENCE)
    if -MAX_ERROR <= found.low and found.high <= MAX_ERROR:
        return True
    assert len(errors) < MAX_ROUNDS or abs(found.median) <= MAX_ERROR, (found, errors)
    return len(errors) >= MAX_ROUNDS


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_attributed(features: LiveDeployment, kind: str) -> None:
    """Of an answer or a prompt that took the only place the attributed time is the difference, within 5 %.

    Of a prompt that of the wait: the API server prepares the small request while it works on the long one.
    """
    features.control.set_injections({"forward": STEP_MS})
    errors: list[float] = []
    for _ in range(2 * MAX_ROUNDS):
        if is_decided(errors):
            return
        plain, found = measure_small(features, None), measure_small(features, OTHERS[kind])
        # The other one had ended, or not begun: the first one takes longer.
        if found.waited_us < MIN_WAIT_US:
            continue
        first = json.loads(found.queue[keys.HELD_BY])[0]
        place = 0 if kind == "decode" else 1
        errors.append(first["us"] / (found[place] - plain[place]) - 1)

        # The other one is named, by its kind and with its trace, and nobody where nobody was.
        assert (first["kind"], first["trace_id"]) == (kind, found.other_trace)
        if kind == "decode":
            held_us = found.queue[keys.name_held_attribute(kind)]
            assert abs(first["us"] - held_us) <= 0.05 * first["us"]
        assert keys.HELD_BY not in plain.queue
    raise AssertionError(f"too few requests waited behind the other one: {errors}")
