# SPDX-License-Identifier: Apache-2.0
"""Instances that a DNS server names, over UDP and TCP, and those of watched EndpointSlices, over HTTP.

A router with --discover is built as by the command line. The API server behaves as kube-apiserver does:
EndpointSlices are listed and watched, with one version for all objects, a watch gives what came after a
version, 410 for versions that were compacted, as an ERROR event of a watch, label selectors, bookmarks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from aiohttp import web

from router import fake_instances
from router.fake_instances import FakeInstance, InstancePlan
from ttft_otel.commands.router import router_options
from ttft_otel.commands.router.command import build_router, command
from ttft_otel.model.names import metric_names
from ttft_otel.router.discovery.discovery import parse_source_address
from ttft_otel.router.discovery.sources import KubernetesSource, find_cluster, read_slices
from ttft_otel.router.errors import SourceUnreachable
from ttft_otel.router.upstream.connection_pool import QueryClient
from ttft_otel.tracing.settings import Settings

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def build_endpoint(address: str, **conditions: bool) -> dict[str, Any]:
    """An endpoint of a slice."""
    return {"addresses": [address], "conditions": conditions or {"ready": True}}


def build_slice(
    name: str,
    endpoints: Sequence[dict[str, Any]],
    ports: Sequence[tuple[str, int]] = (("http", 8000),),
    family: str = "IPv4",
    **labels: str,
) -> dict[str, Any]:
    """An EndpointSlice; in the names of labels `__` stands for a slash and `_` for a hyphen."""
    written = {key.replace("__", "/").replace("_", "-"): value for key, value in labels.items()}
    return {
        "metadata": {"name": name, "labels": {"app": "vllm", **written}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in ports],
    }


class SliceServer:
    """The API server. status: of every answer, if not 200. token: what requests must carry.

    ends_watches: close each watch after what there was to tell, as time-outs do. queries: of all requests.
    """

    def __init__(self) -> None:
        self.version, self.oldest_version, self.status = 10, 0, 200
        self.ends_watches, self.token, self.url = False, "", ""
        self.queries: list[dict[str, str]] = []
        self.slices: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._transports: set[asyncio.Transport] = set()

    @property
    def lists(self) -> int:
        """How often slices were listed."""
        return sum("watch" not in query for query in self.queries)

    @property
    def watches(self) -> int:
        """How often a watch was begun."""
        return len(self.queries) - self.lists

    def put(self, endpoint_slice: dict[str, Any]) -> None:
        """Add or replace a slice."""
        name = endpoint_slice["metadata"]["name"]
        self._record("MODIFIED" if name in self.slices else "ADDED", endpoint_slice)
        self.slices[name] = endpoint_slice

    def delete(self, name: str) -> None:
        """Delete a slice."""
        self._record("DELETED", self.slices.pop(name))

    def send_bookmark(self) -> None:
        """Tell watches a newer version without any change."""
        self._record("BOOKMARK", {"metadata": {}})

    def compact(self) -> None:
        """Forget all versions before the newest, and end the watches."""
        self.version += 10
        self.oldest_version = self.version
        self.events.clear()
        self.cut_watches()

    def cut_watches(self) -> None:
        """Break the connections of all watches, in the middle of whatever they send."""
        for transport in self._transports:
            transport.abort()

    def _record(self, kind: str, body: dict[str, Any]) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, kind, json.loads(json.dumps(body))))
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer_request(self, request: web.Request) -> web.StreamResponse:
        """List or watch."""
        self.queries.append(dict(request.query))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        if self.status != 200:
            return web.json_response({"kind": "Status", "message": "no"}, status=self.status)
        key, _, value = request.query["labelSelector"].partition("=")
        if "watch" in request.query:
            return await self._answer_watch(request, key, value)
        items = [each for each in self.slices.values() if each["metadata"]["labels"][key] == value]
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response({"metadata": metadata, "items": items})

    async def _answer_watch(self, request: web.Request, key: str, value: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        assert request.transport is not None
        self._transports.add(request.transport)
        seen = int(request.query["resourceVersion"])
        try:
            while True:
                if seen < self.oldest_version:
                    status = {"kind": "Status", "code": 410, "message": "too old"}
                    await self._send_event(response, "ERROR", status)
                    return response
                changed = self._changed
                for version, kind, body in list(self.events):
                    labels = body["metadata"].get("labels", {key: value})
                    if version > seen and labels.get(key) == value:
                        await self._send_event(response, kind, body)
                        seen = version
                if self.ends_watches:
                    return response
                await changed.wait()
        finally:
            self._transports.discard(request.transport)

    async def _send_event(
        self, response: web.StreamResponse, kind: str, body: dict[str, Any]
    ) -> None:
        data = json.dumps({"type": kind, "object": body}).encode() + b"\n"
        middle = len(data) // 2  # an event may come in pieces
        await response.write(data[:middle])
        await asyncio.sleep(0)
        await response.write(data[middle:])


@contextlib.asynccontextmanager
async def run_slice_server() -> AsyncIterator[SliceServer]:
    """Run an API server on a free port."""
    server = SliceServer()
    app = web.Application()
    app.router.add_get(PATH, server.answer_request)
    async with fake_instances.run_web_app(app) as server.url:
        try:
            yield server
        finally:
            server.cut_watches()


class DiscoverySite:
    """A running router and what a test asks it."""

    def __init__(self, router: fake_instances.RunningRouter) -> None:
        self.router = router

    def map_states(self) -> dict[str, str]:
        """The state of each instance, by leg and URL."""
        return {f"{each.leg} {each.url}": each.state for each in self.router.fleet}

    async def wait_for_states(self, expected: dict[str, str]) -> None:
        """Wait until the instances are these; the scenario has the time limit."""
        while self.map_states() != expected:
            await asyncio.sleep(0.01)

    async def wait_for_source(self, check: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the first source's line of /readyz is as `check` wants it."""
        while True:
            _, _, said = await self.router.get_json("/readyz")
            line: dict[str, Any] = said["discovery"][0]
            if check(line):
                return line
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def run_discovery_site(*flags: str) -> AsyncIterator[DiscoverySite]:
    """Run an untraced router with these flags, which asks its sources 20 times a second."""
    arguments = ["--health-interval", "0.05", "--discover-interval", "0.05", *flags]
    context = command.make_context("router", arguments)
    options = router_options.RouterOptions.from_flags(context.params)
    async with fake_instances.serve_app(build_router(options, Settings(), None), []) as router:
        yield DiscoverySite(router)


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


