# SPDX-License-Identifier: Apache-2.0
"""Streamed text requests through an ASGI app and the API server's hooks, for hooks.py; gives their CPU time.

The engine is a loop of a few microseconds, with and without hooks alike, and tells what it did in between
as one on this host does: each mark lies behind its predecessor.
"""

from __future__ import annotations

import asyncio
from time import process_time_ns
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.engine_loops import HOOKS, PATCHER, REQUESTS_PER_ROUND
from ttft_otel.hooks import api_server
from ttft_otel.model.endpoints import CHAT_PATH
from ttft_otel.model.names import header_names
from ttft_otel.tracing import carrier, clock
from ttft_otel.tracing.carrier import EngineTimeline


async def serve_one_chunk(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI app that streams one chunk; `marks`: whether our API server hooks run inside it."""
    if scope["marks"]:
        mark_trip(scope["id"])
    else:
        run_engine()
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
ENGINE_REQUEST = SimpleNamespace(request_id="", trace_headers=None, sampling_params=True)
ENGINE_OUTPUT = SimpleNamespace(request_id="", trace_headers={})
ENGINE_STATE = SimpleNamespace(
    request_id="", detokenizer=SimpleNamespace(num_output_tokens=lambda: 1)
)
ENGINE_US: Final = 8  # from the engine core's input to its output
DIRECT: Final[api_server.DirectCallTracer] = PATCHER.tracers[2]  # no request of these is direct


def run_engine() -> str:
    """What an engine core on this host tells of a prompt that it has computed just now."""
    # Made and waited for in both loops: only what it costs the API server is left of it.
    added = clock.now_us()
    while clock.now_us() < added + ENGINE_US:
        pass
    # The forward, and before it when the step was sent, and when the worker took it.
    began = (carrier.CODE_SENT, added + 3, 0, carrier.CODE_TAKEN, added + 4, 0)
    timeline = EngineTimeline(
        added=added,
        scheduled=added + 2,
        entered=added + ENGINE_US,
        complete=True,
        chunks=1,
        own_tokens=9,
        step_tokens=9,
        prompt=9,
        rank=0,
        high=9,
        held=[added],
        steps=[(clock.get_boot_number(), added + 7, 0, 10, added + 5, added + 6, *began)],
    )
    return carrier.encode_timeline(timeline)


def mark_trip(name: str) -> None:
    """The front-end hooks of one text request, and the engine."""
    api_server.stamp_render()
    token = api_server.stamp_part_start()
    HOOKS["frontend.tokenize"].after(token)  # type: ignore[misc]
    ENGINE_REQUEST.request_id = ENGINE_OUTPUT.request_id = name
    api_server.stamp_assigned(None, None, ENGINE_REQUEST)
    api_server.register_request(DIRECT, None, ENGINE_REQUEST)
    ENGINE_OUTPUT.trace_headers[header_names.CARRIER_KEY] = run_engine()
    start = api_server.stamp_outputs_received()
    api_server.record_outputs(DIRECT, start, None, None, [ENGINE_OUTPUT])
    ENGINE_STATE.request_id = name
    api_server.record_end(DIRECT, None, None, None, ENGINE_STATE, "stop")


def run_api_requests(handler: Any, marks: bool) -> int:
    """REQUESTS_PER_ROUND requests through the ASGI app. CPU ns."""

    async def run_requests() -> int:
        headers = [(b"host", b"x"), (b"content-type", b"application/json"), (b"accept", b"*/*")]
        scopes = [
            {
                "type": "http",
                "method": "POST",
                "path": CHAT_PATH,
                "headers": headers,
                "app": None,
                "marks": marks,
                "id": f"r{n}",
            }
            for n in range(REQUESTS_PER_ROUND)
        ]
        began = process_time_ns()
        for scope in scopes:
            await handler(scope, receive, send)
        return process_time_ns() - began

    return asyncio.run(run_requests())


async def receive() -> dict[str, Any]:
    return {"type": "http.request"}


async def send(message: Any) -> None:
    return None
