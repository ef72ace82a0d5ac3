# SPDX-License-Identifier: Apache-2.0
"""Both ends of the router's benchmark, on asyncio transports: an instance that answers at once, and a
closed loop of clients that loads the router under test.

`python -m benchmarks.bare_transport PORT` serves the instance, which swallows OTLP too.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Final, cast

import uvloop

from ttft_otel.bench.http_exchange import BenchTarget
from ttft_otel.model.endpoints import CHAT_PATH

# A short stream in one write shows what a request costs, a long paced one what a token costs.
EVENTS_PER_STREAM: Final = 16
TOKENS_PER_STREAM: Final = 200
STAMPED_PER_STREAM: Final = 17  # events of a stream that tells when each one left
TOKEN_INTERVAL_S: Final = 0.005  # seconds between two tokens of a paced stream
SERVER_TIMING: Final = "receive;dur=0.100, prefill.compute;dur=0.200, ttft;dur=0.300"
# What vLLM's answers look like: 240 bytes an event, one HTTP chunk each.
EVENT: Final = (
    b'data: {"id":"chatcmpl-b5a8d2f1c37e4f7c9d3a6e1b2c4d5e6f","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"tiny","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
STAMP_PLACE: Final = EVENT[15:35]  # of the ID: nanoseconds of CLOCK_MONOTONIC
FIRST_EVENT: Final = EVENT.replace(b'{"content":" word"}', b'{"role":"assistant","content":""}')
EVENT_CHUNK: Final = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
# Sizes of chunks are hexadecimal: `e` are the 14 bytes of "data: [DONE]" with its empty line.
DONE_CHUNK: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
# With the parameters that a prefill instance answers: this instance plays those of a router, too.
PLAIN_BODY: Final = (
    b'{"id":"chatcmpl-b5a8d2f1c37e4f7c9d3a6e1b2c4d5e6f","object":"chat.completion","created":1700000000,'
    b'"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":" word"},'
    b'"finish_reason":"length"}],"usage":{"prompt_tokens":9,"total_tokens":10,"completion_tokens":1},'
    b'"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e",'
    b'"remote_block_ids":[[1]],"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}'
)
HEALTH_BODY: Final = b'{"object":"list","status":"ok","data":[{"id":"tiny","object":"model"}]}'


def build_response_head(kind: str, length: int | None) -> bytes:
    """Headers of a response as vLLM sends them, with the Server-Timing of a traced leg."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return (
        f"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\nserver: uvicorn\r\n"
        f"Server-Timing: {SERVER_TIMING}\r\nContent-Type: {kind}\r\n{size}\r\n\r\n"
    ).encode()


PLAIN_RESPONSE: Final = build_response_head("application/json", len(PLAIN_BODY)) + PLAIN_BODY
HEALTH_RESPONSE: Final = build_response_head("application/json", len(HEALTH_BODY)) + HEALTH_BODY
STREAM_HEAD: Final = build_response_head("text/event-stream; charset=utf-8", None)
STREAM_START: Final = STREAM_HEAD + b"%x\r\n%b\r\n" % (len(FIRST_EVENT), FIRST_EVENT)
# Built once: the instance must cost less than what is measured in front of it.
STREAM_RESPONSE: Final = STREAM_START + EVENT_CHUNK * (EVENTS_PER_STREAM - 1) + DONE_CHUNK
FIRST_TOKEN: Final = STREAM_START + EVENT_CHUNK
LATER_TOKENS: Final = STREAM_RESPONSE.removeprefix(FIRST_TOKEN)


