# SPDX-License-Identifier: Apache-2.0
"""Every port of ours, to strangers: heads without end, hostile web pages, `serve` without its token."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import grpc
import pytest
from router import fake_instances, raw_http
from router.control.test_admin import open_admin
from router.fake_instances import InstancePlan

from attack.test_senders import encode_export, run_serve
from ttft_otel.report.receive.receiver import OTLP_TRACE_SERVICE
from ttft_otel.report.report_server import ReportServer
from ttft_otel.router.control import app

PORTS = ("router", "serve", "admin")
ENOUGH_BYTES = 2 << 20  # of an attack in these tests
PATHS = {"router": "/healthz", "serve": "/healthz", "admin": "/instances"}
START = "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
# What begins, what follows without end, and the statuses that refuse it; "" where no answer is due.
ATTACKS = {
    "headers": (START, b"a: b\r\n" * 1000, {431, 400}),
    "many headers": (START, b"".join(b"x%d: b\r\n" % number for number in range(1000)), {431, 400}),
    "a header": (START + "x-a: ", b"a" * 4096, {431, 400}),
    "a name": (START, b"a" * 4096, {431, 400}),
    "a target": ("GET /", b"a" * 4096, {414, 400}),
    "trailers": (CHUNKED, b"a: b\r\n" * 1000, {431, 400, 404, 405, 415}),
    "a trailer": (CHUNKED + "x-a: ", b"a" * 4096, {431, 400, 404, 405, 415}),
}


@contextlib.asynccontextmanager
async def open_port(port: str, path: Path) -> AsyncIterator[str]:
    """The URL of this HTTP port of ours."""
    if port == "serve":
        with run_serve(path) as server:
            yield f"http://127.0.0.1:{server.http_port}"
        return
    async with (
        fake_instances.run_instance(InstancePlan({})) as one,
        fake_instances.run_router([one.url]) as router,
    ):
        if port == "router":
            yield router.url
            return
        async with open_admin(router) as admin:
            yield admin.url.rpartition("/")[0]


async def attack(url: str, start: bytes, part: bytes) -> int:
    """Send `start` and then parts; the status of the answer, 0 if the connection is closed without one."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answering = asyncio.ensure_future(reader.read(65_536))
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(start)
            for _ in range(0, ENOUGH_BYTES, len(part)):
                if answering.done():
                    break
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            return raw_http.parse_status(await asyncio.wait_for(answering, 5))
        return 0
    finally:
        answering.cancel()
        writer.transport.abort()


@pytest.mark.parametrize("port", PORTS)
async def test_heads_without_end_are_refused(port: str, tmp_path: Path) -> None:
    """Each of the attacks gets its refusal at once, though its head never ends; long heads are served."""
    many = "".join(f"x-{number}: b\r\n" for number in range(100))
    long = f"x-a: {'a' * 8000}\r\n"
    async with open_port(port, tmp_path) as url:
        for name, (start, part, expected) in ATTACKS.items():
            path = "/v1/traces" if "trailer" in name else PATHS[port]
            status = await attack(url, start.format(path=path).encode(), part)
            assert status in expected | {0}, (name, status)
            # Without an answer only where one to the request itself was due, or nothing could be read.
            assert status or "trailer" in name or port == "admin", name
        for more in ("", many, long, "Connection: upgrade\r\nUpgrade: websocket\r\n"):
            assert await ask(url, f"{START.format(path=PATHS[port])}{more}\r\n") == 200, more[:20]


async def test_metadata_is_bounded(tmp_path: Path) -> None:
    """A gRPC call with 64 KB of metadata is refused; one with 4 KB is judged by its message."""
    statuses = []
    with run_serve(tmp_path, 0) as server:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}")
        call = channel.unary_unary(f"/{OTLP_TRACE_SERVICE}/Export")
        for number in (4, 64):
            metadata = grpc.aio.Metadata(*((f"x-{at}", "a" * 1000) for at in range(number)))
            try:
                await call(b"", metadata=metadata, timeout=20)
            except grpc.aio.AioRpcError as error:
                statuses.append(error.code())
            else:
                statuses.append(grpc.StatusCode.OK)
        await channel.close()
    assert statuses == [grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED]


