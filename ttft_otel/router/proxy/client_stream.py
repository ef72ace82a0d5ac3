# SPDX-License-Identifier: Apache-2.0
"""The client's side of one request: relays headers, first token and the rest without buffering.

endpoint.py passes the legs' responses; a slow client slows its leg down, and a response
that is cut short is closed. The client's connection (control/uvicorn_server.py) makes a ClientOutput for
each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace
from uvicorn.protocols.http.flow_control import FlowControl

from ttft_otel.model import timing
from ttft_otel.model.names import header_names, keys
from ttft_otel.router.errors import RouterError, UpstreamRefused
from ttft_otel.router.proxy.exchange_reporter import ExchangeReporter
from ttft_otel.router.routing.upstream_client import read_first_chunk, record_server_timing
from ttft_otel.router.timeline import Attempt, Exchange, partition_timeline
from ttft_otel.router.types import AsgiSend, AttemptLoad, HeaderList
from ttft_otel.router.upstream import http_headers
from ttft_otel.router.upstream.failures import UPSTREAM_ERRORS
from ttft_otel.router.upstream.instance_connection import InstanceAnswer
from ttft_otel.tracing import clock

OUTPUT_EXTENSION: Final = "ttft_otel.output"  # of the scope: a ClientOutput
# How vLLM begins the stream of a completion that failed before its first token; said by an instance
# that does not report it in Server-Timing.
_ERROR_EVENT: Final = b'data: {"error":'


@dataclass(slots=True, eq=False)
class ClientOutput(asyncio.Transport):
    """In place of the transport, of which a request's cycle calls `write`, `close` and `is_closing`.

    It refers neither to the cycle nor to the connection: each request would leave a reference cycle.
    can_push: whether parts can be written without the cycle.
    """

    _transport: asyncio.Transport
    _flow: FlowControl
    can_push: bool
    _reader: InstanceAnswer | None = None
    _waits_with_head: bool = False
    _head: bytes = b""
    _is_lost: bool = False
    _on_lost: Callable[[], None] | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write `data`, or keep it as the head that waits."""
        if self._waits_with_head:
            # The head comes first; the next write is that of the first part.
            if not self._head:
                self._head = bytes(data)
                return
            # One write, so that a short answer leaves in one packet.
            data = self._head + data
            self._waits_with_head = False
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection, once what was written is out."""
        # The application ended between head and body: what there is has to leave.
        if self._waits_with_head:
            self._transport.write(self._head)
            self._waits_with_head = False
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def delay_head(self) -> None:
        """Keep what is written next until more is: the caller sends head and body without a pause."""
        self._waits_with_head = True

    def begin_watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` when the client leaves, or at once if it has left. The body has been read."""
        if self._is_lost:
            on_lost()
            return
        self._on_lost = on_lost
        # A large body has paused it, and who does not read hears of no end.
        self._flow.resume_reading()

    def end_watch(self) -> None:
        self._on_lost = None

    def report_lost(self) -> None:
        self._is_lost = True
        if self._on_lost is not None:
            self._on_lost()

    def begin_push(self, reader: InstanceAnswer) -> None:
        """From now on a slow client pauses `reader`."""
        self._reader = reader
        # A client that was slow before is not reported once more by pause_writing().
        if self._flow.write_paused:
            reader.pause_reading()

    def push_part(self, data: bytes) -> None:
        """Write a part of a body in chunks."""
        # The client has left, of which the connection tells the request's task.
        if not self._transport.is_closing():
            # A chunk of HTTP/1.1: its length in hexadecimal, then the data.
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_push(self) -> None:
        self._reader = None

    def pause_reader(self) -> None:
        if self._reader is not None:
            self._reader.pause_reading()

    def resume_reader(self) -> None:
        if self._reader is not None:
            self._reader.resume_reading()


class ClientStream(msgspec.Struct):
    """One request's client. `output`: its connection. `wants_timing`: it wants Server-Timing. `reporter`:
    None without tracing."""

    exchange: Exchange
    send: AsgiSend
    _output: ClientOutput
    wants_timing: bool
    _reporter: ExchangeReporter | None
    _has_length: bool = False

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
        # uvicorn writes a head at once: two packets, and a client that wakes up for nothing.
        self._output.delay_head()
        await self._send_start(status, response_headers)
        # Before the send, in which uvicorn may report that a satisfied client has left.
        if not has_more:
            exchange.record_last_send()
        await self.send({"type": "http.response.body", "body": data, "more_body": has_more})
        exchange.record_first_chunk()
        if self._reporter is None or not (exchange.is_streaming and has_more):
            return
        if exchange.operation and exchange.has_answered:
            self._reporter.report(exchange, is_over=False)

    async def _send_start(self, status: int, response_headers: HeaderList) -> None:
        """Send `status` and headers, adding the request ID, by which a client can find its report."""
        exchange = self.exchange
        # First, since it raises if a head is out: a second one would corrupt the stream.
        exchange.record_head(status)
        response_headers.append((header_names.REQUEST_ID.encode(), exchange.request_id.encode()))
        await self.send(
            {"type": "http.response.start", "status": status, "headers": response_headers}
        )

    async def send_error(self, error: RouterError) -> None:
        """Answer with an error: the instance's own, or ours in OpenAI's form."""
        response_headers, data = render_error(error)
        # Before the send, in which a client that has its answer may leave.
        self.exchange.record_error_answer(error.status)
        await self._send_start(error.status, response_headers)
        await self.send({"type": "http.response.body", "body": data, "more_body": False})

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
        if self._has_length or not output.can_push:
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
                    else partial(_push_rewritten, rewrite, output.push_part)
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


def render_error(error: RouterError) -> tuple[HeaderList, bytes]:
    """The instance's own headers and body, or ours: OpenAI's JSON."""
    if isinstance(error, UpstreamRefused):
        return error.headers, error.body
    content = {
        "message": str(error),
        "type": error.error_type,
        "param": error.parameter,
        "code": error.status,
    }
    data = msgspec.json.encode({"error": content})
    response_headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(data)),
    ]
    if error.retry_after_s:
        response_headers.append((b"retry-after", b"%d" % error.retry_after_s))
    # RFC 9110 section 15.5.2: a 401 has to name the scheme.
    if error.status == 401:
        response_headers.append((b"www-authenticate", b"Bearer"))
    return response_headers, data


def _push_rewritten(
    rewrite: Callable[[bytes], bytes], push_part: Callable[[bytes], None], data: bytes
) -> None:
    # An empty part must not be pushed: as a chunk it would be the end of the body.
    if kept := rewrite(data):
        push_part(kept)


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


async def relay_response(
    response: InstanceAnswer, attempt: Attempt, client_stream: ClientStream
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


class AnswerReading(msgspec.Struct):
    """Context manager for reading `response`: notes how that ended in `attempt`, and finishes it.

    Not a generator: making and closing one for each answer costs more.
    """

    _response: InstanceAnswer
    _attempt: Attempt

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
