# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-style server with scripted delays; tests start it as a process and read its notes.

Its notes (CLOCK_MONOTONIC, the benchmark's clock too) are the truth that reported numbers are held
against: on a busy machine a scripted delay is not the one that happened. A request came when the
kernel got it, not when this process found the time to read it.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic_ns
from typing import Any

from benchmarks.truth_server import encode_event, serve_stamped, write_json
from ttft_otel.bench.http_exchange import sleep_until
from ttft_otel.model import timing

ROOT = Path(__file__).parents[2]
RESPONSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
)


@dataclass
class ServerScript:
    """Delays in milliseconds before the first token (used in turn), the queue's share, and the stream.

    failures: what happens to the nth request: an HTTP status, "cut" after a token, "error" in the stream.
    has_queue: one request after the other, each for its first_token_ms; who leaves is not served.
    context_tokens: as /v1/models names it. tokens_per_word: 0 means that it tells neither ids nor counts.
    """

    first_token_ms: list[float] = field(default_factory=lambda: [30.0])
    queue_ms: list[float] = field(default_factory=lambda: [10.0])
    token_count: int = 4
    gap_ms: float = 10.0
    sends_timing: bool = True
    reports_usage: bool = True
    failures: dict[str, Any] = field(default_factory=dict)
    context_tokens: int = 100_000
    tokens_per_word: int = 1
    has_queue: bool = False


class ScriptedStreamServer:
    """A server with its script; notes what it did, by CLOCK_MONOTONIC."""

    def __init__(self, script: ServerScript) -> None:
        self.script = script
        self.notes: list[dict[str, Any]] = []
        self.turn = asyncio.Lock()
        self.free_ns = 0

    async def stream_answer(
        self, writer: asyncio.StreamWriter, headers: dict[str, str], body: Any, received_ns: int
    ) -> None:
        """Stream as scripted, and note what was written when."""
        if "return_token_ids" in body:
            self.answer_discovery(writer, body["prompt"].split())
            return
        number = len(self.notes)
        note: dict[str, Any] = {"headers": headers, "body": body, "came": received_ns, "tokens": []}
        self.notes.append(note)
        failure = self.script.failures.get(str(number))
        if isinstance(failure, int):
            write_json(writer, {"error": {"message": f"{failure} as scripted"}}, failure)
            return
        first_token_ms = self.script.first_token_ms[number % len(self.script.first_token_ms)]
        if self.script.has_queue:
            async with self.turn:
                if writer.is_closing():
                    return
                # From when the one before should have ended: sleeps that end late do not add up.
                note["began"] = max(received_ns, self.free_ns)
                self.free_ns = note["began"] + int(first_token_ms * 1e6)
                await sleep_until(self.free_ns)
        else:
            await sleep_until(received_ns + int(first_token_ms * 1e6))
        start_ns = monotonic_ns()
        note["took_us"] = (start_ns - received_ns) // 1000
        writer.write(RESPONSE_HEAD + self.build_timing_header(number, note) + b"\r\n")
        if failure == "error":
            writer.write(encode_event({"error": {"message": "as scripted"}}))
        for place in range(self.script.token_count):
            await sleep_until(start_ns + int(place * self.script.gap_ms * 1e6))
            note["tokens"].append(monotonic_ns())
            writer.write(encode_event({"choices": [{"text": f"t{place} é"}]}))
            if failure == "cut":
                return
        if self.script.reports_usage:
            length = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
            usage = {"prompt_tokens": length, "completion_tokens": self.script.token_count}
            writer.write(encode_event({"choices": [], "usage": usage}))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n")
        note["end"] = monotonic_ns()
        writer.write(b"0\r\n\r\n")

    def answer_discovery(self, writer: asyncio.StreamWriter, words: list[str]) -> None:
        """Answer the requests that the benchmark sends before its load; they are not noted."""
        count = len(words) * self.script.tokens_per_word
        choice: dict[str, Any] = {"text": "x"}
        if count:
            choice["prompt_token_ids"] = [300 + place for place in range(count)]
        write_json(writer, {"choices": [choice], "usage": {"prompt_tokens": count}})

    def build_timing_header(self, number: int, note: dict[str, Any]) -> bytes:
        """Server-Timing of the delays that really took place."""
        if not self.script.sends_timing:
            return b""
        took_us, queue_ms = note["took_us"], self.script.queue_ms
        queue_us = min(took_us, int(queue_ms[number % len(queue_ms)] * 1000))
        if self.script.has_queue:
            queue_us = (note["began"] - note["came"]) // 1000
        parts = {"prefill.queue": queue_us, "prefill.compute": took_us - queue_us}
        return f"server-timing: {timing.format_server_timing(parts, 0, took_us)}\r\n".encode()


async def handle_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, one request; POST /script begins anew with another script."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
        return
    received_ns = writer.get_extra_info("socket")._sock.last_byte_ns
    line, *rest = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in rest)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    served = servers[-1]
    try:
        if line.startswith("POST /script"):
            servers.append(ScriptedStreamServer(ServerScript(**json.loads(body))))
            write_json(writer, {})
        elif line.startswith("GET /v1/models"):
            card = {"id": "fake", "max_model_len": served.script.context_tokens}
            write_json(writer, {"data": [card]})
        elif line.startswith("GET"):
            write_json(writer, served.notes)
        else:
            await served.stream_answer(writer, headers, json.loads(body), received_ns)
        await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


# Of the server's process; the last one answers.
servers = [ScriptedStreamServer(ServerScript())]


@dataclass
class ServerProcess:
    """A running server process."""

    url: str

    def fetch_notes(self) -> list[dict[str, Any]]:
        """Its notes so far, one per request."""
        with urllib.request.urlopen(f"{self.url}/notes") as answer:
            notes: list[dict[str, Any]] = json.load(answer)
            return notes


# Of this process; used again, because to start one takes as long as a test.
idle_servers: list[ServerProcess] = []


@contextmanager
def run_scripted_server(script: ServerScript | None = None) -> Iterator[ServerProcess]:
    """A server on a free port of the loopback, with this script and without notes."""
    server = idle_servers.pop() if idle_servers else start_server_process()
    data = json.dumps(asdict(script or ServerScript())).encode()
    urllib.request.urlopen(urllib.request.Request(f"{server.url}/script", data)).close()
    try:
        yield server
    finally:
        idle_servers.append(server)


def start_server_process() -> ServerProcess:
    """Start one; it ends with this process."""
    command = [sys.executable, "-m", "tests.bench.scripted_server"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    assert process.stdout
    return ServerProcess(f"http://127.0.0.1:{int(process.stdout.readline())}")


if __name__ == "__main__":
    asyncio.run(serve_stamped(handle_connection))