EVIL_HOSTS = (
    "evil.example:8000",
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example:8000",
    "localhost:8000@evil.example",
    "evil.example#localhost",
    "[evil.example]:80",
    "2130706433x",
    "",
    "\u00e9.example",
)
GOOD_HOSTS = (
    "127.0.0.1:{port}",
    "localhost:{port}",
    "LOCALHOST",
    "[::1]:{port}",
    "192.0.2.7:{port}",
)
POST = "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\n{more}\r\n{{}}"
# Each of a page of another origin; browsers set these themselves, and Sec-Fetch-Site only for
# trustworthy addresses, of which loopback is one.
EVIL_PAGES = {
    "no-cors": "Origin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n",
    "no referrer": "Origin: null\r\nSec-Fetch-Site: cross-site\r\n",
    "without an origin": "Sec-Fetch-Site: cross-site\r\n",
    "another port": "Origin: http://127.0.0.1:1\r\nSec-Fetch-Site: same-site\r\n",
    "an old browser": "Origin: http://evil.example\r\n",
    "two origins": "Origin: http://{host}\r\nOrigin: http://evil.example\r\n",
}
# As command lines and libraries send them, undici's fetch among them, and pages of the server itself.
HONEST_CLIENTS = {
    "a library": "User-Agent: OpenAI/Python\r\n",
    "undici": "Sec-Fetch-Mode: cors\r\nAccept: */*\r\n",
    "its own page": "Origin: http://{host}\r\nSec-Fetch-Site: same-origin\r\n",
    "behind a proxy that renames it": "Origin: https://chat.example\r\nSec-Fetch-Site: same-origin\r\n",
    "an address that was typed in": "Sec-Fetch-Site: none\r\n",
    "an old browser's own page": "Origin: http://{host}\r\n",
}
V1_PATHS = ("/v1/embeddings", "/v1/audio/transcriptions", "/v1/load_lora_adapter", "/v1/traces")


async def ask(url: str, head: str) -> int:
    """The status of the answer to these bytes."""
    return raw_http.parse_status(await raw_http.send_bytes(url, head.encode()))


@pytest.mark.parametrize("port", PORTS)
async def test_rebinding(port: str, tmp_path: Path) -> None:
    """A name that was made to resolve to loopback is not answered to, by any port; its own names are."""
    async with open_port(port, tmp_path) as url:
        number = url.rpartition(":")[2]
        for host in EVIL_HOSTS:
            status = await ask(url, f"GET {PATHS[port]} HTTP/1.1\r\nHost: {host}\r\n\r\n")
            assert status in (400, 403, 421), host
        for host in GOOD_HOSTS:
            named = host.format(port=number)
            status = await ask(url, f"GET {PATHS[port]} HTTP/1.1\r\nHost: {named}\r\n\r\n")
            assert status == 200, host


