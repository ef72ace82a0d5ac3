# SPDX-License-Identifier: Apache-2.0
"""The router's process and its file descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

from router import fake_instances, raw_http

READYZ = b"GET /readyz HTTP/1.1\r\nhost: router\r\n\r\n"


def test_file_limit_is_raised() -> None:
    """A soft limit below the hard one is raised at start."""

    async def run_scenario() -> None:
        async with (
            raw_http.run_instance() as one,
            raw_http.run_router_process("--backend", one.url, max_files=(96, 2048)) as router,
        ):
            text = Path(f"/proc/{router.pid}/limits").read_text()
            assert re.findall(r"Max open files +(\d+) +(\d+)", text) == [("2048", "2048")]

    fake_instances.run_with_timeout(run_scenario, 120)


def test_clients_leave_descriptors_for_instances() -> None:
    """With 96 descriptors and as many clients the instance stays healthy, and is reached."""

    async def run_scenario() -> None:
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

    fake_instances.run_with_timeout(run_scenario, 120)