SOURCE = "k8s://default/app=vllm"
ANY = parse_source_address(SOURCE)


def serve_from(instance: FakeInstance, name: str = "a", **labels: str) -> dict[str, Any]:
    """A slice with this instance alone."""
    port = int(instance.url.rpartition(":")[2])
    return build_slice(name, [build_endpoint("127.0.0.1")], [("http", port)], **labels)


def watch(cluster: SliceServer) -> tuple[str, ...]:
    """Flags of a router that asks this API server."""
    return ("--discover", SOURCE, "--kubernetes-api", cluster.url)


@contextlib.asynccontextmanager
async def run_cluster() -> AsyncIterator[tuple[SliceServer, FakeInstance, DiscoverySite]]:
    """An API server that names one instance, and a router that found it."""
    async with (
        run_slice_server() as cluster,
        fake_instances.run_instance(InstancePlan({})) as one,
    ):
        cluster.put(serve_from(one))
        async with run_discovery_site(*watch(cluster)) as site:
            await site.wait_for_states({f"prefill_decode {one.url}": "healthy"})
            yield cluster, one, site


async def test_a_change_comes_by_the_watch() -> None:
    """A pod that terminates drains: its stream ends, new requests go elsewhere; one list is enough."""
    async with (
        run_cluster() as (cluster, one, site),
        fake_instances.run_instance(InstancePlan({})) as two,
    ):
        cluster.put(serve_from(two, "b"))
        both = {f"prefill_decode {each.url}": "healthy" for each in (one, two)}
        await site.wait_for_states(both)
        gone = serve_from(one)
        gone["endpoints"][0]["conditions"] = {"ready": False, "terminating": True}
        cluster.put(gone)
        await site.wait_for_states({f"prefill_decode {two.url}": "healthy"})
        assert (await site.router.post_chat())[0] == 200
        assert (len(one.received), len(two.received)) == (0, 1)
        cluster.delete("b")
        line = await site.wait_for_source(lambda said: said["instances"] == 0)
        assert line["problem"] == "no endpoint is ready"
        assert cluster.lists == 1


