# SPDX-License-Identifier: Apache-2.0
"""What a browser sends for a hostile page, at every HTTP port of ours: DNS rebinding, and other origins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from router import fake_instances, raw_http

from attack.test_heads import PATHS, PORTS, open_port
from ttft_otel.router.control import app

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
            data = raw_http.encode_request("ok", b'{"model": "tiny", "stream": true}')
            data = data.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1)
            head, _, body = (await raw_http.send_bytes(router.url, data)).partition(b"\r\n\r\n")
            is_chunked = b"transfer-encoding: chunked" in head.lower()
            assert is_chunked is (version == "1.1")
            if is_chunked:
                parts = re.findall(rb"([0-9a-f]+)\r\n(.*?)\r\n(?=[0-9a-f]+\r\n)", body, re.DOTALL)
                body = b"".join(part for _, part in parts)
            bodies.append(body)
    assert bodies[0] and bodies[0] == bodies[1]
