# SPDX-License-Identifier: Apache-2.0
"""What a source of instances says at one moment; dns_source.py and kubernetes_source.py make it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ttft_otel.router.discovery.source_address import SourceAddress


@dataclass(frozen=True, slots=True)
class Findings:
    """All instances that a source names now.

    roles_by_url: role by URL. problem: what a person should know, though the source answered: that it
    names nothing, or which part of it cannot be used; "" for nothing.
    """

    roles_by_url: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


class InstanceSource(Protocol):
    """Somebody who knows which instances there are."""

    address: SourceAddress

    # No `async def`: calling the function of an async generator returns it without await.
    def watch_findings(self) -> AsyncGenerator[Findings, None]:
        """Give what is there, then what is there after each change, for ever.

        Raises SourceUnreachable when it cannot be asked; the generator is then made anew.
        """
        ...


def write_url(host: str, port: int | str) -> str:
    """The URL of an instance at an address, which may be IPv6."""
    # Brackets tell the colons of IPv6 from that of the port (RFC 3986 section 3.2.2).
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
