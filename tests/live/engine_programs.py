# SPDX-License-Identifier: Apache-2.0
"""Programs that use vLLM's engine without its server; test_front_doors.py names one of their functions.

`call_engine MODEL ANSWERS` calls AsyncLLM, as Dynamo's workers do. It writes a line for each request: name,
microseconds until its first output by its own clock, "-" where it left before. `serve_by_ray MODEL PORT` is
Ray Serve LLM on this machine's CPU, with one model, until a signal comes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

PROMPT = "hello world " * 40
PREFIXES = ("TTFT_", "OTEL_", "VLLM_", "OMP_", "HF_", "PYTHONPATH")


async def ask_engine(model: str, answers: int) -> None:
    """Ask one request after the other, then leave one before its first token."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

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
            sys.stdout.write(f"request r-{number} {round(first * 1e6)}\n")
        await leave_request(engine, SamplingParams())
    finally:
        engine.shutdown()


async def leave_request(engine: Any, params: Any) -> None:
    """Begin a request and cancel it while the engine core computes its prompt."""

    async def read() -> None:
        async for _ in engine.generate(PROMPT * 4, params, request_id="left"):
            pass

    task = asyncio.ensure_future(read())
    while not (task.done() or engine.output_processor.has_unfinished_requests()):
        await asyncio.sleep(0)
    # Until the engine core has it, too: of one that is cancelled before nobody can say where it was.
    await asyncio.sleep(0.01)
    if not task.cancel():
        await task  # raises what has ended it
    await asyncio.gather(task, return_exceptions=True)
    sys.stdout.write("request left -\n")
    await asyncio.sleep(1)  # the engine core is asked how far it got


def call_engine(model: str, answers: str) -> None:
    """Ask so many requests."""
    asyncio.run(ask_engine(model, int(answers)))


def serve_by_ray(model: str, port: str) -> None:
    """Serve until a signal comes. The variables of this process are its engine's."""
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # Not a cluster that runs here already; replica, ingress and proxy ask for a CPU each.
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
    own = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    config = LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": model},
        engine_kwargs={
            "enforce_eager": True,
            "max_model_len": 4096,
            "distributed_executor_backend": "mp",
        },
        accelerator_config={"kind": "cpu"},
        runtime_env={"env_vars": own},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(build_openai_app({"llm_configs": [config]}))
    try:
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    {each.__name__: each for each in (call_engine, serve_by_ray)}[sys.argv[1]](*sys.argv[2:])
