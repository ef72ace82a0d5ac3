# SPDX-License-Identifier: Apache-2.0
"""Read a client's request body within bounds, and notice when the client leaves; endpoint.py asks."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

from ttft_otel.http.byte_budget import ByteBudget
from ttft_otel.router.errors import RequestRejected
from ttft_otel.router.exchange import CLIENT_DISCONNECTED, Exchange, ExchangePhase
from ttft_otel.router.limits import RouterLimits
from ttft_otel.router.proxy.admission import build_share_error
from ttft_otel.router.proxy.client_stream import AnswerOutput
from ttft_otel.router.time_limits import DeadlineQueue
from ttft_otel.router.types import AsgiReceive
from ttft_otel.router.upstream import http_headers

RETRY_AFTER_S: Final = 1


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
                raise build_share_error("Too many bytes of this API key's bodies are under way.")
            self._bytes_by_owner[body.owner] += number
            body.owner_bytes += number
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


class DisconnectWatch:
    """Cancels `task`, and thereby the legs of its request, when the client leaves.

    It is made once the body is here, and ended with the request. output: the client's connection, where the
    server offers it; from another server a task of its own learns it, which costs more.
    """

    __slots__ = ("_exchange", "_task", "_output", "_watcher")

    def __init__(
        self,
        exchange: Exchange,
        task: asyncio.Task[Any] | None,
        receive: AsgiReceive,
        output: AnswerOutput | None,
    ) -> None:
        self._exchange = exchange
        self._task = task
        self._output = output
        self._watcher: asyncio.Task[None] | None = None
        if output is not None:
            output.begin_watch(self._cancel_request)
        else:
            self._watcher = asyncio.create_task(self._await_disconnect(receive))

    async def _await_disconnect(self, receive: AsgiReceive) -> None:
        # After the body receive() waits for the client to leave, or for the answer's end.
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel_request()

    def _cancel_request(self) -> None:
        if self._task is not None and self._exchange.record_client_left():
            self._task.cancel()

    def end(self) -> None:
        """The request is over, or was cancelled."""
        if self._output is not None:
            self._output.end_watch()
        # After a complete response the task ends by itself, which is cheaper than a cancellation.
        elif self._watcher is not None and self._exchange.phase < ExchangePhase.FINISHED:
            self._watcher.cancel()
