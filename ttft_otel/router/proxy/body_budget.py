# SPDX-License-Identifier: Apache-2.0
"""Bounds the bytes and the time of all request bodies; client_request.py fills it, endpoint.py releases."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from ttft_otel.http.byte_budget import ByteBudget
from ttft_otel.router.deadlines import DeadlineQueue
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.limits import RouterLimits

RETRY_AFTER_S: Final = 1


class ClientBody:
    """The body of one request, which the task `reader` reads.

    data: all of it, once it is here; b"" again when it was taken. error: why the reader was cancelled, None
    unless that was done here.
    """

    __slots__ = ("data", "error", "counted_bytes", "_reader")

    def __init__(self, reader: asyncio.Task[Any] | None) -> None:
        self.data = b""
        self.counted_bytes = 0
        self.error: RequestRejected | None = None
        self._reader = reader

    def take_data(self) -> bytes:
        """All of it, for the only one who holds it from here on: it may be large, and the answer long."""
        data, self.data = self.data, b""
        return data

    def time_out(self) -> None:
        """End the reading: the body did not arrive in time."""
        self.refuse(
            RequestRejected(
                408, "The body of the request did not arrive in time.", reason="body_timeout"
            )
        )

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

    @property
    def counted_bytes(self) -> int:
        """Bytes of all bodies together."""
        return self._bytes.counted_bytes

    def begin_body(self, reader: asyncio.Task[Any] | None) -> ClientBody:
        """A body is expected, by the task `reader`."""
        body = ClientBody(reader)
        self._arriving.watch(body)
        return body

    def add_bytes(self, body: ClientBody, number: int) -> None:
        """Count bytes that arrived. Raises RequestRejected if `body` is refused for them."""
        # The limit of one body first: a body that is too large must not push out others.
        if body.counted_bytes + number > self.limits.max_body:
            raise build_too_large_error()
        for each in self._bytes.add_bytes(body, number):
            error = RequestRejected(
                503,
                "The router holds too many request bodies.",
                "UnavailableError",
                retry_after_s=RETRY_AFTER_S,
                reason="bodies",
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
        body.error = None  # its frames hold the body


def build_too_large_error() -> RequestRejected:
    """A body that exceeds --max-body."""
    return RequestRejected(413, "The request body is too large.", reason="body")
