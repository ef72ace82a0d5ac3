# SPDX-License-Identifier: Apache-2.0
"""Misbehaving clients and instances on raw sockets, and the router in a process of its own.

Instances stall, break off or flood, as the header `x-mood` of each request says; clients disconnect in
the middle. The memory and sockets of the router process can be measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

from ttft_otel.tracing import clock

EVENT_BYTES: Final = b'data: {"choices": [{"index": 0, "delta": {"content": "word"}}]}\n\n'
HEALTHZ: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
DONE_BYTES: Final = b"data: [DONE]\n\n"
MODELS_BODY = b'{"object": "list", "data": [{"id": "tiny"}]}'
ANSWER_BODY: Final = (
    b'{"id": "a", "model": "tiny", "choices": [{"index": 0, "message": {"content": "42"}, "text": "42",'
    b' "finish_reason": "length", "token_ids": [7]}], "prompt_token_ids": [1, 2, 3],'
    b' "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},'
    b' "kv_transfer_params": {"do_remote_prefill": true, "do_remote_decode": false,'
    b' "remote_engine_id": "e", "remote_block_ids": [[1]], "remote_host": "h", "remote_port": 1}}'
)
STREAM_MOODS: Final = ("torn", "endless", "flood")
FLOOD_CHUNK_BYTES: Final = 64 << 10  # bytes of one chunk of a flood
_SERVER_TIMING: Final = "receive;dur=0.100, prefill.compute;dur=0.200, ttft;dur=0.300"


def encode_chunk(data: bytes) -> bytes:
    """Encode `data` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def encode_head(status: int, length: int | None) -> bytes:
    """Encode status line and headers; chunked if `length` is None."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    kind = "text/event-stream" if length is None else "application/json"
    return (
        f"HTTP/1.1 {status} OK\r\nServer-Timing: {_SERVER_TIMING}\r\nContent-Type: {kind}\r\n{size}\r\n\r\n"
    ).encode()


class RawInstance:
    """A server that behaves as the header `x-mood` of each request says, and counts requests."""

    def __init__(self) -> None:
        self.url = ""
        self.mood_counts: Counter[str] = Counter()
        self.closed_us: dict[
            str, int
        ] = {}  # when the connection of each x-request-id was closed on it
        self.flood_bytes = 0  # bytes of floods that the sockets took
        self.open_writers: set[asyncio.StreamWriter] = set()

    async def handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection."""
        self.open_writers.add(writer)
        try:
            while True:
                head_text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = int(
                    re.findall(r"content-length: (\d+)", head_text + "content-length: 0")[0]
                )
                body = await reader.readexactly(length)
                mood = (*re.findall(r"x-mood: (\w+)", head_text), "ok")[0]
                self.mood_counts[mood] += 1
                request_id = (*re.findall(r"x-request-id: (\S+)", head_text), "")[0]
                compact = body.replace(b" ", b"")
                is_stream = b'"stream":true' in compact
                if mood in STREAM_MOODS and b'"do_remote_decode":true' in compact:
                    mood = "ok"  # a prefill has no stream: the mood is meant for D
                if head_text.startswith("get /v1/models"):
                    writer.write(encode_head(200, len(MODELS_BODY)) + MODELS_BODY)
                elif (
                    mood == "echo"
                ):  # responds with the body of the request, which may be malformed
                    writer.write(encode_head(200, None if is_stream else len(body)))
                    writer.write(encode_chunk(body) + b"0\r\n\r\n" if is_stream else body)
                else:
                    await self.answer_request(mood, request_id, is_stream, reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.open_writers.discard(writer)
            writer.close()

    async def answer_request(
        self,
        mood: str,
        request_id: str,
        is_stream: bool,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Respond as `mood` says."""
        if mood in ("error", "busy"):
            writer.write(encode_head(500 if mood == "error" else 503, 2) + b"{}")
        elif mood == "cut":
            writer.transport.abort()
        elif mood == "torn":
            writer.write(encode_head(200, None) + encode_chunk(EVENT_BYTES) * 3)
            writer.transport.abort()
        elif mood in ("late", "endless"):
            if mood == "endless":
                writer.write(encode_head(200, None) + encode_chunk(EVENT_BYTES))
            await reader.read(1)  # until the router closes the connection
            self.closed_us[request_id] = clock.now_us()
            raise ConnectionResetError
        elif mood == "flood":
            writer.write(encode_head(200, None))
            while True:
                writer.write(encode_chunk(b"." * FLOOD_CHUNK_BYTES))
                await writer.drain()
                self.flood_bytes += FLOOD_CHUNK_BYTES
        elif is_stream:
            writer.write(
                encode_head(200, None)
                + encode_chunk(EVENT_BYTES) * 3
                + encode_chunk(DONE_BYTES)
                + b"0\r\n\r\n"
            )
        else:
            writer.write(encode_head(200, len(ANSWER_BODY)) + ANSWER_BODY)


@contextlib.asynccontextmanager
async def listen(
    handle_connection: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Accept connections on the loopback; gives the URL."""
    server = await asyncio.start_server(handle_connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextlib.asynccontextmanager
async def run_instance() -> AsyncIterator[RawInstance]:
    """Run a RawInstance."""
    raw_instance = RawInstance()
    try:
        async with listen(raw_instance.handle_connection) as raw_instance.url:
            yield raw_instance
    finally:
        for writer in list(raw_instance.open_writers):
            writer.transport.abort()
        await asyncio.sleep(0.05)


def encode_request(
    mood: str = "ok",
    body: bytes = b'{"model": "tiny", "messages": []}',
    path: str = "/v1/chat/completions",
    request_id: str = "",
) -> bytes:
    """Encode a POST request with the header `x-mood`."""
    request_id_line = f"x-request-id: {request_id}\r\n" if request_id else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"x-mood: {mood}\r\n{request_id_line}Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


async def send_bytes(
    url: str, data: bytes, max_bytes: int | None = None, timeout_s: float = 10.0
) -> bytes:
    """Send `data` and read one response; with `max_bytes`, reset the connection after so many bytes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    response = b""
    try:
        writer.write(data)
        while not (is_complete(response) or (max_bytes is not None and len(response) >= max_bytes)):
            piece = await asyncio.wait_for(reader.read(65536), timeout_s)
            if not piece:
                break
            response += piece
    except ConnectionError:
        pass
    finally:
        if max_bytes is not None:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    return response


def is_complete(response: bytes) -> bool:
    """Whether `response` is complete."""
    head_bytes, has_body, rest = response.partition(b"\r\n\r\n")
    length = re.findall(rb"(?i)content-length: (\d+)", head_bytes)
    return bool(has_body) and (
        len(rest) >= int(length[0]) if length else rest.endswith(b"0\r\n\r\n")
    )


def parse_status(response: bytes) -> int:
    """The status of `response`; 0 if it has none."""
    match = re.match(rb"HTTP/1\.1 (\d{3}) ", response)
    return int(match[1]) if match else 0


class RouterProcess:
    """A running router process."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid

    def measure_memory_bytes(self) -> int:
        """Private memory of the process in bytes."""
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        return sum(int(kilo) << 10 for kilo in re.findall(r"Private_\w+: +(\d+) kB", text))

    def count_open_files(self) -> int:
        """Number of open file descriptors, sockets included."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    async def read_metric(self, name: str) -> list[float]:
        """The values of the metric `name`, one per series."""
        response = await send_bytes(self.url, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        lines = [line for line in response.decode().splitlines() if re.match(rf"{name}[{{ ]", line)]
        return [float(line.split()[-1]) for line in lines]


@contextlib.asynccontextmanager
async def run_router_process(
    *flags: str, log: Path | None = None, max_files: tuple[int, int] | None = None, **env: str
) -> AsyncIterator[RouterProcess]:
    """Run the router command with these `flags`; at the end it is stopped and must exit with 0.

    log: file for its stderr. max_files: soft and hard limit of its file descriptors at start.
    env: added to the environment.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    code = "from ttft_otel.commands.router.command import command; command()"
    if max_files is not None:
        limit = f"resource.setrlimit(resource.RLIMIT_NOFILE, {max_files})"
        code = f"import resource; {limit}; {code}"
    with contextlib.ExitStack() as stack:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, "--port", port, *flags),
            env={**os.environ, "TTFT_OTEL": "0", **env},
            stderr=stack.enter_context(log.open("wb")) if log else None,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(2400):
            with contextlib.suppress(OSError):
                response = await send_bytes(url, HEALTHZ)
                if parse_status(response) == 200:
                    break
            await asyncio.sleep(0.05)
        yield RouterProcess(url, child.pid)
        with contextlib.suppress(ProcessLookupError):  # a test may have told it to stop
            child.terminate()
        assert await asyncio.wait_for(child.wait(), 45) == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
