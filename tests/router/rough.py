# SPDX-License-Identifier: Apache-2.0
"""Both ends of the router without any HTTP library, so that they can do what none would do.

Instances that stall, break off or flood, as each request's `x-mood` asks them to; clients that leave
in the middle; and the router itself in a process of its own, whose memory and sockets can be counted.
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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from ttft_otel import clock

EVENT: Final = b'data: {"choices": [{"index": 0, "delta": {"content": "word"}}]}\n\n'
DONE: Final = b"data: [DONE]\n\n"
MODELS = b'{"object": "list", "data": [{"id": "tiny"}]}'
PLAIN: Final = (
    b'{"id": "a", "model": "tiny", "choices": [{"index": 0, "message": {"content": "42"}, "text": "42",'
    b' "finish_reason": "length", "token_ids": [7]}], "prompt_token_ids": [1, 2, 3],'
    b' "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},'
    b' "kv_transfer_params": {"do_remote_prefill": true, "do_remote_decode": false,'
    b' "remote_engine_id": "e", "remote_block_ids": [[1]], "remote_host": "h", "remote_port": 1}}'
)
STREAMED: Final = ("torn", "endless", "flood")
BLOCK: Final = 64 << 10  # bytes of one chunk of a flood
_TIMING: Final = "receive;dur=0.100, prefill.compute;dur=0.200, ttft;dur=0.300"


def frame(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def head(status: int, length: int | None) -> bytes:
    """An answer's head; without a length it comes in chunks."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    kind = "text/event-stream" if length is None else "application/json"
    return (
        f"HTTP/1.1 {status} OK\r\nServer-Timing: {_TIMING}\r\nContent-Type: {kind}\r\n{size}\r\n\r\n"
    ).encode()


class Instance:
    """A server that does what the header `x-mood` of each request says; counts what it sees."""

    def __init__(self) -> None:
        self.url = ""
        self.seen: Counter[str] = Counter()
        self.left: dict[str, int] = {}  # when the connection of each x-request-id was closed on it
        self.written = 0  # bytes of floods that the sockets took
        self.open: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.open.add(writer)
        try:
            while True:
                front = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = int(re.findall(r"content-length: (\d+)", front + "content-length: 0")[0])
                body = await reader.readexactly(length)
                mood = (*re.findall(r"x-mood: (\w+)", front), "ok")[0]
                self.seen[mood] += 1
                name = (*re.findall(r"x-request-id: (\S+)", front), "")[0]
                compact = body.replace(b" ", b"")
                stream = b'"stream":true' in compact
                if mood in STREAMED and b'"do_remote_decode":true' in compact:
                    mood = "ok"  # a prefill answers with one token; what is meant is D's stream
                if front.startswith("get /v1/models"):
                    writer.write(head(200, len(MODELS)) + MODELS)
                elif mood == "echo":  # nonsense for an answer, where the request was nonsense
                    writer.write(head(200, None if stream else len(body)))
                    writer.write(frame(body) + b"0\r\n\r\n" if stream else body)
                else:
                    await self.answer(mood, name, stream, reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()

    async def answer(
        self,
        mood: str,
        name: str,
        stream: bool,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Do as the mood says."""
        if mood in ("error", "busy"):
            writer.write(head(500 if mood == "error" else 503, 2) + b"{}")
        elif mood == "cut":
            writer.transport.abort()
        elif mood == "torn":
            writer.write(head(200, None) + frame(EVENT) * 3)
            writer.transport.abort()
        elif mood in ("late", "endless"):
            if mood == "endless":
                writer.write(head(200, None) + frame(EVENT))
            await reader.read(1)  # until the router leaves
            self.left[name] = clock.now()
            raise ConnectionResetError
        elif mood == "flood":
            writer.write(head(200, None))
            while True:
                writer.write(frame(b"." * BLOCK))
                await writer.drain()
                self.written += BLOCK
        elif stream:
            writer.write(head(200, None) + frame(EVENT) * 3 + frame(DONE) + b"0\r\n\r\n")
        else:
            writer.write(head(200, len(PLAIN)) + PLAIN)


@contextlib.asynccontextmanager
async def instance() -> AsyncIterator[Instance]:
    """A running Instance."""
    made = Instance()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        for writer in list(made.open):
            writer.transport.abort()
        await asyncio.sleep(0.05)


def request(
    mood: str = "ok",
    body: bytes = b'{"model": "tiny", "messages": []}',
    path: str = "/v1/chat/completions",
    name: str = "",
) -> bytes:
    """The bytes of one POST."""
    named = f"x-request-id: {name}\r\n" if name else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
        f"x-mood: {mood}\r\n{named}Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


async def ask(url: str, data: bytes, most: int | None = None, patience: float = 10.0) -> bytes:
    """Send these bytes; read one whole answer, or leave after at most `most` bytes, with a reset."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    got = b""
    try:
        writer.write(data)
        while not (whole(got) or (most is not None and len(got) >= most)):
            more = await asyncio.wait_for(reader.read(65536), patience)
            if not more:
                break
            got += more
    except ConnectionError:
        pass
    finally:
        if most is not None:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    return got


def whole(got: bytes) -> bool:
    """Whether this is a complete answer."""
    front, found, rest = got.partition(b"\r\n\r\n")
    length = re.findall(rb"(?i)content-length: (\d+)", front)
    return bool(found) and (len(rest) >= int(length[0]) if length else rest.endswith(b"0\r\n\r\n"))


def status(got: bytes) -> int:
    """The status of an answer; 0 when there is none."""
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", got)
    return int(found[1]) if found else 0


class Process:
    """The router in a process of its own, from outside."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid

    def memory(self) -> int:
        """Bytes of memory that it holds itself."""
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        return sum(int(kilo) << 10 for kilo in re.findall(r"Private_\w+: +(\d+) kB", text))

    def files(self) -> int:
        """File descriptors that it has open, sockets among them."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    async def metrics(self, name: str) -> list[float]:
        """The values of one metric."""
        got = await ask(self.url, b"GET /metrics HTTP/1.1\r\nHost: router\r\n\r\n")
        lines = [line for line in got.decode().splitlines() if re.match(rf"{name}[{{ ]", line)]
        return [float(line.split()[-1]) for line in lines]


@contextlib.asynccontextmanager
async def process(*flags: str, log: Path | None = None, **env: str) -> AsyncIterator[Process]:
    """The command as its users start it, until it is told to stop; it must then end in order.

    `log` gets what it writes to stderr.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    code = "from ttft_otel.router.command import command; command()"
    with contextlib.ExitStack() as stack:
        made = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, "--port", port, *flags),
            env={**os.environ, "TTFT_OTEL": "0", **env},
            stderr=stack.enter_context(log.open("wb")) if log else None,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(2400):
            with contextlib.suppress(OSError):
                if status(await ask(url, b"GET /healthz HTTP/1.1\r\nHost: router\r\n\r\n")) == 200:
                    break
            await asyncio.sleep(0.05)
        yield Process(url, made.pid)
        made.terminate()
        assert await asyncio.wait_for(made.wait(), 45) == 0
    finally:
        if made.returncode is None:
            made.kill()
            await made.wait()
