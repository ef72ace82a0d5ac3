# SPDX-License-Identifier: Apache-2.0
"""An API server as far as tracing sees one, for test_meter.py: it shows /metrics as vLLM does.

Arguments: how many records to lose and errors to make at a POST, how many requests are pending. Writes
its port to its standard output.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest, multiprocess

from ttft_otel.tracing import guard, handoff, recorder
from ttft_otel.tracing.asgi import TracingMiddleware
from ttft_otel.tracing.settings import get_settings

losses, errors, pending = map(int, sys.argv[1:])


async def answer_request(scope: Any, receive: Any, send: Any) -> None:
    """POST loses records and fails; GET is a scrape."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    if scope["method"] == "POST":
        for _ in range(losses):
            handoff.get_sender().send(b"no record")
        for _ in range(errors):
            guard.record_error("a place", ValueError())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": generate_latest(registry)})


async def query_engine(*_: Any) -> str:
    """There is no engine."""
    return ""


async def call_app(scope: Any, receive: Any, send: Any) -> None:
    """The traced application; uvicorn's lifespan has no application in its scope, vLLM's has."""
    await traced({"app": None, **scope}, receive, send)


traced = TracingMiddleware(answer_request, get_settings(), lambda _: None, query_engine)
for number in range(pending):
    recorder.awaiting_traces[str(number)] = None  # type: ignore[assignment] # only counted
listener = socket.create_server(("127.0.0.1", 0))
sys.stdout.write(f"{listener.getsockname()[1]}\n")
sys.stdout.flush()
uvicorn.Server(uvicorn.Config(call_app, log_level="error")).run([listener])
