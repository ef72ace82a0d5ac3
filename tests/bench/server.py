# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-style server that sleeps as scripted; tests start it as a process and read what it did.

Its notes (CLOCK_MONOTONIC, the benchmark's clock too) are the truth that reported numbers are held
against: on a busy machine a scripted delay is not the one that happened. A request came when the
kernel got it, not when this process found the time to read it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import monotonic_ns
from typing import Any

from ttft_otel import timing
from ttft_otel.bench.arrival import Stamped, noting

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"


@dataclass
class Script:
    """Milliseconds before the first token (in turn), how much of them is queue, then the stream.

    fail: what happens to the nth request: an HTTP status, "cut" after a token, "error" in the stream.
    context: as /v1/models names it. words: tokens of a word; 0: it does not tell token ids.
    """

    first: list[float] = field(default_factory=lambda: [30.0])
    queue: list[float] = field(default_factory=lambda: [10.0])
    tokens: int = 4
    gap: float = 10.0
    traced: bool = True
    split: bool = False
    usage: bool = True
    fail: dict[str, Any] = field(default_factory=dict)
    context: int = 100_000
    words: int = 1


class Fake:
    """One server: its script and its notes."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.notes: list[dict[str, Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        came = writer.get_extra_info("socket")._sock.came_ns
        line, *rest = head.strip().split("\r\n")
        headers = {
            name.lower(): value for name, _, value in (each.partition(": ") for each in rest)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        try:
            if line.startswith("GET /v1/models"):
                plain(writer, 200, {"data": [{"id": "fake", "max_model_len": self.script.context}]})
            elif line.startswith("GET"):
                plain(writer, 200, self.notes)
            else:
                await self.answer(writer, headers, json.loads(body), came)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def answer(
        self, writer: asyncio.StreamWriter, headers: dict[str, str], body: Any, came: int
    ) -> None:
        """Stream as scripted, and note what was written when."""
        if "return_token_ids" in body:
            self.learned(writer, body["prompt"].split())
            return
        number = len(self.notes)
        note: dict[str, Any] = {"headers": headers, "body": body, "came": came, "tokens": []}
        self.notes.append(note)
        fate = self.script.fail.get(str(number))
        if isinstance(fate, int):
            plain(writer, fate, {"error": {"message": f"{fate} as scripted"}})
            return
        first = self.script.first[number % len(self.script.first)]
        await sleep_until(came + int(first * 1e6))
        start = monotonic_ns()
        note["took_us"] = (start - came) // 1000
        writer.write(HEAD + self.header(number, note["took_us"]) + b"\r\n")
        if fate == "error":
            send(writer, {"error": {"message": "as scripted"}})
        for place in range(self.script.tokens):
            await sleep_until(start + int(place * self.script.gap * 1e6))
            note["tokens"].append(monotonic_ns())
            await self.token(writer, {"choices": [{"text": f"t{place} é"}]})
            if fate == "cut":
                return
        if self.script.usage:
            length = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
            usage = {"prompt_tokens": length, "completion_tokens": self.script.tokens}
            send(writer, {"choices": [], "usage": usage})
        chunk(writer, b"data: [DONE]\n\n")
        note["end"] = monotonic_ns()
        writer.write(b"0\r\n\r\n")

    def learned(self, writer: asyncio.StreamWriter, words: list[str]) -> None:
        """What the benchmark asks before its load; not noted."""
        count = len(words) * self.script.words
        if not count:
            plain(writer, 404, {"error": {"message": "no such path"}})
            return
        choice = {"text": "x", "prompt_token_ids": [300 + place for place in range(count)]}
        plain(writer, 200, {"choices": [choice], "usage": {"prompt_tokens": count}})

    def header(self, number: int, took: int) -> bytes:
        """The breakdown of what was really slept."""
        if not self.script.traced:
            return b""
        queue = min(took, int(self.script.queue[number % len(self.script.queue)] * 1000))
        parts = {"prefill.queue": queue, "prefill.compute": took - queue}
        return f"server-timing: {timing.write(parts, 0, took)}\r\n".encode()

    async def token(self, writer: asyncio.StreamWriter, event: Any) -> None:
        """One event; split: byte by byte, so that no boundary falls where a reader hopes for it."""
        data = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\r\n"
        for piece in (
            [data[at : at + 1] for at in range(len(data))] if self.script.split else [data]
        ):
            chunk(writer, piece)
            if self.script.split:
                await writer.drain()
                await asyncio.sleep(0)


def plain(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    """A JSON answer."""
    data = json.dumps(body).encode()
    kind = f"content-type: application/json\r\ncontent-length: {len(data)}"
    writer.write(f"HTTP/1.1 {status} X\r\n{kind}\r\n\r\n".encode() + data)


def send(writer: asyncio.StreamWriter, event: Any) -> None:
    """One event of the stream."""
    chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One HTTP chunk."""
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def sleep_until(at: int) -> None:
    """Sleep until a time of the monotonic clock."""
    await asyncio.sleep(max(0.0, (at - monotonic_ns()) / 1e9))


@dataclass
class Server:
    """A running one."""

    url: str

    def notes(self) -> list[dict[str, Any]]:
        """What it did so far, a request each."""
        with urllib.request.urlopen(f"{self.url}/notes") as answer:
            found: list[dict[str, Any]] = json.load(answer)
            return found


@contextmanager
def serving(script: Script | None = None) -> Iterator[Server]:
    """Start one on a free port of the loopback; stop it at the end."""
    words = [sys.executable, __file__, json.dumps(asdict(script or Script()))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield Server(f"http://127.0.0.1:{int(process.stdout.readline())}")
        finally:
            process.terminate()


class Listening(socket.socket):
    """Its connections know when the kernel got what they read."""

    def accept(self) -> tuple[Stamped, Any]:
        """The next one."""
        found, address = super().accept()
        sock = Stamped(fileno=found.detach())
        sock.setblocking(False)
        sock.stamp()
        return sock, address


async def main(script: Script) -> None:
    """Serve until killed; the port is the first line of the output."""
    listening = Listening()
    listening.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(Fake(script).serve, sock=listening, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
    with noting():
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Script(**json.loads(sys.argv[1]))))
