# SPDX-License-Identifier: Apache-2.0
"""Read a client's request body and notice when the client leaves; endpoint.py calls both."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from ttft_otel.router.exchange import CLIENT_DISCONNECTED, Exchange, ExchangePhase
from ttft_otel.router.proxy.body_budget import BodyBudget, ClientBody, build_too_large_error
from ttft_otel.router.proxy.client_stream import AnswerOutput
from ttft_otel.router.types import AsgiReceive
from ttft_otel.router.upstream import http_headers

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
