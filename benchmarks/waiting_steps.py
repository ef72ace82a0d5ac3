# SPDX-License-Identifier: Apache-2.0
"""Steps of engine_loops.py's engine while traced requests wait, for hooks.py; gives its CPU time."""

from __future__ import annotations

from time import process_time_ns
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.engine_loops import DECODE_BATCH, STEPS_PER_ROUND, FakeVllmHost
from lab.fake_vllm.engine_objects import build_request, build_scheduler_output
from ttft_otel.model.names import header_names

WAITING_REQUESTS: Final = 200  # all traced


def run_waiting_steps(kind: type[FakeVllmHost], prompts: int = 0) -> int:
    """Steps while WAITING_REQUESTS traced requests wait, for a place or for tokens by turns; CPU ns of
    STEPS_PER_ROUND steps. Only the scheduler's half of a step.

    prompts: so many of the DECODE_BATCH requests have a chunk of their prompt in each step.
    """
    host: Any = kind()
    requests = {}
    for n in range(WAITING_REQUESTS):
        headers = {header_names.CARRIER_KEY: "1"}
        request = build_request(f"w{n}", 100, headers, status="waiting")
        requests[request.request_id] = request
    host.requests = requests
    running = [
        SimpleNamespace(request_id=f"r{n}", num_computed_tokens=9, num_prompt_tokens=9)
        for n in range(DECODE_BATCH)
    ]
    host.running, host.max_num_running_reqs = running, DECODE_BATCH
    for request in requests.values():
        host.preprocess_add_request(
            SimpleNamespace(trace_headers=request.trace_headers, made=request)
        )
    tokens = {f"r{n}": 1 if n < DECODE_BATCH - prompts else 64 for n in range(DECODE_BATCH)}
    host.max_num_scheduled_tokens = sum(tokens.values())
    for request in running[len(running) - prompts :]:
        request.num_tokens = request.num_prompt_tokens = 1 << 20
        requests[request.request_id] = request
    output = build_scheduler_output(tokens)
    result = SimpleNamespace(outputs={})
    host.schedule(output)  # they join the queue
    host.update_from_output(output, result)
    lists = (host.running, host.running[1:])
    began_ns = process_time_ns()
    for number in range(STEPS_PER_ROUND):
        host.running = lists[number >> 4 & 1]
        host.schedule(output)
        host.update_from_output(output, result)
    spent_ns = process_time_ns() - began_ns
    for request in requests.values():
        host._free_request(request)
    return spent_ns
