# SPDX-License-Identifier: Apache-2.0
"""Where the other replicas are: the addresses behind the name of `--peers`, asked again and again.

peer_link.py sends to them. Who answers is judged by its key, not by its address.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing
from typing import Final
from urllib.parse import urlsplit

from ttft_otel.router.discovery.dns_source import DnsSource
from ttft_otel.router.discovery.findings import Findings
from ttft_otel.router.discovery.source_address import SourceAddress
from ttft_otel.router.errors import SourceUnreachable

ASK_INTERVAL_S: Final = 5.0  # seconds between two questions to DNS; the TTL of cluster DNS
MAX_PEERS: Final = 32  # addresses; each is told of each request

log: Final = logging.getLogger("ttft_otel")


class PeerDirectory:
    """The addresses of all replicas, this one's among them. problem: why they are not news, else ""."""

    def __init__(self, address: SourceAddress, interval_s: float = ASK_INTERVAL_S) -> None:
        self.source, self.interval_s = DnsSource(address, interval_s), interval_s
        self.addresses: tuple[tuple[str, int], ...] = ()
        self.problem = ""

    async def ask_forever(self) -> None:
        """Keep the addresses; those that were named last stay while nobody answers."""
        while True:
            try:
                async with aclosing(self.source.watch_findings()) as findings:
                    async for each in findings:
                        self._take_findings(each)
            except SourceUnreachable as error:
                self._note_problem(str(error))
            # Jitter, so that replicas do not ask at the same moment.
            await asyncio.sleep(self.interval_s * random.uniform(0.8, 1.2))

    def _take_findings(self, findings: Findings) -> None:
        found = []
        for url in sorted(findings.roles_by_url):
            parts = urlsplit(url)
            found.append((parts.hostname or "", parts.port or 0))
        if len(found) > MAX_PEERS:
            self._note_problem(f"{len(found)} addresses: only {MAX_PEERS} are told anything")
        else:
            self._note_problem(findings.problem)
        if found:
            self.addresses = tuple(found[:MAX_PEERS])

    def _note_problem(self, problem: str) -> None:
        if problem and problem != self.problem:
            name = self.source.address.text
            log.warning("ttft-otel: --peers %s: %s", name, problem)
        self.problem = problem