async def test_a_watch_that_ends_goes_on_where_it_was() -> None:
    """After a time-out of the server the next watch begins at the last version, bookmarks' included."""
    async with run_cluster() as (cluster, one, site):
        cluster.ends_watches = True
        cluster.send_bookmark()
        newest = str(cluster.version)
        while cluster.queries[-1].get("resourceVersion") != newest:
            await site.wait_for_source(lambda _: True)
        assert cluster.queries[-1]["allowWatchBookmarks"] == "true"
        cluster.put(serve_from(one, "b", ttft_otel__role="prefill_decode"))
        cluster.delete("a")
        while cluster.queries[-1].get("resourceVersion") != str(cluster.version):
            await site.wait_for_source(lambda _: True)
        assert site.map_states() == {f"prefill_decode {one.url}": "healthy"}
        assert cluster.lists == 1


async def test_a_version_that_was_compacted_is_listed_anew() -> None:
    """410 is an event of the watch, not its status; what was deleted meanwhile is gone."""
    async with (
        run_cluster() as (cluster, one, site),
        fake_instances.run_instance(InstancePlan({})) as two,
    ):
        cluster.slices.clear()
        cluster.slices["b"] = serve_from(two, "b")  # no event tells it
        cluster.compact()
        await site.wait_for_states({f"prefill_decode {two.url}": "healthy"})
        assert cluster.lists >= 2


async def test_an_api_server_that_goes_away_leaves_everybody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While the API server is away instances stay and serve; the failures are counted."""
    async with run_cluster() as (cluster, one, site):
        cluster.status = 503
        cluster.cut_watches()
        line = await site.wait_for_source(lambda said: "answered 503" in said.get("problem", ""))
        assert line["instances"] == 1
        assert (await site.router.post_chat())[0] == 200
        assert any("stay in use" in each for each in caplog.messages)
        async with site.router.client.get(f"{site.router.url}/metrics") as response:
            text = await response.text()
        assert f'{metric_names.ROUTER_DISCOVERED_INSTANCES}{{source="{SOURCE}"}} 1.0' in text
        assert f"{metric_names.ROUTER_DISCOVERY_FAILURES}_total" in text
        cluster.delete("a")
        cluster.put(serve_from(one, "new"))
        cluster.status = 200
        await site.wait_for_source(lambda said: "problem" not in said)
        assert site.map_states() == {f"prefill_decode {one.url}": "healthy"}


@pytest.mark.parametrize("status", [401, 403])
async def test_missing_rights_are_named(status: int) -> None:
    """When the API refuses, the log says which Role is needed."""
    async with run_slice_server() as cluster:
        cluster.status = status
        async with run_discovery_site(*watch(cluster)) as site:
            line = await site.wait_for_source(lambda said: str(status) in said["problem"])
            assert "list and watch of endpointslices" in line["problem"]
            assert (await site.router.get_json("/readyz"))[0] == 503


async def test_labels_say_roles() -> None:
    """One selector, prefill and decode by the label of their Services."""
    async with (
        run_slice_server() as cluster,
        fake_instances.run_instance() as p,
        fake_instances.run_instance() as d,
    ):
        cluster.put(serve_from(d, "d", ttft_otel__role="decode"))
        of_llm_d = serve_from(p, "p")
        of_llm_d["metadata"]["labels"]["llm-d.ai/role"] = "prefill"
        cluster.put(of_llm_d)
        async with run_discovery_site(*watch(cluster)) as site:
            await site.wait_for_states(
                {f"prefill {p.url}": "healthy", f"decode {d.url}": "healthy"}
            )


async def test_events_may_be_longer_than_buffers(caplog: pytest.LogCaptureFixture) -> None:
    """A slice with a thousand endpoints is one line of some 100 kB; that there is none yet is told."""
    async with run_slice_server() as cluster, run_discovery_site(*watch(cluster)) as site:
        line = await site.wait_for_source(lambda said: "selector" in said["problem"])
        problem = "the selector finds no EndpointSlice: has the Service these labels?"
        assert line["problem"] == problem and problem in caplog.text
        endpoints = [
            {**build_endpoint(f"127.0.2.{number % 200}"), "nodeName": "n" * 200}
            for number in range(1000)
        ]
        cluster.put(build_slice("large", endpoints))
        await site.wait_for_source(lambda said: said["instances"] == 200)


async def test_a_token_is_read_anew_for_each_request(tmp_path: Path) -> None:
    """The token file is read again for each request, because kubelet replaces it."""
    async with run_slice_server() as cluster:
        token = tmp_path / "token"
        source = KubernetesSource(ANY, cluster.url, tmp_path)
        async with QueryClient() as source._queries:
            with pytest.raises(SourceUnreachable, match="no token"):
                await source.list_slices()
            for cluster.token in ("first", "second"):
                token.write_text(f"{cluster.token}\n")
                assert await source.list_slices() == ([], "10")
            cluster.token = "third"
            with pytest.raises(SourceUnreachable, match="401"):
                await source.list_slices()


def test_a_pod_knows_its_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """kubelet's variables and files; elsewhere the message says what to give."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="--kubernetes-api"):
        find_cluster()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT_HTTPS", "6443")
    assert find_cluster(folder=tmp_path) == ("https://[fd00::1]:6443", tmp_path)
    assert find_cluster("http://127.0.0.1:8001/") == ("http://127.0.0.1:8001", None)


