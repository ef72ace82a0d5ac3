# SPDX-License-Identifier: Apache-2.0
"""A program that calls vLLM's AsyncLLM without a server, as Dynamo's workers do.

test_front_doors.py starts it with the model's folder and a number of requests. It writes a line for each:
name, microseconds until its first output by its own clock, "-" where it left before.
"""

from __future__ import annotations

import asyncio
import sys
import time

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

PROMPT = "hello world " * 40


async def call_engine(model: str, answers: int) -> None:
    """Ask one request after the other, then leave one before its first token."""
    arguments = AsyncEngineArgs(
        model=model, enforce_eager=True, max_model_len=4096, served_model_name=["tiny"]
    )
    engine = AsyncLLM.from_engine_args(arguments)
    params = SamplingParams(max_tokens=5, output_kind=RequestOutputKind.DELTA)
    try:
        for number in range(answers):
            begun = time.monotonic()
            first = 0.0
            async for _ in engine.generate(PROMPT, params, request_id=f"r-{number}"):
                first = first or time.monotonic() - begun
            write_line(f"r-{number}", str(round(first * 1e6)))
        await leave_request(engine)
    finally:
        engine.shutdown()


def write_line(name: str, first_us: str) -> None:
    """One request of what the test reads."""
    sys.stdout.write(f"request {name} {first_us}\n")


async def leave_request(engine: AsyncLLM) -> None:
    """Begin a request and cancel it as soon as the engine has it."""

    async def read() -> None:
        async for _ in engine.generate(PROMPT * 4, SamplingParams(), request_id="left"):
            pass

    task = asyncio.ensure_future(read())
    while not (task.done() or engine.output_processor.has_unfinished_requests()):
        await asyncio.sleep(0)
    if not task.cancel():
        await task  # raises what has ended it
    await asyncio.gather(task, return_exceptions=True)
    write_line("left", "-")
    await asyncio.sleep(1)  # the engine core is asked how far it got


if __name__ == "__main__":
    asyncio.run(call_engine(sys.argv[1], int(sys.argv[2])))
