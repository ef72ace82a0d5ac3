# SPDX-License-Identifier: Apache-2.0
"""Start an answer and make the ones that are errors; forward.py calls it, the client reads it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from ttft_otel import names
from ttft_otel.router.fan import Refused
from ttft_otel.router.legs import Down
from ttft_otel.router.report import Exchange

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class TooLarge(Exception):
    """The body is beyond the bound: 413."""


async def start(status: int, down: Headers, exchange: Exchange, send: Send) -> None:
    """Send the head of an answer, with the request id that the client may look it up by."""
    exchange.status = status
    down.append((names.REQUEST_HEADER.encode(), exchange.request_id.encode()))
    await send({"type": "http.response.start", "status": status, "headers": down})


async def fail(error: TooLarge | Refused | Down, exchange: Exchange, send: Send) -> None:
    """Answer with an error: the encoder's own, or ours in OpenAI's form."""
    if isinstance(error, Refused):
        status, down, data = error.status, error.headers, error.body
    else:
        status, message = (
            (413, "The request body is too large.")
            if isinstance(error, TooLarge)
            else (error.status, str(error))
        )
        kind = "BadRequestError" if status == 413 else "UpstreamError"
        content = {"message": message, "type": kind, "param": None, "code": status}
        data = msgspec.json.encode({"error": content})
        down = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    exchange.error = exchange.error or str(status)
    exchange.done = True
    await start(status, down, exchange, send)
    await send({"type": "http.response.body", "body": data, "more_body": False})