@pytest.mark.parametrize("port", ("router", "serve"))
async def test_other_pages(port: str, tmp_path: Path) -> None:
    """A post from a page of another origin is refused below /v1, whatever its path; others pass."""
    async with open_port(port, tmp_path) as url:
        host = url.removeprefix("http://")
        for path in V1_PATHS:
            for name, more in EVIL_PAGES.items():
                data = POST.format(path=path, host=host, more=more.format(host=host))
                assert await ask(url, data) == 403, (path, name)
            for name, more in HONEST_CLIENTS.items():
                data = POST.format(path=path, host=host, more=more.format(host=host))
                assert await ask(url, data) != 403, (path, name)
        # Links may be followed, and answers are kept from the page by the browser.
        link = "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\n"
        assert await ask(url, f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n{link}\r\n") == 200


async def test_instances_see_nothing_of_them() -> None:
    """What is refused reaches no instance; names and pages that the operator allows do."""

    def allow(router_app: app.RouterApp) -> None:
        router_app.allowed_hosts = ("router.example",)
        router_app.cors_origins = ("https://chat.example",)

    async with fake_instances.run_routed_instances(prepare=allow) as (router, one):
        allowed = {"Host": "Router.Example:8000", "Origin": "https://chat.example"}
        for headers, status in (
            ({**allowed, "Sec-Fetch-Site": "cross-site"}, 200),
            ({**allowed, "Origin": "https://other.example"}, 403),
            ({**allowed, "Host": "other.example"}, 421),
        ):
            assert (await router.post_chat(**headers))[0] == status
        assert len(one.received) == 1
        async with router.client.get(f"{router.url}/metrics") as response:
            page = await response.text()
        for reason in ("host", "origin"):
            assert f'ttft_otel_router_refusals_total{{reason="{reason}"}} 1.0' in page


@pytest.mark.parametrize("port", ("router", "serve"))
async def test_host_is_required(port: str, tmp_path: Path) -> None:
    """HTTP/1.1 without Host, with two, or another version: 400; HTTP/1.0 needs none."""
    async with open_port(port, tmp_path) as url:
        for head in (
            "GET /healthz HTTP/1.1\r\n\r\n",
            "GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
            "GET /healthz HTTP/2.0\r\nHost: localhost\r\n\r\n",
            "GET /healthz HTTP/0.9\r\nHost: localhost\r\n\r\n",
        ):
            assert await ask(url, head) == 400, head
        assert await ask(url, "GET /healthz HTTP/1.0\r\n\r\n") == 200


async def test_old_clients_get_no_chunks() -> None:
    """An answer to HTTP/1.0 ends with the connection, and has the bytes of one in chunks."""
    bodies = []
    async with raw_http.run_instance() as one, fake_instances.run_router([one.url]) as router:
        for version in ("1.0", "1.1"):
            data = raw_http.encode_request("", b'{"model": "tiny", "stream": true}')
            data = data.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1)
            head, _, body = (await raw_http.send_bytes(router.url, data)).partition(b"\r\n\r\n")
            is_chunked = b"transfer-encoding: chunked" in head.lower()
            assert is_chunked is (version == "1.1")
            if is_chunked:
                parts = re.findall(rb"([0-9a-f]+)\r\n(.*?)\r\n(?=[0-9a-f]+\r\n)", body, re.DOTALL)
                body = b"".join(part for _, part in parts)
            bodies.append(body)
    assert bodies[0] and bodies[0] == bodies[1]


SERVED = (
    *("/", "/trace/1", "/api/requests", "/api/trace/1", "/api/summary", "/ttft_report/x"),
    "/stages.css",
)


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ReportServer]:
    """`ttft-otel serve` with this token."""
    with run_serve(tmp_path, 0, token=request.param) as server:
        yield server


def encode_password(text: str) -> str:
    """What a browser sends."""
    return f"Basic {base64.b64encode(text.encode()).decode()}"


GIVEN = [
    (None, False),
    ("", False),
    ("Bearer ", False),
    ("Bearer wrong", False),
    ("Bearer sesamö", True),
    ("bearer sesamö", True),
    (encode_password("anybody:sesamö"), True),
    (encode_password("sesamö:"), False),
    ("Basic sesamö", False),
    ("Basic a", False),
    ("Basic =", False),
]


@pytest.mark.parametrize("served", ["sesamö", ""], indirect=True)
async def test_serve_asks_for_its_token(served: ReportServer) -> None:
    """Every path of HTTP but the probes', and gRPC; without a token everybody is answered."""
    url = f"http://127.0.0.1:{served.http_port}"
    export = encode_export()
    async with aiohttp.ClientSession() as client:
        for given, is_right in GIVEN:
            headers = {} if given is None else {"Authorization": given}
            is_open = is_right or not served.options.token
            for path in SERVED:
                async with client.get(url + path, headers=headers) as response:
                    assert (response.status != 401) == is_open, (given, path)
                    if not is_open:
                        assert "Basic" in response.headers["WWW-Authenticate"]
            kind = {"Content-Type": "application/x-protobuf"}
            async with client.post(
                f"{url}/v1/traces", data=export, headers=headers | kind
            ) as response:
                assert response.status == (200 if is_open else 401), given
            async with client.get(f"{url}/healthz", headers=headers) as response:
                assert response.status == 200
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        call = channel.unary_unary(f"/{OTLP_TRACE_SERVICE}/Export")
        # Metadata are ASCII.
        given = (("authorization", encode_password("x:sesamö")),)
        await call(export, metadata=given)
        if served.options.token:
            for wrong in ((), (("authorization", "Bearer wrong"),)):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call(export, metadata=wrong)
                assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
        else:
            await call(export)
