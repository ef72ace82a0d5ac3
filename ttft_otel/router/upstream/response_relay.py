# SPDX-License-Identifier: Apache-2.0
"""Relay an instance's response to the client chunk by chunk; one that is cut short is closed.

endpoint.py and prefill_decode.py call it with the client's writer. Nothing is buffered, so a slow client
slows its leg down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from ttft_otel.model.names import keys
from ttft_otel.router.exchange import Exchange
from ttft_otel.router.timeline import Attempt
from ttft_otel.router.types import AttemptLoad, HeaderList
from ttft_otel.router.upstream import http_headers
from ttft_otel.router.upstream.failures import UPSTREAM_ERRORS
from ttft_otel.router.upstream.instance_connection import InstanceAnswer
from ttft_otel.router.upstream.upstream_client import read_first_chunk, record_server_timing

# How vLLM begins the stream of a completion that failed before its first token; said by an instance
# that does not report it in Server-Timing.
_ERROR_EVENT: Final = b'data: {"error":'


class ClientWriter(Protocol):
    """The client's side of an exchange; ClientStream of proxy/ implements it."""

    exchange: Exchange

    async def send_first_chunk(
        self, status: int, response_headers: HeaderList, data: bytes, has_more: bool
    ) -> None:
        """Send `status`, headers and the first body chunk, `data`."""

    async def send_chunk(self, data: bytes) -> None:
        """Send the next chunk, `data`."""

    async def send_rest(
        self, answer: InstanceAnswer, rewrite: Callable[[bytes], bytes] | None = None
    ) -> bytes:
        """Send the rest of `answer` as it comes, but for what came with its end, which is returned.

        rewrite: makes of each part what is sent or returned, which may be nothing.
        """

    async def send_end(self, data: bytes = b"") -> None:
        """End the response, with `data` before."""


async def relay_response(
    response: InstanceAnswer, attempt: Attempt, client_stream: ClientWriter
) -> None:
    """Relay `response` chunk by chunk; close it if the client leaves first."""
    exchange = client_stream.exchange
    with AnswerReading(response, attempt):
        first_chunk = await read_first_chunk(response, attempt)
        if first_chunk.startswith(_ERROR_EVENT) and not attempt.error:
            attempt.record_failure(keys.ERROR_NO_TOKEN, is_instance_failure=False)
        load_entry = attempt.load_entry
        if exchange.trace_context.trace_id or load_entry is not None:
            record_server_timing(attempt, response)
        exchange.record_answer(response.content_type == "text/event-stream", attempt.error)
        # Asked before the send: if the end came with the first chunk, both leave together.
        has_more = not response.at_eof()
        # Who asked for Server-Timing decides who gets it: what the router asked for is removed.
        is_own_timing = bool(exchange.trace_context.trace_id) or (
            load_entry is not None and load_entry.requested_timing
        )
        response_headers = http_headers.filter_response_headers(response.raw_headers, is_own_timing)
        await client_stream.send_first_chunk(
            response.status, response_headers, first_chunk, has_more
        )
        # After the send: what a policy learns from a chunk must not delay it.
        if load_entry is not None:
            _record_chunk(load_entry, first_chunk)
        if has_more:
            rewrite = None
            if load_entry is not None and load_entry.awaits_delta:
                rewrite = partial(_record_chunk, load_entry)
            last_part = await client_stream.send_rest(response, rewrite)
        # Before the last send, which may wait for a slow client: the instance's part is over.
        attempt.record_ended()
        if has_more:
            await client_stream.send_end(last_part)


def _record_chunk(load_entry: AttemptLoad, data: bytes) -> bytes:
    if load_entry.awaits_delta:
        load_entry.record_chunk(data)
    return data


class AnswerReading:
    """Context manager for reading `response`: notes how that ended in `attempt`, and finishes it.

    Not a generator: making and closing one for each answer costs more.
    """

    __slots__ = ("_response", "_attempt")

    def __init__(self, response: InstanceAnswer, attempt: Attempt) -> None:
        self._response = response
        self._attempt = attempt

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        attempt = self._attempt
        if isinstance(error, UPSTREAM_ERRORS):
            # whole answers that take longer than --total-timeout are what their clients asked for
            is_late_end = isinstance(error, asyncio.TimeoutError) and bool(attempt.first_byte_us)
            attempt.record_failure(type(error).__name__, not is_late_end)
        elif isinstance(error, asyncio.CancelledError):
            attempt.record_cancelled()
        finish_attempt(self._response, attempt)


def finish_attempt(response: InstanceAnswer, attempt: Attempt) -> None:
    """Note the end of `attempt`; a `response` that is not read to its end is closed."""
    attempt.record_ended()
    if not response.at_eof():
        response.close()