class InstantInstance(asyncio.Protocol):
    """Answers each request at once: plain, 16 events in one write or in two, or a token every 5 ms.

    is_stamped: events of the paced stream say when they left.
    """

    is_stamped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self.transport = cast(asyncio.Transport, transport)
        self.data = b""

    def data_received(self, data: bytes) -> None:
        """Answer each complete request."""
        self.data += data
        # No HTTP parser: requests come from our own programs, one at a time on a connection.
        front, match, rest = self.data.partition(b"\r\n\r\n")
        length = int(front.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if not match or len(rest) < length:
            return
        body, self.data = rest[:length], rest[length:]
        if front.startswith(b"GET"):
            self.transport.write(HEALTH_RESPONSE)
        elif b'"stream":true' not in body:  # of a prefill instance, too
            self.transport.write(PLAIN_RESPONSE)
        elif b'"apart"' in body:
            self.transport.write(FIRST_TOKEN)
            loop = asyncio.get_running_loop()
            loop.call_later(TOKEN_INTERVAL_S, self.transport.write, LATER_TOKENS)
        elif b'"paced"' in body or b'"stamped"' in body:
            self.transport.write(STREAM_START)
            self.is_stamped = b'"stamped"' in body
            PACED_STREAMS[self] = (STAMPED_PER_STREAM if self.is_stamped else TOKENS_PER_STREAM) - 1
        else:
            self.transport.write(STREAM_RESPONSE)

    def connection_lost(self, error: Exception | None) -> None:
        """Stop sending tokens on this connection."""
        PACED_STREAMS.pop(self, None)


PACED_STREAMS: Final[
    dict[InstantInstance, int]
] = {}  # tokens that each paced stream still has to get


def send_next_tokens() -> None:
    """One engine step: every running stream gets its token, as a batch of a real engine does."""
    # First: the pace does not depend on how long the writes below take.
    asyncio.get_running_loop().call_later(TOKEN_INTERVAL_S, send_next_tokens)
    # A copy: finished streams are deleted while it is walked.
    for one, left in list(PACED_STREAMS.items()):
        if left and one.is_stamped:
            one.transport.write(EVENT_CHUNK.replace(STAMP_PLACE, b"%020d" % time.monotonic_ns()))
        else:
            one.transport.write(EVENT_CHUNK if left else DONE_CHUNK)
        PACED_STREAMS[one] = left - 1
        if not left:
            del PACED_STREAMS[one]


class LoopingClient(asyncio.Protocol):
    """A connection that sends the next request as soon as a response is complete."""

    def __init__(self, request_bytes: bytes, events: int, remaining: Iterator[int]) -> None:
        self.request_bytes = request_bytes
        self.events = events
        self.remaining = remaining
        self.data = b""
        # A future for each connection: the first error ends the benchmark, by gather().
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the first time."""
        self.transport = cast(asyncio.Transport, transport)
        self.send_next_request()

    def send_next_request(self) -> None:
        """Send one more request, while there are any."""
        # One iterator for all connections: a fast one takes more requests, so that all end together.
        if next(self.remaining, None) is None:
            self.ended.set_result(None)
            self.transport.close()
            return
        # A trace ID per request: with the same for all, sampling and storage would see a single trace.
        parent = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01".encode()
        self.transport.write(self.request_bytes.replace(b"PARENT", parent))

    def data_received(self, data: bytes) -> None:
        """Look for the answer's end only: the client must cost little."""
        self.data = data if not self.data else self.data + data
        front, found, rest = self.data.partition(b"\r\n\r\n")
        if not found:
            return
        # Either a length, or chunks, whose end is the empty chunk.
        lower = front.lower()
        length = lower.partition(b"content-length:")[2].split(b"\r\n")[0]
        if not (len(rest) >= int(length) if length else rest.endswith(b"0\r\n\r\n")):
            return
        # A router that drops or changes events must not win: every event is counted.
        whole = (
            rest.count(EVENT) == self.events and (b"[DONE]" if self.events else PLAIN_BODY) in rest
        )
        if b" 200 " not in front[:16] or not whole:
            self.ended.set_exception(RuntimeError(f"not an answer: {self.data[:2000]!r}"))
            self.transport.abort()
            return
        self.data = b""
        self.send_next_request()

    def connection_lost(self, error: Exception | None) -> None:
        """A router may not close what it has not answered."""
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"the connection was cut: {error}"))


async def run_client_loop(
    url: str, body: bytes, events: int, number: int, connections: int
) -> None:
    """A closed loop of `number` requests, each answered with `events`, over `connections`."""
    target = BenchTarget.parse_url(url)
    headers = {"connection": "keep-alive", "traceparent": "PARENT"}
    request_bytes = target.encode_request(CHAT_PATH, body, headers)
    remaining = iter(range(number))
    loop = asyncio.get_running_loop()
    clients = [LoopingClient(request_bytes, events, remaining) for _ in range(connections)]
    for client in clients:
        await loop.create_connection(partial(_return_client, client), target.host, target.port)
    await asyncio.gather(*(client.ended for client in clients))


def _return_client(client: LoopingClient) -> LoopingClient:
    return client


async def serve_instance(port: int) -> None:
    """Run the instance until terminated."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(InstantInstance, "127.0.0.1", port)
    send_next_tokens()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve_instance(int(sys.argv[1])))
