# SPDX-License-Identifier: Apache-2.0
"""The client's side of one request: relays headers, first token and the rest without buffering.

endpoint.py and prefill_decode.py pass the legs' responses; a slow client slows its leg down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from msgspec.structs import replace

from ttft_otel.model import timing
from ttft_otel.model.names import header_names
from ttft_otel.router.exchange import Exchange
from ttft_otel.router.proxy import error_responses
from ttft_otel.router.proxy.exchange_reporter import ExchangeReporter
from ttft_otel.router.timeline import partition_timeline
from ttft_otel.router.types import AsgiScope, AsgiSend, HeaderList
from ttft_otel.router.upstream.instance_answer import InstanceAnswer
from ttft_otel.tracing import clock

OUTPUT_EXTENSION: Final = "ttft_otel.output"  # of the scope: an AnswerOutput


class AnswerOutput(Protocol):
    """The client's connection, for what ASGI has no message for; ClientOutput of control/."""

    def delay_head(self) -> None:
        """The head waits for the first part of the body."""

    def begin_watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` when the client leaves, or at once if it has left."""

    def end_watch(self) -> None:
        """The request is over."""

    def begin_push(self, reader: InstanceAnswer) -> None:
        """From now on a slow client pauses `reader`."""

    def push_part(self, data: bytes) -> None:
        """Write a part of a body whose length is not announced; never waits."""

    def end_push(self) -> None:
        """The rest is sent as messages."""


def find_output(scope: AsgiScope) -> AnswerOutput | None:
    """The client's connection, where the server offers it."""
    output: AnswerOutput | None = scope.get("extensions", {}).get(OUTPUT_EXTENSION)
    return output


class ClientStream:
    """One request's client. `wants_timing`: it wants Server-Timing. `reporter`: None without tracing.
    `output`: its connection, if parts can be pushed to it."""

    def __init__(
        self,
        exchange: Exchange,
        send: AsgiSend,
        wants_timing: bool,
        reporter: ExchangeReporter | None,
        output: AnswerOutput | None = None,
    ) -> None:
        self._output = output
        self._has_length = False
        self.exchange = exchange
        self.send = send
        self.wants_timing = wants_timing
        self._reporter = reporter

    async def send_first_chunk(
        self, status: int, response_headers: HeaderList, data: bytes, has_more: bool
    ) -> None:
        """Send headers and first chunk (`data`); a stream then reports its TTFT, after the client has it."""
        exchange = self.exchange
        # What is only queued has no first token, of which the header could tell.
        if self.wants_timing and not exchange.is_background:
            response_headers.append(
                (header_names.SERVER_TIMING.encode(), _render_server_timing(exchange))
            )
        if has_more:
            # Pushed parts are written as chunks of HTTP/1.1, which a body with a length has not.
            self._has_length = any(name == b"content-length" for name, _ in response_headers)
        if self._output is not None:
            # uvicorn writes a head at once: two packets, and a client that wakes up for nothing.
            self._output.delay_head()
        await error_responses.send_response_start(status, response_headers, exchange, self.send)
        # Before the send, in which uvicorn may report that a satisfied client has left.
        if not has_more:
            exchange.record_last_send()
        await self.send({"type": "http.response.body", "body": data, "more_body": has_more})
        exchange.record_first_chunk()
        if self._reporter is None or not (exchange.is_streaming and has_more):
            return
        if exchange.operation and exchange.has_answered:
            self._reporter.report_first_token(exchange)

    async def send_chunk(self, data: bytes) -> None:
        """Send the next chunk, `data`."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def send_rest(
        self, answer: InstanceAnswer, rewrite: Callable[[bytes], bytes] | None = None
    ) -> bytes:
        """Send the rest of `answer` as it comes, but for what came with its end, which is returned.

        rewrite: makes of each part what is sent or returned, which may be nothing.
        """
        output = self._output
        if output is None or self._has_length:
            # The last part is kept, so that it leaves with the end of the body, in one write.
            while (part := await answer.readany()) and not answer.at_eof():
                if kept := part if rewrite is None else rewrite(part):
                    await self.send_chunk(kept)
        else:
            output.begin_push(answer)
            try:
                part = await answer.push_to(
                    output.push_part
                    if rewrite is None
                    else _rewrite_parts(rewrite, output.push_part)
                )
            finally:
                # From here on a slow client must not pause an answer that is over.
                output.end_push()
        return part if rewrite is None else rewrite(part)

    async def send_end(self, data: bytes = b"") -> None:
        """End the response, with `data` before."""
        # First, as in send_first_chunk(): a client may leave while this is sent.
        self.exchange.record_last_send()
        await self.send({"type": "http.response.body", "body": data, "more_body": False})


def _rewrite_parts(
    rewrite: Callable[[bytes], bytes], push_part: Callable[[bytes], None]
) -> Callable[[bytes], None]:
    def push_rewritten(data: bytes) -> None:
        # An empty part must not be pushed: as a chunk it would be the end of the body.
        if kept := rewrite(data):
            push_part(kept)

    return push_rewritten


def _render_server_timing(exchange: Exchange) -> bytes:
    """The router's own Server-Timing, rendered just before the client's first byte."""
    # The header leaves before the first byte, so that the egress after this moment is not in it.
    now_us = clock.now_us()
    ended_us = now_us if exchange.is_streaming else 0
    timeline = replace(exchange.timeline, ended_us=ended_us)
    breakdown = partition_timeline(timeline)
    # As an instance tells it: what passed since the first token of an answer that is not streamed.
    rest_us = None if exchange.is_streaming else now_us - breakdown.end
    return timing.format_server_timing(
        breakdown.stages, breakdown.unattributed, breakdown.end - breakdown.start, rest_us
    ).encode()
