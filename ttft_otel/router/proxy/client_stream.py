# SPDX-License-Identifier: Apache-2.0
"""The client's side of one request: relays headers, first token and the rest without buffering.

endpoint.py and prefill_decode.py pass the legs' responses; a slow client slows its leg down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ttft_otel import clock, names, timing
from ttft_otel.guard import Guard
from ttft_otel.router.exchange import Exchange
from ttft_otel.router.proxy import error_responses
from ttft_otel.router.timeline import partition_timeline
from ttft_otel.router.types import AsgiSend, HeaderList


class ClientStream:
    """One request's client. `wants_timing`: it wants Server-Timing.
    `report_first_token` takes the ttft half."""

    def __init__(
        self,
        exchange: Exchange,
        send: AsgiSend,
        wants_timing: bool,
        report_first_token: Callable[[Exchange], None],
    ) -> None:
        self.exchange, self.send, self.wants_timing, self.report_first_token = (
            exchange,
            send,
            wants_timing,
            report_first_token,
        )

    async def send_first_chunk(
        self, status: int, response_headers: HeaderList, data: bytes, has_more: bool
    ) -> None:
        """Send headers and first chunk (`data`); a stream then reports its TTFT, after the client has it."""
        exchange = self.exchange
        if self.wants_timing and not exchange.is_background:
            response_headers.append((names.TIMING.encode(), _render_server_timing(exchange)))
        await error_responses.send_response_start(status, response_headers, exchange, self.send)
        if not has_more:
            exchange.record_last_send()
        await self.send({"type": "http.response.body", "body": data, "more_body": has_more})
        exchange.record_first_chunk()
        if exchange.is_streaming and has_more and exchange.operation and exchange.has_answered:
            with Guard("router.first"):
                self.report_first_token(exchange)

    async def send_chunk(self, data: bytes) -> None:
        """Send the next chunk, `data`."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def send_end(self) -> None:
        """End the response."""
        self.exchange.record_last_send()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def _render_server_timing(exchange: Exchange) -> bytes:
    """The router's own Server-Timing, rendered just before the client's first byte."""
    now_us = clock.now_us()
    ended_us = now_us if exchange.is_streaming else 0
    timeline = replace(exchange.timeline, ended_us=ended_us)
    breakdown = partition_timeline(timeline)
    rest_us = None if exchange.is_streaming else now_us - breakdown.end
    return timing.format_server_timing(
        breakdown.stages, breakdown.unattributed, breakdown.end - breakdown.start, rest_us
    ).encode()
