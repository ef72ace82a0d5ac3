# SPDX-License-Identifier: Apache-2.0
"""A minimal proxy as a baseline: a FastAPI route, an aiohttp client, a StreamingResponse.

`python -m benchmarks.bare PORT BACKEND` serves it; router.py measures it beside the router.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

BACKEND_URL = sys.argv[2]


@asynccontextmanager
async def open_client_session(served: FastAPI) -> AsyncIterator[None]:
    """One client session for all requests."""
    # No limit (aiohttp has 100), and bytes as they come: the least that a Python proxy can do.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        served.state.session = session
        yield


app = FastAPI(lifespan=open_client_session)


@app.get("/health")
async def get_health() -> dict[str, str]:
    """Health check."""
    return {"status": "ok"}


@app.post("/v1/chat/completions")
async def forward_chat(request: Request) -> StreamingResponse:
    """Forward the body, and relay the response."""
    # No `async with`: the connection must stay with the answer until its last chunk is relayed.
    response = await app.state.session.post(
        f"{BACKEND_URL}/v1/chat/completions",
        data=await request.body(),
        headers={"Content-Type": "application/json"},
    )

    async def relay_chunks() -> AsyncIterator[bytes]:
        async with response:
            # As much as has arrived, without waiting for whole chunks or lines.
            async for chunk in response.content.iter_any():
                yield chunk

    return StreamingResponse(
        relay_chunks(), response.status, media_type=response.headers["Content-Type"]
    )


if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        # The fast loop and parser of uvicorn[standard]: the reference must not be slow by its setup.
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )
