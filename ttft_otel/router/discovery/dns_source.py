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


async def watch_name(address: SourceAddress, interval_s: float) -> AsyncGenerator[Findings, None]:
    """Give the addresses of a name each time that it was resolved. Raises SourceUnreachable.

    interval_s: seconds between two questions.
    """
    empty_answers = 0
    try:
        resolver = build_resolver(address.nameserver)
        while True:
            urls = await _resolve_urls(resolver, address)
            empty_answers = 0 if urls else empty_answers + 1
            if urls:
                yield Findings(dict.fromkeys(urls, address.role or PREFILL_DECODE))
            elif empty_answers >= EMPTY_ANSWERS_NEEDED:
                yield Findings(problem="the name has no address: is the Service headless?")
            # jitter, so that the replicas of a router do not ask at the same moment
            await asyncio.sleep(interval_s * random.uniform(0.8, 1.2))
    except dns.exception.Timeout as error:  # its own text has the seconds, new ones each time
        raise SourceUnreachable(
            f"DNS: no answer for {address.place} in {QUERY_TIMEOUT_S:g} s"
        ) from error
    except (dns.exception.DNSException, OSError) as error:
        raise SourceUnreachable(f"DNS does not answer for {address.place}: {error}") from error


async def _resolve_urls(resolver: dns.asyncresolver.Resolver, address: SourceAddress) -> list[str]:
    # Sorted: nameservers change the order from answer to answer.
    targets = (
        [(address.place, address.port)]
        if address.port
        else sorted(
            {
                (record.target.to_text(), record.port)
                for record in await _ask(resolver, address.place, "SRV")
            }
        )
    )
    return [
        write_url(address.instance_scheme, host, port)
        for target, port in targets
        for host in await _resolve_hosts(resolver, target)
    ]


async def _resolve_hosts(resolver: dns.asyncresolver.Resolver, name: str) -> list[str]:
    """The addresses of a name: IPv4, else IPv6; both would be every instance twice."""
    for kind in ("A", "AAAA"):
        if hosts := {record.address for record in await _ask(resolver, name, kind)}:
            return sorted(hosts)
    return []


async def _ask(resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> list[Any]:
    try:
        # No record of one kind is no error: the name may have the other kind.
        answer = await resolver.resolve(
            name, kind, search=True, raise_on_no_answer=False, lifetime=QUERY_TIMEOUT_S
        )
    except dns.resolver.NXDOMAIN:
        return []
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
