# SPDX-License-Identifier: Apache-2.0
"""What a request costs the router: its CPU time per request against an instance that costs nothing.

Run by hand or by CI: `python benchmarks/router.py --json FILE` writes {figure: {value, goal, met}}.
The router is the real command in a process of its own; sampled and unsampled requests take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import aiohttp

CONNECTIONS: Final = 16
ROUNDS: Final = 8  # each mode that many times, in turns: the machine's mood hits all alike
TIMING: Final = "receive;dur=0.100, prefill.compute;dur=0.200, ttft;dur=0.300"
STREAM: Final = b"".join(
    b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % n for n in range(16)
)
PLAIN: Final = b'{"choices":[{"message":{"content":"42"}}]}'
# Microseconds of CPU on two shared cores. Bare ASGI + aiohttp needs 125-190 and 165-250 when they are
# quiet; a record's own cost is about 10, the rest of "adds" is the exporter beside it on those cores.
GOALS: Final = {
    "plain, unsampled": 350.0,
    "stream, unsampled": 350.0,
    "plain, sampling adds": 60.0,
    "stream, sampling adds": 60.0,
    "records dropped": 0.0,
}


class Backend(asyncio.Protocol):
    """An instance that answers at once, as cheaply as Python can; swallows OTLP too."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self.transport, self.data = transport, b""

    def data_received(self, data: bytes) -> None:
        """Answer each complete request."""
        self.data += data
        head, found, rest = self.data.partition(b"\r\n\r\n")
        lower = head.lower()
        length = int(lower.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if not found or len(rest) < length:
            return
        self.data = rest[length:]
        stream = b'"stream": true' in rest[:length]
        body, kind = (STREAM, "text/event-stream") if stream else (PLAIN, "application/json")
        answer = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nServer-Timing: {TIMING}\r\n"
        if stream:
            answer += "Transfer-Encoding: chunked\r\n\r\n"
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        else:
            answer += f"Content-Length: {len(body)}\r\n\r\n"
        self.transport.write(answer.encode() + body)  # type: ignore[attr-defined]


def free() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def cpu(pid: int) -> float:
    """Seconds of CPU that a process has used; schedstat counts nanoseconds, stat only 10 ms."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@contextlib.asynccontextmanager
async def router(backend: int) -> AsyncIterator[tuple[str, int]]:
    """The router as its users start it, in front of the backend."""
    url = f"http://127.0.0.1:{free()}"
    env = {
        **os.environ,
        "TTFT_OTEL": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{backend}",
    }
    code = "from ttft_otel.router.command import command; command()"
    port = url.rpartition(":")[2]
    arguments = ["--backend", f"http://127.0.0.1:{backend}", "--port", port]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=env)
    try:
        async with aiohttp.ClientSession() as client:
            for _ in range(200):
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get(f"{url}/healthz"):
                        break
                await asyncio.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(40)


async def load(url: str, stream: bool, sampled: bool, number: int) -> None:
    """A closed loop of `number` requests over CONNECTIONS connections."""
    messages = [{"role": "user", "content": "How long until the first token?"}]
    body = json.dumps({"model": "tiny", "stream": stream, "messages": messages}).encode()
    left = iter(range(number))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def worker() -> None:
            for _ in left:
                parent = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-0{int(sampled)}"
                headers = {"traceparent": parent, "Content-Type": "application/json"}
                path = f"{url}/v1/chat/completions"
                async with client.post(path, data=body, headers=headers) as response:
                    if response.status != 200 or not await response.read():
                        raise RuntimeError(f"the router answered {response.status}")

        await asyncio.gather(*(worker() for _ in range(CONNECTIONS)))


async def measure(backend: int, number: int) -> dict[str, float]:
    """Microseconds of the router's CPU per request, and the records it dropped."""
    modes = [(stream, sampled) for stream in (False, True) for sampled in (False, True)]
    used: dict[tuple[bool, bool], list[float]] = {mode: [] for mode in modes}
    async with router(backend) as (url, pid):
        for mode in modes:
            await load(url, *mode, 100)
        for _ in range(ROUNDS):
            for mode in modes:
                before = cpu(pid)
                await load(url, *mode, number // ROUNDS)
                used[mode].append((cpu(pid) - before) / (number // ROUNDS) * 1e6)
        async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as response:
            text = await response.text()
    each = {mode: statistics.median(rounds) for mode, rounds in used.items()}
    added = {
        stream: statistics.median(
            more - less for more, less in zip(used[stream, True], used[stream, False], strict=True)
        )
        for stream in (False, True)
    }
    lines = [line for line in text.splitlines() if 'where="dropped"' in line]
    return {
        "plain, unsampled": each[False, False],
        "stream, unsampled": each[True, False],
        "plain, sampling adds": added[False],
        "stream, sampling adds": added[True],
        "records dropped": sum(float(line.rpartition(" ")[2]) for line in lines),
    }


def main() -> int:
    """Measure, print, write; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--requests", type=int, default=2000, help="per mode (default 2000)")
    parser.add_argument("--instance", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.instance:
        asyncio.run(instance(asked.instance))
        return 0
    port = free()
    command = [sys.executable, __file__, "--instance", str(port)]
    process = subprocess.Popen(command)
    try:
        values = asyncio.run(measure(port, asked.requests))
    finally:
        process.terminate()
        process.wait(10)
    figures = {
        name: {"value": round(value, 1), "goal": GOALS[name], "met": value <= GOALS[name]}
        for name, value in values.items()
    }
    text = json.dumps(figures, indent=2)
    sys.stdout.write(f"{text}\n")
    if asked.json:
        asked.json.write_text(f"{text}\n")
    return 0 if all(figure["met"] for figure in figures.values()) else 1


async def instance(port: int) -> None:
    """Serve Backend until terminated."""
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
