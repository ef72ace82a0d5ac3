# SPDX-License-Identifier: Apache-2.0
"""Instances that a DNS server names: addresses, SRV records, and a server that fails."""

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
import pytest

from router import fake_instances
from router.discovery.discovery_site import run_discovery_site
from router.fake_instances import InstancePlan

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


NAME = "vllm.default.svc.cluster.local."


def split_port(url: str) -> str:
    """The port of a URL."""
    return url.rpartition(":")[2]


async def test_an_address_that_appears_serves_and_one_that_goes_drains() -> None:
    """Two addresses of loopback with one port are two instances, as two pods are."""
    async with run_dns_server() as dns, fake_instances.run_instance(InstancePlan({})) as one:
        port = split_port(one.url)
        dns.records[NAME, "A"] = ["127.0.0.1", "127.0.0.2"]
        source = f"dns://{NAME}:{port}?nameserver=127.0.0.1:{dns.port}"
        async with run_discovery_site("--discover", source) as site:
            await site.wait_for_states(
                {
                    f"prefill_decode http://127.0.0.1:{port}": "healthy",
                    # nothing listens there: discovery says who there is, probes who lives
                    f"prefill_decode http://127.0.0.2:{port}": "failed",
                }
            )
            assert (await site.router.post_chat())[0] == 200
            dns.records[NAME, "A"] = ["127.0.0.1"]
            await site.wait_for_states({f"prefill_decode {one.url}": "healthy"})
            status, _, said = await site.router.get_json("/readyz")
            assert status == 200
            assert said["discovery"] == [{"source": source, "instances": 1}]


async def test_srv_records_say_ports_and_a_role_comes_from_the_source() -> None:
    """Prefill and decode by two names, each record with a port of its own."""
    async with (
        run_dns_server() as dns,
        fake_instances.run_instance() as p,
        fake_instances.run_instance() as d,
    ):
        for name, each in (("p", p), ("d", d)):
            dns.records[f"_http._tcp.{name}.", "SRV"] = [f"0 50 {split_port(each.url)} pod-{name}."]
            dns.records[f"pod-{name}.", "A"] = ["127.0.0.1"]
        server = f"nameserver=127.0.0.1:{dns.port}"
        flags = [
            *("--discover", f"dns://_http._tcp.p.?role=prefill&{server}"),
            *("--discover", f"dns://_http._tcp.d.?role=decode&{server}"),
        ]
        async with run_discovery_site(*flags) as site:
            await site.wait_for_states(
                {f"prefill {p.url}": "healthy", f"decode {d.url}": "healthy"}
            )
            assert (await site.router.get_json("/readyz"))[0] == 200


async def test_a_hundred_pods_do_not_fit_a_datagram() -> None:
    """A truncated answer is asked for again over TCP."""
    async with run_dns_server() as dns:
        dns.records[NAME, "A"] = [f"127.0.1.{number}" for number in range(1, 101)]
        source = f"dns://{NAME}:9?nameserver=127.0.0.1:{dns.port}"
        async with run_discovery_site("--discover", source) as site:
            line = await site.wait_for_source(lambda said: said["instances"] == 100)
            assert "problem" not in line
            assert (NAME, "A", "tcp") in dns.questions


async def test_a_resolver_that_fails_takes_nobody_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When DNS fails the instances stay, one line is logged, and the next answer is applied."""
    async with run_dns_server() as dns, fake_instances.run_instance(InstancePlan({})) as one:
        port = split_port(one.url)
        dns.records[NAME, "A"] = ["127.0.0.1"]
        source = f"dns://{NAME}:{port}?nameserver=127.0.0.1:{dns.port}"
        async with run_discovery_site("--discover", source) as site:
            await site.wait_for_states({f"prefill_decode {one.url}": "healthy"})
            dns.rcode = "SERVFAIL"
            line = await site.wait_for_source(lambda said: "problem" in said)
            assert line["instances"] == 1
            assert "the 1 instances known before stay in use" in line["problem"]
            asked = len(dns.questions)
            while len(dns.questions) < asked + 4:
                await asyncio.sleep(0.01)
            assert (await site.router.post_chat())[0] == 200
            assert len([each for each in caplog.messages if "stay in use" in each]) == 1
            dns.rcode = ""
            await site.wait_for_source(lambda said: "problem" not in said)


async def test_a_name_without_addresses_is_said_and_must_be_said_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One empty answer changes nothing, since a Service may have just been made anew; a second one does."""
    async with run_dns_server() as dns, fake_instances.run_instance(InstancePlan({})) as one:
        source = f"dns://{NAME}:{split_port(one.url)}?nameserver=127.0.0.1:{dns.port}"
        async with run_discovery_site("--discover", source) as site:
            line = await site.wait_for_source(lambda said: "no address" in said["problem"])
            assert line["instances"] == 0
            assert (await site.router.get_json("/readyz"))[0] == 503
            assert any("is the Service headless?" in each for each in caplog.messages)
            asked = [name for name, kind, _ in dns.questions if kind == "A"]
            assert len(asked) >= 2
            dns.records[NAME, "A"] = ["127.0.0.1"]
            await site.wait_for_states({f"prefill_decode {one.url}": "healthy"})
            dns.records.clear()
            await site.wait_for_states({})
