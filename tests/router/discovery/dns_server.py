# SPDX-License-Identifier: Apache-2.0
"""A DNS server on loopback, UDP and TCP on one port, whose records a test changes while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

MAX_UDP_BYTES = 512  # as a server without EDNS: longer answers are truncated, and asked for by TCP


class DnsServer:
    """Answers from `records`: lines of text by (name, type).

    rcode: instead of an answer. is_silent: no answer at all, like a server that is gone.
    """

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.rcode, self.is_silent, self.port = "", False, 0
        self.questions: list[tuple[str, str, str]] = []  # name, type, "udp" or "tcp"

    def answer_query(self, wire: bytes, transport: str) -> bytes | None:
        """The answer to a message; None for none."""
        query = dns.message.from_wire(wire)
        name, kind = (
            query.question[0].name.to_text(),
            dns.rdatatype.to_text(query.question[0].rdtype),
        )
        self.questions.append((name, kind, transport))
        if self.is_silent:
            return None
        response = dns.message.make_response(query)
        if self.rcode:
            response.set_rcode(dns.rcode.from_text(self.rcode))
        elif not any(known == name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif lines := self.records.get((name, kind)):
            response.answer.append(dns.rrset.from_text_list(name, 5, "IN", kind, lines))
        data = response.to_wire()
        if transport == "udp" and len(data) > MAX_UDP_BYTES:
            response.answer.clear()
            response.flags |= dns.flags.TC
            data = response.to_wire()
        return data

    async def answer_stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one query of a TCP connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            (length,) = struct.unpack("!H", await reader.readexactly(2))
            data = self.answer_query(await reader.readexactly(length), "tcp")
            if data is not None:
                writer.write(struct.pack("!H", len(data)) + data)
                await writer.drain()
        writer.close()


class UdpProtocol(asyncio.DatagramProtocol):
    """Hands datagrams to the server."""

    def __init__(self, server: DnsServer) -> None:
        self.server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.DatagramTransport, transport)  # no subclass before 3.12

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Answer."""
        answer = self.server.answer_query(data, "udp")
        if answer is not None:
            self.transport.sendto(answer, addr)


@contextlib.asynccontextmanager
async def run_dns_server() -> AsyncIterator[DnsServer]:
    """Run a server on a free port."""
    server = DnsServer()
    listener = await asyncio.start_server(server.answer_stream, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: UdpProtocol(server), local_addr=("127.0.0.1", server.port)
    )
    try:
        yield server
    finally:
        transport.close()
        listener.close()
