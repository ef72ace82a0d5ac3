# SPDX-License-Identifier: Apache-2.0
"""The proxy that one would write first: a FastAPI route, an aiohttp client, a StreamingResponse.

`python benchmarks/bare.py PORT BACKEND` serves it; router.py measures it beside the router.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

BACKEND = sys.argv[2]


@asynccontextmanager
async def lifespan(served: FastAPI) -> AsyncIterator[None]:
    """One client session for all requests."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        served.state.session = session
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health() -> dict[str, str]:
    """It runs."""
    return {"status": "ok"}


@app.post("/v1/chat/completions")
async def chat(request: Request) -> StreamingResponse:
    """Hand the body on and the answer back."""
    response = await app.state.session.post(
        f"{BACKEND}/v1/chat/completions",
        data=await request.body(),
        headers={"Content-Type": "application/json"},
    )

    async def chunks() -> AsyncIterator[bytes]:
        async with response:
            async for chunk in response.content.iter_any():
                yield chunk

    return StreamingResponse(chunks(), response.status, media_type=response.headers["Content-Type"])


if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )
