# SPDX-License-Identifier: Apache-2.0
"""Instances on raw sockets that break off, stall or answer nonsense, as their `fault` says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
from collections.abc import AsyncIterator
from typing import Final

from router import raw_http
from router.fake_instances import open_listening_socket

SLOW_S: Final = 0.3  # seconds that a slow answer takes to begin
HUGE_HEADER_BYTES: Final = 200_000
TEXT: Final = "Hel"  # the first token, of P and of D
FAULTS: Final = (
    "refused",
    "reset before head",
    "half head",
    "half body",
    "garbage",
    "huge headers",
    "slow first byte",
    "hangs",
    "hangs after head",
    "status 500",
    "status 503",
    "content length too long",
    "content length too short",
    "closes kept connections",
    "endless interim answers",
    "status 000",
    "status 600",
    "status 304 with a length",
)
_KV_PARAMS: Final = {"do_remote_prefill": True, "remote_request_id": "r", "remote_host": "h"}
_USAGE: Final = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def build_plain_body(asks_to_keep: bool) -> bytes:
    """A whole answer of one token; `asks_to_keep`: with the parameters of KV blocks that are kept."""
    message = {"role": "assistant", "content": TEXT}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    answer = {"id": "a", "created": 1, "model": "tiny", "choices": [choice], "usage": _USAGE}
    return json.dumps(
        answer | {"kv_transfer_params": _KV_PARAMS if asks_to_keep else None}
    ).encode()


def build_stream_chunks() -> list[bytes]:
    """The events of a stream of two tokens."""
    events = [
        {"id": "a", "created": 1, "model": "tiny", "choices": [{"index": 0, "delta": delta}]}
        for delta in ({"role": "assistant", "content": ""}, {"content": TEXT}, {"content": "lo"})
    ]
    return [
        *(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events),
        b"data: [DONE]\n\n",
    ]


def encode_head(status: int, kind: str, *more: str) -> bytes:
    """Status line and headers."""
    lines = (f"HTTP/1.1 {status:03} X", f"Content-Type: {kind}", *more)
    return "\r\n".join((*lines, "", "")).encode()


class FaultyInstance:
    """Answers as vLLM does, health probes always, but POST requests with its `fault` ("": none)."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.url, self.received_count = fault, "", 0
        self._connections: dict[asyncio.Task[object], asyncio.StreamWriter] = {}

    async def handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection until it is closed.

        Probes close theirs, so that requests begin on new ones.
        """
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        answered_count = 0
        try:
            while True:
                head_text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                (length, *_) = re.findall(r"content-length: (\d+)", head_text + "content-length: 0")
                body = (await reader.readexactly(int(length))).replace(b" ", b"")
                if head_text.startswith("get"):
                    self._write_plain(writer, b'{"object": "list", "data": [{"id": "tiny"}]}')
                    raise ConnectionResetError
                self.received_count += 1
                if self.fault == "closes kept connections" and answered_count:
                    raise ConnectionResetError
                await self._answer_request(body, writer)
                answered_count += 1
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass
        finally:
            del self._connections[task]
            writer.close()

    def _write_plain(self, writer: asyncio.StreamWriter, body: bytes, status: int = 200) -> None:
        writer.write(encode_head(status, "application/json", f"Content-Length: {len(body)}") + body)

    async def _answer_request(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        fault, is_stream = self.fault, b'"stream":true' in body
        kind = "text/event-stream" if is_stream else "application/json"
        chunks = (
            build_stream_chunks()
            if is_stream
            else [build_plain_body(b'"do_remote_decode":true' in body)]
        )
        data = b"".join(chunks)
        if fault in ("half head", "reset before head", "garbage"):
            if fault == "reset before head":
                linger = struct.pack("ii", 1, 0)
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            else:
                writer.write(
                    b"HTTP/1.1 200 X\r\nConte" if fault == "half head" else b"\0\xffwhat?\r\n"
                )
            raise ConnectionResetError
        if fault == "endless interim answers":
            while True:
                writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" * 1000)
                await writer.drain()
        if fault == "status 304 with a length":
            writer.write(encode_head(304, kind, "Content-Length: 9"))
            return
        if fault.startswith("status"):
            self._write_plain(writer, b'{"error": {"message": "no"}}', int(fault[-3:]))
            return
        if fault == "slow first byte":
            await asyncio.sleep(SLOW_S)
        elif fault == "hangs":
            await asyncio.Event().wait()
        if fault.startswith("content length") or not is_stream:
            wrong_bytes = {"content length too long": 20, "content length too short": -20}
            size = f"Content-Length: {len(data) + wrong_bytes.get(fault, 0)}"
        else:
            size = "Transfer-Encoding: chunked"
            chunks = [b"%x\r\n%b\r\n" % (len(each), each) for each in chunks] + [b"0\r\n\r\n"]
            data = b"".join(chunks)
        big = f"X-Big: {'x' * HUGE_HEADER_BYTES}" if fault == "huge headers" else "X-Big: no"
        writer.write(encode_head(200, kind, size, big))
        if fault == "hangs after head":
            await asyncio.Event().wait()
        if fault == "half body":
            writer.write(data[: len(data) // 2])
            await writer.drain()
            raise ConnectionResetError
        writer.write(data)
        await writer.drain()

    async def abort_connections(self) -> None:
        """Abort what is open."""
        for writer in self._connections.values():
            writer.transport.abort()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def run_instance(fault: str = "") -> AsyncIterator[FaultyInstance]:
    """A running FaultyInstance; nothing listens for one whose fault is "refused"."""
    instance = FaultyInstance(fault)
    if fault == "refused":
        with open_listening_socket() as sock:  # bound, so that nobody else gets the port
            instance.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            yield instance
        return
    try:
        async with raw_http.listen(instance.handle_connection) as instance.url:
            yield instance
    finally:
        await instance.abort_connections()
