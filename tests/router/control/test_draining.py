# SPDX-License-Identifier: Apache-2.0
"""A router that is told to stop sends its clients away before it refuses them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import aiohttp

from tests.router import fake_instances
from tests.router.control.test_router_app import wait_until_up
from ttft_otel.model.names import env_names


async def test_kept_connections_are_told_to_leave() -> None:
    """While it drains, a response ends its connection; idle ones are closed before requests are refused."""
    permits = asyncio.Semaphore(0)
    plan = fake_instances.InstancePlan(permits=permits)
    async with fake_instances.run_instance(plan) as one:
        port = int(fake_instances.find_unused_url().rpartition(":")[2])
        code = "from ttft_otel.commands.router.command import command; command()"
        options = ("--backend", one.url, "--port", str(port), "--drain-delay", "3")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, *options, env={**os.environ, env_names.TTFT_OTEL: "0"}
        )
        async with aiohttp.ClientSession() as client:
            await wait_until_up(
                fake_instances.RunningRouter(client, f"http://127.0.0.1:{port}", [])
            )
        used, idle, streaming = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for connection in (used, idle):
            assert "connection: close" not in await ask_plainly(*connection)
        held = asyncio.create_task(ask_plainly(*streaming, stream=True))
        while len(one.received) < 3:
            await asyncio.sleep(0.05)

        process.send_signal(signal.SIGTERM)
        head = ""
        while "connection: close" not in head:
            # Until the signal has arrived there, connections are kept.
            head = await ask_plainly(*used)
            assert head.startswith("http/1.1 200")
        assert await used[0].read() == b""
        assert await idle[0].read() == b""
        # The stream is still under way: it is not the end of the process that closed them.
        assert process.returncode is None

        for _ in range(100):
            permits.release()
        assert (await held).startswith("http/1.1 200")
        assert (await streaming[0].read()).endswith(b"0\r\n\r\n")
        assert await process.wait() == 0
        for _, writer in (used, idle, streaming):
            writer.close()
            await writer.wait_closed()


async def ask_plainly(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: bool = False
) -> str:
    """Send a request on a connection; gives the response's head in lower case, after its body has come."""
    body = json.dumps({"model": "tiny", "stream": stream, "messages": []}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if "content-length: " in told:
        length = told.partition("content-length: ")[2].split()[0]
        await reader.readexactly(int(length))
    return told
