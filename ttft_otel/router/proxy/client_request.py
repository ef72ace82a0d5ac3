# SPDX-License-Identifier: Apache-2.0
"""Read a client's request body and notice when the client leaves; endpoint.py calls both."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from ttft_otel.router import errors
from ttft_otel.router.exchange import CLIENT_DISCONNECTED, Exchange
from ttft_otel.router.proxy.body_budget import BodyBudget, ClientBody
from ttft_otel.router.types import AsgiReceive
from ttft_otel.router.upstream import http_headers

MAX_JOINED_BYTES: Final = 4 << 20  # of a body that is joined on the loop: about a millisecond


async def read_body(
    receive: AsgiReceive,
    client_headers: http_headers.ClientHeaders,
    budget: BodyBudget,
    client_body: ClientBody,
    exchange: Exchange,
) -> bytes | None:
    """Read the request body; None if the client disconnected first. Raises RequestRejected.

    client_body: what `budget` knows of it.
    """
    content_length = client_headers.get("content-length")
    chunks: list[bytes] = []
    try:
        # What is announced is refused before it is read; a chunked body announces nothing.
        if content_length.isdigit() and int(content_length) > budget.limits.max_body:
            raise errors.BodyTooLarge
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                exchange.record_failure(CLIENT_DISCONNECTED)
                return None
            chunk = message.get("body", b"")
            budget.add_bytes(client_body, len(chunk))
            chunks.append(chunk)
            if not message.get("more_body", False):
                if len(chunks) == 1:
                    return chunks[0]
                if client_body.held_bytes > MAX_JOINED_BYTES:
                    # in a thread, which lets go of the interpreter while it copies
                    return await asyncio.to_thread(b"".join, chunks)
                return b"".join(chunks)
    except asyncio.CancelledError:
        # By the budget or its timer, which leave an error; otherwise the server is being stopped.
        if client_body.error is None:
            raise
        raise client_body.error from None
    finally:
        budget.end_reading(client_body)


async def watch_disconnect(
    receive: AsgiReceive, exchange: Exchange, task: asyncio.Task[Any] | None
) -> None:
    """Cancel the request's task, and thereby its legs, when the client disconnects."""
    # After the body uvicorn's receive() waits for the client to leave, or for the answer's end.
    while (await receive())["type"] != "http.disconnect":
        pass
    if task is not None and exchange.record_client_left():
        task.cancel()
