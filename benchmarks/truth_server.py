# SPDX-License-Identifier: Apache-2.0
"""A server whose times are known: benchmarks/peer_clients.py starts it, and reads its notes at GET /notes.

A request came when the kernel got its last byte; a token was sent at the time right before the write. Without
an argument it is a fake vLLM: answers have as many tokens as asked for, first tokens come after 20 to 100 ms
in turn, later ones every 10 ms. With the URL of a real one the answers are those of that server, passed on as
they come: what is noted is still when this process got a request and wrote a token.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from time import monotonic_ns
from typing import Any
from urllib.parse import urlsplit

from ttft_otel.bench.http_exchange import TimestampedSocket, keep_timestamps_enabled, sleep_until

FIRST_TOKEN_MS = (20, 40, 60, 80, 100)
GAP_MS = 10
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

notes: list[dict[str, Any]] = []


class StampingListener(socket.socket):
    """A listener whose connections have the kernel's times of arrival."""

    def accept(self) -> tuple[TimestampedSocket, Any]:
        """Accept the next connection."""
        accepted, address = super().accept()
        sock = TimestampedSocket(fileno=accepted.detach())
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.enable_timestamps()
        return sock, address


async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection, one after the other."""
    sock = writer.get_extra_info("socket")._sock
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            lengths = [each[15:] for each in head if each.lower().startswith("content-length:")]
            body = await reader.readexactly(int(lengths[0]) if lengths else 0)
            came_ns = sock.last_byte_ns
            if len(sys.argv) > 1 and not head[0].startswith("GET /notes"):
                await pass_on(writer, head, body, came_ns)
            else:
                await answer_request(writer, head[0], json.loads(body or b"{}"), came_ns)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def answer_request(
    writer: asyncio.StreamWriter, line: str, body: dict[str, Any], came_ns: int
) -> None:
    """Answer one request, and note a streamed one."""
    if line.startswith("GET /notes"):
        write_json(writer, notes)
        notes.clear()
    elif line.startswith("GET"):
        write_json(writer, {"data": [{"id": "tiny", "object": "model", "max_model_len": 100_000}]})
    elif not body.get("stream"):
        count = len(str(body.get("prompt", "")).split()) or 1
        choice = {"index": 0, "text": "x", "message": {"role": "assistant", "content": "x"}}
        choice["prompt_token_ids"] = list(range(300, 300 + count))
        usage = {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1}
        write_json(writer, {"id": "c", "model": "tiny", "choices": [choice], "usage": usage})
    else:
        await stream_answer(writer, "chat" in line, body, came_ns)


async def stream_answer(
    writer: asyncio.StreamWriter, is_chat: bool, body: dict[str, Any], came_ns: int
) -> None:
    """Stream tokens in time."""
    count = body.get("max_tokens") or body.get("max_completion_tokens") or 8
    kind = {"object": "chat.completion.chunk" if is_chat else "text_completion"}
    kind |= {"id": "c", "model": "tiny"}
    note: dict[str, Any] = {"came": came_ns, "tokens": []}
    notes.append(note)
    first_ns = came_ns + FIRST_TOKEN_MS[len(notes) % len(FIRST_TOKEN_MS)] * 1_000_000
    for place in range(count):
        await sleep_until(first_ns + place * GAP_MS * 1_000_000)
        content = {"delta": {"content": " a"}} if is_chat else {"text": " a"}
        finish = "length" if place == count - 1 else None
        event = {**kind, "choices": [{"index": 0, **content, "finish_reason": finish}]}
        data = encode_event(event)
        note["tokens"].append(monotonic_ns())
        writer.write(data if place else HEAD + data)
    usage = {"prompt_tokens": 8, "completion_tokens": count, "total_tokens": count + 8}
    end = encode_event({**kind, "choices": [], "usage": usage})
    writer.write(end + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def pass_on(writer: asyncio.StreamWriter, head: list[str], body: bytes, came_ns: int) -> None:
    """Have the real server answer one request, and note a streamed one."""
    upstream = urlsplit(sys.argv[1])
    reader, upstream_writer = await asyncio.open_connection(upstream.hostname, upstream.port)
    # One request for each connection to the server: its end is that of the answer.
    lines = [line for line in head if line and not line.lower().startswith("connection:")]
    upstream_writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)
    note: dict[str, Any] = {"came": came_ns, "tokens": []}
    if b'"stream": true' in body or b'"stream":true' in body:
        notes.append(note)
    unread = b""
    try:
        while data := await reader.read(65536):
            *complete, unread = (unread + data).split(b"\n")
            now_ns = monotonic_ns()
            note["tokens"] += [now_ns for line in complete if has_token(line)]
            # The client's connection stays open, as the server's would.
            writer.write(data.replace(b"connection: close\r\n", b""))
    finally:
        upstream_writer.close()


def has_token(line: bytes) -> bool:
    """Whether a line of a stream is an event with a token: no role alone, no count of tokens."""
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[6:]).get("choices")
    return bool(choices) and "role" not in choices[0].get("delta", {})


def encode_event(event: Any) -> bytes:
    """One event as an HTTP chunk."""
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def write_json(writer: asyncio.StreamWriter, body: Any, status: int = 200) -> None:
    """A JSON answer."""
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data)


async def serve_stamped(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    """Serve until killed; the port is the first line of the output."""
    listener = StampingListener()
    listener.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(serve, sock=listener, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    with keep_timestamps_enabled():
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve_stamped(serve_connection))
