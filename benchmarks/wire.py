# SPDX-License-Identifier: Apache-2.0
"""Both ends of the router's benchmark, on bare transports: an instance that answers at once, and a
closed loop of clients. router.py loads with the one; every router under test calls the other.

`python benchmarks/wire.py PORT` serves the instance, which swallows OTLP too.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import Final, cast

import uvloop

EVENTS: Final = 16
TOKENS: Final = 200
PACE: Final = 0.005  # seconds between two tokens of a paced stream
TIMING: Final = "receive;dur=0.100, prefill.compute;dur=0.200, ttft;dur=0.300"
# What vLLM's answers look like: 240 bytes an event, one HTTP chunk each.
EVENT: Final = (
    b'data: {"id":"chatcmpl-b5a8d2f1c37e4f7c9d3a6e1b2c4d5e6f","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"tiny","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
FIRST: Final = EVENT.replace(b'{"content":" word"}', b'{"role":"assistant","content":""}')
CHUNK: Final = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
DONE: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
PLAIN: Final = (
    b'{"id":"chatcmpl-b5a8d2f1c37e4f7c9d3a6e1b2c4d5e6f","object":"chat.completion","created":1700000000,'
    b'"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":" word"},'
    b'"finish_reason":"length"}],"usage":{"prompt_tokens":9,"total_tokens":10,"completion_tokens":1},'
    b'"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e",'
    b'"remote_block_ids":[[1]],"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}'
)
HEALTH: Final = b'{"object":"list","status":"ok","data":[{"id":"tiny","object":"model"}]}'


def head(kind: str, length: int | None) -> bytes:
    """An answer's head as vLLM's own servers write it, with the timing a traced leg gives."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return (
        f"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\nserver: uvicorn\r\n"
        f"Server-Timing: {TIMING}\r\nContent-Type: {kind}\r\n{size}\r\n\r\n"
    ).encode()


ANSWER: Final = head("application/json", len(PLAIN)) + PLAIN
ALIVE: Final = head("application/json", len(HEALTH)) + HEALTH
OPEN: Final = head("text/event-stream; charset=utf-8", None)
OPENED: Final = OPEN + b"%x\r\n%b\r\n" % (len(FIRST), FIRST)
STREAM: Final = OPENED + CHUNK * (EVENTS - 1) + DONE


class Instance(asyncio.Protocol):
    """Answers each request at once: plain, 16 events in one write, or a token every 5 ms."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self.transport, self.data = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        """Answer each complete request."""
        self.data += data
        front, found, rest = self.data.partition(b"\r\n\r\n")
        length = int(front.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if not found or len(rest) < length:
            return
        body, self.data = rest[:length], rest[length:]
        if front.startswith(b"GET"):
            self.transport.write(ALIVE)
        elif b'"paced"' in body:
            self.transport.write(OPENED)
            PACED[self] = TOKENS - 1
        else:
            self.transport.write(STREAM if b'"stream":true' in body else ANSWER)

    def connection_lost(self, error: Exception | None) -> None:
        """Nobody waits for its tokens any more."""
        PACED.pop(self, None)


PACED: Final[dict[Instance, int]] = {}  # tokens that each paced stream still has to get


def step() -> None:
    """One engine step: every running stream gets its token, as a batch of a real engine does."""
    asyncio.get_running_loop().call_later(PACE, step)
    for one, left in list(PACED.items()):
        one.transport.write(CHUNK if left else DONE)
        PACED[one] = left - 1
        if not left:
            del PACED[one]


class Client(asyncio.Protocol):
    """One connection that asks again as soon as it has the whole answer."""

    def __init__(self, asked: bytes, events: int, left: Iterator[int]) -> None:
        self.asked, self.events, self.left, self.data = asked, events, left, b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the first time."""
        self.transport = cast(asyncio.Transport, transport)
        self.ask()

    def ask(self) -> None:
        """Send one more request, while there are any."""
        if next(self.left, None) is None:
            self.ended.set_result(None)
            self.transport.close()
            return
        parent = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01".encode()
        self.transport.write(self.asked.replace(b"PARENT", parent))

    def data_received(self, data: bytes) -> None:
        """Look for the answer's end only: the client must cost little."""
        self.data = data if not self.data else self.data + data
        front, found, rest = self.data.partition(b"\r\n\r\n")
        if not found:
            return
        lower = front.lower()
        length = lower.partition(b"content-length:")[2].split(b"\r\n")[0]
        if not (len(rest) >= int(length) if length else rest.endswith(b"0\r\n\r\n")):
            return
        whole = rest.count(EVENT) == self.events and (b"[DONE]" if self.events else PLAIN) in rest
        if b" 200 " not in front[:16] or not whole:
            self.ended.set_exception(RuntimeError(f"not an answer: {self.data[:2000]!r}"))
            self.transport.abort()
            return
        self.data = b""
        self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        """A router may not close what it has not answered."""
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"the connection was cut: {error}"))


async def load(url: str, body: bytes, events: int, number: int, connections: int) -> None:
    """A closed loop of `number` requests, each answered with `events`, over `connections`."""
    host, _, port = url.removeprefix("http://").partition(":")
    asked = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: */*\r\n"
        f"User-Agent: bench\r\nContent-Type: application/json\r\ntraceparent: PARENT\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    left = iter(range(number))
    loop = asyncio.get_running_loop()
    clients = [Client(asked, events, left) for _ in range(connections)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, host, int(port))
    await asyncio.gather(*(client.ended for client in clients))


async def serve(port: int) -> None:
    """Be the instance until terminated."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Instance, "127.0.0.1", port)
    step()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
