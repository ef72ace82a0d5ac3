# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP server: file descriptors, and what a stop does to requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
import uvicorn

from router import fake_instances, raw_http
from router.fake_instances import InstancePlan
from ttft_otel.router.control.uvicorn_server import build_uvicorn_config

READYZ = b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.full
async def test_file_limit_is_raised() -> None:
    """The soft limit of file descriptors is raised to the hard one at the start."""
    async with (
        raw_http.run_instance() as one,
        raw_http.run_router_process("--backend", one.url, max_files=(96, 2048)) as router,
    ):
        text = Path(f"/proc/{router.pid}/limits").read_text()
        assert re.findall(r"Max open files +(\d+) +(\d+)", text) == [("2048", "2048")]


@pytest.mark.full
async def test_clients_leave_descriptors_for_instances() -> None:
    """With 96 descriptors and as many clients the instance stays healthy, and is reached."""
    async with (
        raw_http.run_instance() as one,
        raw_http.run_router_process("--backend", one.url, max_files=(96, 96)) as router,
        contextlib.AsyncExitStack() as clients,
    ):
        host, port = router.url.removeprefix("http://").split(":")
        writers = []
        for _ in range(96):
            reader, writer = await asyncio.open_connection(host, int(port))
            clients.callback(writer.close)
            writers.append((reader, writer))
            await asyncio.sleep(0.002)
        answered = 0
        for reader, writer in writers[:16]:
            writer.write(raw_http.encode_request())
            answered += raw_http.parse_status(await reader.readuntil(b"\r\n\r\n")) == 200
        assert answered == 16
        assert raw_http.parse_status(await writers[16][0].read()) == 503
        for _, writer in writers:
            writer.close()
        await asyncio.sleep(0.1)
        assert raw_http.parse_status(await raw_http.send_bytes(router.url, READYZ)) == 200
        assert await router.read_metric("ttft_otel_router_retries_total") == []
        assert sum(await router.read_metric("ttft_otel_router_refusals_total")) == 80


@pytest.mark.parametrize(
    "plan",
    [InstancePlan({"prefill.compute": 60_000}), InstancePlan(gap_s=60)],
    ids=["before the first token", "in the stream"],
)
async def test_a_stop_is_not_the_clients_doing(plan: InstancePlan) -> None:
    """A request that uvicorn cancels because the router stops is `stopped`, not a client that left."""
    async with (
        fake_instances.run_instance(plan) as one,
        fake_instances.run_router([one.url]) as router,
    ):
        config = build_uvicorn_config(router.app)
        config.lifespan = "off"  # the app is served, and was started, by `router`
        server, sock = uvicorn.Server(config), fake_instances.open_listening_socket()
        serving = asyncio.create_task(server.serve([sock]))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        body = b'{"model": "tiny", "stream": true}'
        client = asyncio.create_task(
            raw_http.send_bytes(url, raw_http.encode_request(body=body), timeout_s=30)
        )
        await fake_instances.wait_until(lambda: one.received)
        record_count = 1
        if plan.gap_s:  # the first token's record, then that of the end
            await router.wait_for_records(1)
            record_count = 2
        server.should_exit = True
        await asyncio.gather(serving, client)
        record = (await router.wait_for_records(record_count))[-1]
        assert record.server is not None
        assert record.server.error == "stopped"


async def ask_plainly(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
) -> str:
    """Send a request on a connection; gives the response's head in lower case, after its body has come."""
    writer.write(raw_http.encode_request(body=body))
    told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if "content-length: " in told:
        await reader.readexactly(int(told.partition("content-length: ")[2].split()[0]))
    return told


@pytest.mark.full
async def test_kept_connections_are_told_to_leave() -> None:
    """While it drains, a response ends its connection; idle ones are closed before requests are refused."""
    plain, stream = b'{"model": "tiny"}', b'{"model": "tiny", "stream": true}'
    permits = asyncio.Semaphore(0)
    async with (
        fake_instances.run_instance(InstancePlan(permits=permits)) as one,
        raw_http.run_router_process("--backend", one.url, "--drain-delay", "3") as router,
    ):
        address = router.url.removeprefix("http://").split(":")
        used, idle, streaming = [await asyncio.open_connection(*address) for _ in range(3)]
        for connection in (used, idle):
            assert "connection: close" not in await ask_plainly(*connection, plain)
        held = asyncio.create_task(ask_plainly(*streaming, stream))
        await fake_instances.wait_until(lambda: len(one.received) == 3)
        os.kill(router.pid, signal.SIGTERM)
        head = ""
        while "connection: close" not in head:
            # Until the signal has arrived there, connections are kept.
            head = await ask_plainly(*used, plain)
            assert head.startswith("http/1.1 200")
        assert await used[0].read() == await idle[0].read() == b""
        # The stream is still under way: it is not the end of the process that closed them.
        for _ in range(100):
            permits.release()
        assert (await held).startswith("http/1.1 200")
        assert (await streaming[0].read()).endswith(b"0\r\n\r\n")
        for _, writer in (used, idle, streaming):
            writer.close()
            await writer.wait_closed()
