# SPDX-License-Identifier: Apache-2.0
"""Misbehaving clients and instances on raw sockets, and the router in a process of its own.

Instances break off, stall, flood or answer nonsense, always or as a request says; clients disconnect in
the middle. The memory and sockets of the router process can be measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

from lab.fake_vllm.instances import open_listening_socket

HEALTHZ: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
MODELS_BODY: Final = b'{"object": "list", "data": [{"id": "tiny"}]}'
# Of POST requests; probes are answered always.
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
STREAM_FAULTS: Final = ("half body", "hangs in stream", "flood")
SLOW_S: Final = 0.3  # seconds that a slow answer takes to begin
FLOOD_CHUNK_BYTES: Final = 64 << 10  # bytes of one chunk of a flood
_HEADERS: Final = "Server-Timing: receive;dur=0.100, prefill.compute;dur=0.200, ttft;dur=0.300\r\n"
_TEXT: Final = "Hel"  # the first token, of P and of D
_KV_PARAMS: Final = {"do_remote_prefill": True, "remote_request_id": "r", "remote_host": "h"}
_USAGE: Final = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def build_plain_body(asks_to_keep: bool) -> bytes:
    """A whole answer of one token; `asks_to_keep`: with the parameters of KV blocks that are kept."""
    message = {"role": "assistant", "content": _TEXT}
    choice = {"index": 0, "message": message, "text": _TEXT, "finish_reason": "length"}
    answer = {"id": "a", "created": 1, "model": "tiny", "choices": [choice], "usage": _USAGE}
    return json.dumps(
        answer | {"kv_transfer_params": _KV_PARAMS if asks_to_keep else None}
    ).encode()


def build_event(delta: dict[str, str]) -> bytes:
    """An event of a stream."""
    choices = [{"index": 0, "delta": delta}]
    event = {"id": "a", "created": 1, "model": "tiny", "choices": choices}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


EVENT_BYTES: Final = build_event({"content": _TEXT})
ROLE_EVENT: Final = build_event({"role": "assistant", "content": ""})
STREAM: Final = (ROLE_EVENT, EVENT_BYTES, build_event({"content": "lo"}), b"data: [DONE]\n\n")


def encode_chunk(data: bytes) -> bytes:
    """Encode `data` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def encode_head(status: int, length: int | None, more: str = "") -> bytes:
    """Encode status line and headers; chunked if `length` is None. more: header lines."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    kind = "text/event-stream" if length is None else "application/json"
    lines = f"HTTP/1.1 {status:03} OK\r\n{_HEADERS}Content-Type: {kind}\r\n{more}{size}\r\n\r\n"
    return lines.encode()


def reset_at_close(writer: asyncio.StreamWriter) -> None:
    """Let the connection end with a reset, not with a goodbye."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


class RawInstance:
    """Answers as vLLM does, but POST requests with the fault of their header `x-mood`, or else its own.

    fault: of FAULTS, or of STREAM_FAULTS, of which a "flood" has no end; "echo" for the request's body; ""
    for none.
    """

    def __init__(self, fault: str = "") -> None:
        self.fault, self.url = fault, ""
        self.mood_counts: Counter[str] = Counter()  # POST requests by fault
        self.flood_bytes = 0  # bytes of floods that the sockets took
        self._connections: dict[asyncio.Task[object], asyncio.StreamWriter] = {}

    async def handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection until it is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        answered_count = 0
        try:
            while True:
                head_text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                (length, *_) = re.findall(r"content-length: (\d+)", head_text + "content-length: 0")
                body = await reader.readexactly(int(length))
                if head_text.startswith("get"):
                    writer.write(encode_head(200, len(MODELS_BODY)) + MODELS_BODY)
                    # Requests to one with a fault begin on new connections.
                    if self.fault:
                        raise ConnectionResetError
                    continue
                (fault, *_) = re.findall(r"x-mood: ([\w ]*)", head_text + f"x-mood: {self.fault}")
                asks_to_keep = b'"do_remote_decode":true' in body.replace(b" ", b"")
                if asks_to_keep and not self.fault and fault in STREAM_FAULTS:
                    fault = ""  # a prefill has no stream: it is meant for D
                self.mood_counts[fault] += 1
                if fault == "closes kept connections" and answered_count:
                    raise ConnectionResetError
                await self._answer_request(fault, body, asks_to_keep, reader, writer)
                answered_count += 1
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass
        finally:
            del self._connections[task]
            writer.close()

    async def _answer_request(
        self,
        fault: str,
        body: bytes,
        asks_to_keep: bool,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        is_stream = b'"stream":true' in body.replace(b" ", b"")
        if fault == "reset before head":
            reset_at_close(writer)
            raise ConnectionResetError
        if fault in ("half head", "garbage"):
            writer.write(b"HTTP/1.1 200 X\r\nConte" if fault == "half head" else b"\0\xffwhat?\r\n")
            raise ConnectionResetError
        while fault == "endless interim answers":
            writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" * 1000)
            await writer.drain()
        if fault == "status 304 with a length":
            writer.write(encode_head(304, 9))
            return
        if fault.startswith("status"):
            error = b'{"error": {"message": "no"}}'
            writer.write(encode_head(int(fault[-3:]), len(error)) + error)
            return
        if fault == "slow first byte":
            await asyncio.sleep(SLOW_S)
        if fault == "hangs":
            await reader.read(1)  # until the router closes the connection
            raise ConnectionResetError
        data = body if fault == "echo" else b"".join(STREAM)  # an echo may be malformed
        if not is_stream:
            data = body if fault == "echo" else build_plain_body(asks_to_keep)
        length = None if is_stream else len(data)
        if fault.startswith("content length"):
            length = len(data) + (20 if fault.endswith("long") else -20)
        if length is None:
            parts = [data] if fault == "echo" else STREAM
            data = b"".join(map(encode_chunk, parts)) + encode_chunk(b"")
        writer.write(
            encode_head(200, length, f"X-Big: {'x' * 200_000}\r\n" * (fault == "huge headers"))
        )
        if fault.startswith("hangs"):
            writer.write(encode_chunk(EVENT_BYTES) if fault == "hangs in stream" else b"")
            await reader.read(1)
            raise ConnectionResetError
        while fault == "flood":
            writer.write(encode_chunk(b"." * FLOOD_CHUNK_BYTES))
            await writer.drain()
            self.flood_bytes += FLOOD_CHUNK_BYTES
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
async def run_instance(fault: str = "") -> AsyncIterator[RawInstance]:
    """A running RawInstance; nothing listens for one whose fault is "refused"."""
    instance = RawInstance(fault)
    if fault == "refused":
        with open_listening_socket() as sock:  # bound, so that nobody else gets the port
            instance.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            yield instance
        return
    try:
        async with listen(instance.handle_connection) as instance.url:
            yield instance
    finally:
        await instance.abort_connections()


def encode_request(
    mood: str = "",
    body: bytes = b'{"model": "tiny", "messages": []}',
    path: str = "/v1/chat/completions",
) -> bytes:
    """Encode a POST request with the header `x-mood`."""
    mood_line = f"x-mood: {mood}\r\n" if mood else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{mood_line}Content-Length: {len(body)}\r\n\r\n"
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
            reset_at_close(writer)
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
