# SPDX-License-Identifier: Apache-2.0
"""Where the other replicas are: what DNS says, bounded, and kept while DNS says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from router.discovery.dns_server import DnsServer, run_dns_server
from router.peers.peer_site import NAME
from ttft_otel.router.discovery import dns_source
from ttft_otel.router.discovery.discovery import end_tasks
from ttft_otel.router.discovery.source_address import parse_source_address
from ttft_otel.router.peers.peer_directory import MAX_PEERS, PeerDirectory


@contextlib.asynccontextmanager
async def ask_meanwhile(server: DnsServer) -> AsyncIterator[PeerDirectory]:
    """A directory that asks this server all the time."""
    source = f"dns://{NAME}:9100?nameserver=127.0.0.1:{server.port}"
    directory = PeerDirectory(parse_source_address(source), 0.01)
    asking = asyncio.create_task(directory.ask_forever())
    try:
        yield directory
    finally:
        await end_tasks([asking])


async def wait_for_addresses(directory: PeerDirectory, count: int) -> None:
    """Wait until it has so many."""
    while len(directory.addresses) != count:
        await asyncio.sleep(0.01)


async def test_replicas_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer counts, but for none: what was named last stays."""
    monkeypatch.setattr(dns_source, "QUERY_TIMEOUT_S", 0.2)

    async with run_dns_server() as server, ask_meanwhile(server) as directory:
        while not directory.problem and len(server.questions) < 4:
            await asyncio.sleep(0.01)
        assert directory.addresses == ()
        server.records[NAME, "A"] = ["10.0.0.2", "10.0.0.1"]
        await wait_for_addresses(directory, 2)
        assert directory.addresses == (("10.0.0.1", 9100), ("10.0.0.2", 9100))
        server.is_silent = True
        while "no answer" not in directory.problem:
            await asyncio.sleep(0.01)
        assert len(directory.addresses) == 2
        server.is_silent = False
        server.records[NAME, "A"] = ["10.0.0.3"]
        await wait_for_addresses(directory, 1)
        assert directory.problem == ""


async def test_addresses_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """The first ones by address, the same for every replica; it is said once."""
    with caplog.at_level(logging.WARNING, "ttft_otel"):
        async with run_dns_server() as server:
            server.records[NAME, "A"] = [f"10.0.1.{number}" for number in range(MAX_PEERS + 8)]
            async with ask_meanwhile(server) as directory:
                await wait_for_addresses(directory, MAX_PEERS)
                asked = len(server.questions)
                while len(server.questions) < asked + 6:
                    await asyncio.sleep(0.01)
    assert [f"only {MAX_PEERS} are told" in each.message for each in caplog.records] == [True]