@pytest.mark.parametrize(
    ("conditions", "is_used"),
    [
        ({"ready": True}, True),
        ({"ready": False}, False),
        ({"ready": None}, True),  # "unknown" is to be read as ready
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "terminating": True}, False),  # publishNotReadyAddresses
    ],
)
def test_readiness(conditions: dict[str, bool], is_used: bool) -> None:
    """Only endpoints that may get new requests are used: ready ones that do not terminate."""
    found = read_slices([build_slice("a", [build_endpoint("10.0.0.1", **conditions)])], ANY)

    assert dict(found.roles_by_url) == (
        {"http://10.0.0.1:8000": "prefill_decode"} if is_used else {}
    )
    assert found.problem == ("" if is_used else "no endpoint is ready")


def test_ports() -> None:
    """The port is the only one, the one named http, or the one that the source names."""
    endpoints = [build_endpoint("10.0.0.1")]
    single = build_slice("a", endpoints, [("", 9000)])
    several = build_slice("b", endpoints, [("http", 8000), ("kv", 5600)])
    unclear = build_slice("c", endpoints, [("api", 8000), ("kv", 5600)])

    def list_urls(text: str, each: object) -> list[str]:
        assert isinstance(each, dict)
        return list(read_slices([each], parse_source_address(text)).roles_by_url)

    assert list_urls("k8s://n/app=x", single) == ["http://10.0.0.1:9000"]
    assert list_urls("k8s://n/app=x?scheme=https", single) == ["https://10.0.0.1:9000"]
    assert list_urls("k8s://n/app=x", several) == ["http://10.0.0.1:8000"]
    assert list_urls("k8s://n/app=x?port=api", unclear) == ["http://10.0.0.1:8000"]
    assert list_urls("k8s://n/app=x?port=8200", unclear) == ["http://10.0.0.1:8200"]
    assert read_slices([unclear], ANY).problem == (
        "slice c: which of its ports? Add ?port=NAME or ?port=NUMBER"
    )


def test_two_families_are_one_instance() -> None:
    """A dual-stack Service has two slices for the same pods; a single IPv6 one is used."""
    service = {"kubernetes.io__service_name": "vllm"}
    four = build_slice("four", [build_endpoint("10.0.0.1")], **service)
    six = build_slice("six", [build_endpoint("fd00::1")], family="IPv6", **service)

    assert list(read_slices([six, four], ANY).roles_by_url) == ["http://10.0.0.1:8000"]
    assert list(read_slices([six], ANY).roles_by_url) == ["http://[fd00::1]:8000"]


def test_a_label_with_an_unknown_role_is_said() -> None:
    """Instances whose label names an unknown role are not used, and the log says so."""
    odd = build_slice("odd", [build_endpoint("10.0.0.1")], ttft_otel__role="worker")

    found = read_slices([odd], ANY)

    assert not found.roles_by_url
    assert found.problem == "slice odd: its label says role 'worker'; add ?role=ROLE"
    assert read_slices([odd], parse_source_address("k8s://n/a=b?role=decode")).roles_by_url == {
        "http://10.0.0.1:8000": "decode"
    }
