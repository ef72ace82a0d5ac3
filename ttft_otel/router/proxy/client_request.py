# SPDX-License-Identifier: Apache-2.0
"""Read a client's request body within bounds; endpoint.py asks."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

from ttft_otel.http.byte_budget import ByteBudget
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.exchange import CLIENT_DISCONNECTED, Exchange
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.time_limits import DeadlineQueue
from ttft_otel.router.types import AsgiReceive
from ttft_otel.router.upstream import http_headers


class ClientBody:
    """The body of one request, which the task `reader` reads.

    owner: whose key it came with, "" without keys. owner_bytes: of the owner's share.
    data: all of it, once it is here; b"" again when it was taken. error: why the reader was cancelled, None
    unless that was done here.
    """

    __slots__ = ("data", "error", "counted_bytes", "owner", "owner_bytes", "_reader")

    def __init__(self, reader: asyncio.Task[Any] | None, owner: str) -> None:
        self.data = b""
        self.owner = owner
        self.owner_bytes = 0
        self.counted_bytes = 0
        self.error: RequestRejected | None = None
        self._reader = reader

    def take_data(self) -> bytes:
        """All of it, for the only one who holds it from here on: it may be large, and the answer long."""
        data, self.data = self.data, b""
        return data

    def time_out(self) -> None:
        """End the reading: the body did not arrive in time."""
        message = "The body of the request did not arrive in time."
        self.refuse(RequestRejected(408, message, reason="body_timeout"))

    def refuse(self, error: RequestRejected) -> None:
        """End the reading with `error`."""
        # First, so that the reader finds it when the cancellation arrives.
        self.error = error
        if self._reader is not None:
            self._reader.cancel()


class BodyBudget:
    """All bodies that the router holds; all of it runs on the event loop."""

    def __init__(self, limits: RouterLimits) -> None:
        self.limits = limits
        self._arriving: DeadlineQueue[ClientBody] = DeadlineQueue(limits.body_timeout)
        self._bytes: ByteBudget[ClientBody] = ByteBudget(limits.max_bodies, self._arriving)
        self._bytes_by_owner: Counter[str] = Counter()  # with --max-key-bytes

    @property
    def counted_bytes(self) -> int:
        """Bytes of all bodies together."""
        return self._bytes.counted_bytes

    def begin_body(self, reader: asyncio.Task[Any] | None, owner: str) -> ClientBody:
        """A body of `owner` is expected, by the task `reader`."""
        body = ClientBody(reader, owner)
        self._arriving.watch(body)
        return body

    def add_bytes(self, body: ClientBody, number: int) -> None:
        """Count bytes that arrived. Raises RequestRejected if `body` is refused for them."""
        # The limit of one body first: a body that is too large must not push out others.
        if body.counted_bytes + number > self.limits.max_body:
            raise build_too_large_error()
        if body.owner and (most := self.limits.max_key_bytes):
            if self._bytes_by_owner[body.owner] + number > most:
                message = "Too many bytes of this API key's bodies are under way."
                raise RequestRejected(429, message, reason="share")
            self._bytes_by_owner[body.owner] += number
            body.owner_bytes += number
        for each in self._bytes.add_bytes(body, number):
            error = RequestRejected(
                503, "The router holds too many request bodies.", reason="bodies"
            )
            # The caller gets an exception; readers of others wait, and are cancelled.
            if each is body:
                raise error
            self.end_reading(each)
            each.refuse(error)

    def end_reading(self, body: ClientBody) -> None:
        """Nothing more of `body` will arrive; its bytes count until it is released. Idempotent."""
        self._arriving.forget(body)

    def release_body(self, body: ClientBody) -> None:
        """No instance gets it any more, or its request is over. Idempotent."""
        self._bytes.release(body)
        if body.owner_bytes:
            self._bytes_by_owner[body.owner] -= body.owner_bytes
            body.owner_bytes = 0
        body.error = None  # its frames hold the body


def build_too_large_error() -> RequestRejected:
    """A body that exceeds --max-body."""
    return RequestRejected(413, "The request body is too large.", reason="body")


MAX_JOINED_BYTES: Final = 4 << 20  # of a body that is joined on the loop: about a millisecond


async def read_body(
    receive: AsgiReceive,
    client_headers: http_headers.ClientHeaders,
    budget: BodyBudget,
    client_body: ClientBody,
    exchange: Exchange,
) -> bool:
    """Read the request body into `client_body`; False if the client disconnected first.

    budget: counts its bytes. Raises RequestRejected.
    """
    content_length = client_headers.get("content-length")
    chunks: list[bytes] = []
    try:
        # What is announced is refused before it is read; a chunked body announces nothing.
        if content_length.isdigit() and int(content_length) > budget.limits.max_body:
            raise build_too_large_error()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                exchange.record_failure(CLIENT_DISCONNECTED)
                return False
            chunk = message.get("body", b"")
            budget.add_bytes(client_body, len(chunk))
            chunks.append(chunk)
            if not message.get("more_body", False):
                if len(chunks) == 1:
                    client_body.data = chunks[0]
                elif client_body.counted_bytes > MAX_JOINED_BYTES:
                    # in a thread, which lets go of the interpreter while it copies
                    client_body.data = await asyncio.to_thread(b"".join, chunks)
                else:
                    client_body.data = b"".join(chunks)
                return True
    except asyncio.CancelledError:
        # By the budget or its timer, which leave an error; otherwise the server is being stopped.
        if client_body.error is None:
            raise
        raise client_body.error from None
    finally:
        budget.end_reading(client_body)
