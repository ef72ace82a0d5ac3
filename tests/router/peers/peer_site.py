# SPDX-License-Identifier: Apache-2.0
"""Replicas of a router as processes on addresses of loopback, which a DNS server names."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from commands.router.test_router_process import CommandProcess, run_command

from router import fake_instances
from router.discovery.dns_server import DnsServer, run_dns_server
from router.fake_instances import FakeInstance
from ttft_otel.model.names import metric_names

NAME = "routers.test."
KEY = "0123456789abcdef0123456789abcdef"


@dataclass
class Replica:
    """One replica: its process, its admin port, and where it listens for others."""

    process: CommandProcess
    admin: str
    host: str
    port: int

    async def read_in_flight(self) -> int:
        """Requests in flight at all instances, as it believes."""
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{self.admin}/instances") as response:
                instances = (await response.json())["instances"]
        return sum(each["in_flight"] for each in instances)

    async def wait_for_load(self, number: int) -> None:
        """Wait until it believes that so many are in flight, whichever of its workers is asked."""
        answers = 0
        while answers < 8:
            answers = answers + 1 if await self.read_in_flight() == number else 0
            await asyncio.sleep(0.01)

    async def read_messages(self) -> dict[str, float]:
        """Its counter of datagrams, by result."""
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{self.process.router.url}/metrics") as response:
                lines = (await response.text()).splitlines()
        begin = f'{metric_names.ROUTER_PEER_MESSAGES}_total{{result="'
        found = (line.removeprefix(begin).split('"} ') for line in lines if line.startswith(begin))
        return {result: float(value) for result, value in found}

    async def wait_for_messages(self, result: str, number: float) -> None:
        """Wait until it has counted so many."""
        while (await self.read_messages()).get(result, 0) < number:
            await asyncio.sleep(0.05)


def find_shared_port(hosts: Sequence[str]) -> int:
    """A UDP port that is free on all of them."""
    while True:
        with contextlib.ExitStack() as stack:
            port = 0
            try:
                for host in hosts:
                    bound = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                    bound.bind((host, port))
                    port = bound.getsockname()[1]
            except OSError:
                continue
            return port


@contextlib.asynccontextmanager
async def run_replicas(
    folder: Path, instances: Sequence[FakeInstance], keys: Sequence[str], *flags: str
) -> AsyncIterator[tuple[list[Replica], DnsServer]]:
    """A replica for each of `keys`, with these flags; the name leads to all of them."""
    hosts = [f"127.0.0.{2 + number}" for number in range(len(keys))]
    port = find_shared_port(hosts)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(run_dns_server())
        server.records[NAME, "A"] = hosts
        replicas = []
        for host, key in zip(hosts, keys, strict=True):
            home = folder / host
            home.mkdir()
            (home / "keys").write_text(key)
            admin = fake_instances.find_unused_url()
            source = f"dns://{NAME}:{port}?nameserver=127.0.0.1:{server.port}"
            process = await stack.enter_async_context(
                run_command(
                    *(home, "--peers", source, "--peers-key-file", str(home / "keys")),
                    *("--peers-host", host, "--admin-port", admin.rpartition(":")[2]),
                    *(flag for each in instances for flag in ("--backend", each.url)),
                    *flags,
                )
            )
            replicas.append(Replica(process, admin, host, port))
        yield replicas, server
