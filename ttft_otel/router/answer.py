# SPDX-License-Identifier: Apache-2.0
"""Start an answer and make the ones that are errors; forward.py calls it, the client reads it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from ttft_otel import names
from ttft_otel.router.fan import Refused
from ttft_otel.router.legs import Down
from ttft_otel.router.report import Exchange

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Rejected(Exception):
    """The router's own refusal; `again`: seconds after which to try again."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "BadRequestError",
        param: str | None = None,
        again: int = 0,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.again = status, kind, param, again


class TooLarge(Rejected):
    """The body is beyond the bound: 413."""

    def __init__(self) -> None:
        super().__init__(413, "The request body is too large.")


class TooLate(Rejected):
    """No instance can make it in time: 429, and when one might."""

    def __init__(self, after: float) -> None:
        again = max(1, math.ceil(after))
        message = f"No instance can answer in time; try again in {again} s."
        super().__init__(429, message, "RateLimitError", again=again)


async def start(status: int, down: Headers, exchange: Exchange, send: Send) -> None:
    """Send the head of an answer, with the request id that the client may look it up by."""
    exchange.status = status
    down.append((names.REQUEST_HEADER.encode(), exchange.request_id.encode()))
    await send({"type": "http.response.start", "status": status, "headers": down})


async def fail(error: Rejected | Refused | Down, exchange: Exchange, send: Send) -> None:
    """Answer with an error: the encoder's own, or ours in OpenAI's form."""
    if isinstance(error, Refused):
        status, down, data = error.status, error.headers, error.body
    else:
        status, down, data = error.status, *render(error)
    exchange.error = exchange.error or str(status)
    exchange.done = True
    await start(status, down, exchange, send)
    await send({"type": "http.response.body", "body": data, "more_body": False})


def render(error: Rejected | Down) -> tuple[Headers, bytes]:
    """An error of ours as headers and OpenAI's JSON."""
    kind, param, again = "UpstreamError", None, int(error.status == 503)
    if isinstance(error, Rejected):
        kind, param, again = error.kind, error.param, error.again
    content = {"message": str(error), "type": kind, "param": param, "code": error.status}
    data = msgspec.json.encode({"error": content})
    down = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    if again:
        down.append((b"retry-after", b"%d" % again))
    if error.status == 401:
        down.append((b"www-authenticate", b"Bearer"))
    return down, data
