# SPDX-License-Identifier: Apache-2.0
"""Instances behind a name: the addresses of a headless Service, or its SRV records, asked again and again.

dnspython asks the nameservers of /etc/resolv.conf with its search domains, as the C library would, but
tells a name that does not exist from a server that does not answer: only the first may remove instances.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Any, Final

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver

from ttft_otel.model.stages import PREFILL_DECODE
from ttft_otel.router.discovery.discovery import Findings, SourceAddress, write_url
from ttft_otel.router.errors import SourceUnreachable

QUERY_TIMEOUT_S: Final = 5.0  # seconds for one name, all nameservers and search domains together
# Answers without an address in a row until instances are removed: a Service that is made anew, or a
# nameserver that has just started, says for a moment that there is nothing.
EMPTY_ANSWERS_NEEDED: Final = 2


class DnsSource:
    """One name. interval_s: seconds between two questions."""

    def __init__(self, address: SourceAddress, interval_s: float) -> None:
        self.address = address
        self.interval_s = interval_s
        # Made with the first question: without a configuration it raises, and is tried again.
        self._resolver: dns.asyncresolver.Resolver | None = None

    async def watch_findings(self) -> AsyncGenerator[Findings, None]:
        """Give the addresses each time that the name was resolved. Raises SourceUnreachable."""
        empty_answers = 0
        while True:
            urls = await self._resolve_urls()
            empty_answers = 0 if urls else empty_answers + 1
            if urls:
                yield Findings(dict.fromkeys(urls, self.address.role or PREFILL_DECODE))
            elif empty_answers >= EMPTY_ANSWERS_NEEDED:
                yield Findings(problem="the name has no address: is the Service headless?")
            # jitter, so that the replicas of a router do not ask at the same moment
            await asyncio.sleep(self.interval_s * random.uniform(0.8, 1.2))

    async def _resolve_urls(self) -> list[str]:
        name, scheme = self.address.place, self.address.instance_scheme
        if port := self.address.port:
            return [write_url(scheme, host, port) for host in await self._resolve_hosts(name)]
        targets = [
            (record.target.to_text(), record.port) for record in await self._ask(name, "SRV")
        ]
        return [
            write_url(scheme, host, port)
            # Sorted: nameservers change the order from answer to answer.
            for target, port in sorted(set(targets))
            for host in await self._resolve_hosts(target)
        ]

    async def _resolve_hosts(self, name: str) -> list[str]:
        """The addresses of a name: IPv4, else IPv6; both would be every instance twice."""
        for kind in ("A", "AAAA"):
            if hosts := {record.address for record in await self._ask(name, kind)}:
                return sorted(hosts)
        return []

    async def _ask(self, name: str, kind: str) -> list[Any]:
        try:
            if self._resolver is None:
                self._resolver = build_resolver(self.address.nameserver)
            # No record of one kind is no error: the name may have the other kind.
            answer = await self._resolver.resolve(
                name, kind, search=True, raise_on_no_answer=False, lifetime=QUERY_TIMEOUT_S
            )
        except dns.resolver.NXDOMAIN:
            return []
        except dns.exception.Timeout as error:  # its own text has the seconds, new ones each time
            raise SourceUnreachable(
                f"DNS: no answer for {name} in {QUERY_TIMEOUT_S:g} s"
            ) from error
        except (dns.exception.DNSException, OSError) as error:
            raise SourceUnreachable(f"DNS does not answer for {name}: {error}") from error
        return list(answer.rrset or ())


def build_resolver(nameserver: str) -> dns.asyncresolver.Resolver:
    """A resolver that asks `nameserver` (IP:PORT), or those of /etc/resolv.conf where it is empty.

    Raises NoResolverConfiguration, a DNSException, without that file.
    """
    if not nameserver:
        return dns.asyncresolver.Resolver()
    host, _, port = nameserver.rpartition(":")
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = [host.strip("[]")]
    resolver.port = int(port)
    return resolver
