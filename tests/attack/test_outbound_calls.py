# SPDX-License-Identifier: Apache-2.0
"""What the router itself asks of instances: no answer leads elsewhere, fills memory or holds the loop."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gzip
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest
from router import fake_instances, raw_http

from ttft_otel.router.routing.prefixes.prefix_source import parse_block_size
from ttft_otel.router.upstream.instance_pool import InstancePool

ROUTER: Final = Path(__file__).parents[2] / "ttft_otel" / "router"
QUERY_CLIENT: Final = "upstream/connection_pool.py"
# Modules and names by which an answer could be asked for without the one client's bounds.
CLIENT_MODULES: Final = ("http.client", "httpx", "requests", "urllib.request", "urllib3")
CLIENT_NAMES: Final = ("ClientSession", "ClientResponse", "request")
MODELS: Final = "/v1/models"
JSON_TYPE: Final = "Content-Type: application/json"
OWN_MODEL: Final = b'{"object": "list", "data": [{"id": "tiny"}]}'
Write = Callable[[asyncio.StreamWriter], Awaitable[None]]


def find_clients(source: str) -> list[str]:
    """The lines of `source` that import an HTTP client or use aiohttp's session."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        else:
            continue
        forbidden = {*CLIENT_MODULES, *(f"aiohttp.{name}" for name in CLIENT_NAMES)}
        found += [f"line {node.lineno}: {name}" for name in names if name in forbidden]
    return found


SECOND_CLIENTS: Final = (
    "import aiohttp\nsession = aiohttp.ClientSession()",
    "from aiohttp import ClientSession",
    "import urllib.request",
    "from urllib import request",
    "import httpx",
)


def test_the_router_has_one_client() -> None:
    """No file of the router uses aiohttp's session or another client; where one does, it is found."""
    assert all(map(find_clients, SECOND_CLIENTS))
    found = {
        str(path.relative_to(ROUTER)): lines
        for path in sorted(ROUTER.rglob("*.py"))
        if (lines := find_clients(path.read_text("utf-8")))
    }

    assert not found, (
        f"ask by {QUERY_CLIENT}, which bounds answers and follows no redirect: {found}"
    )
    assert (ROUTER / QUERY_CLIENT).exists()


class Asked:
    """A server that answers by path; `counts` has how often each path was asked, `bodies` what was sent."""

    def __init__(self, **answers: bytes | Write) -> None:
        self.answers = {f"/{name}": answer for name, answer in answers.items()}
        self.counts: Counter[str] = Counter()
        self.bodies: list[bytes] = []
        self.sent_bytes = 0

    async def handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one request and close, unless the answer is a function, which ends by itself."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            path = head.split(" ")[1]
            (length, *_) = re.findall(r"(?i)content-length: (\d+)", head + "content-length: 0")
            self.bodies.append(await reader.readexactly(int(length)))
            self.counts[path] += 1
            answer = self.answers.get(
                path.rpartition("/")[2] and f"/{path.rpartition('/')[2]}", b""
            )
            if callable(answer):
                await answer(writer)
            else:
                writer.write(answer or encode_answer(b"", 404))
            await writer.drain()
        writer.close()

    async def flood(self, writer: asyncio.StreamWriter, head: bytes, part: bytes) -> None:
        """Send `head`, then `part` without end."""
        writer.write(head)
        while True:
            writer.write(part)
            await writer.drain()
            self.sent_bytes += len(part)


def encode_answer(body: bytes, status: int = 200, *more: str) -> bytes:
    """A whole answer."""
    lines = (
        f"HTTP/1.1 {status} X",
        f"Content-Length: {len(body)}",
        "Connection: close",
        JSON_TYPE,
        *more,
    )
    return "\r\n".join((*lines, "", "")).encode() + body


def build_cards(number: int, name: str = "m") -> bytes:
    """A list of so many models, as small as it can be."""
    return json.dumps({"data": [{"id": f"{name}{at}"} for at in range(number)]}).encode()


@contextlib.asynccontextmanager
async def run_router(*servers: Asked) -> AsyncIterator[fake_instances.RunningRouter]:
    """A router before these instances, which has probed each of them."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(raw_http.listen(each.handle_connection))
            for each in servers
        ]
        router = await stack.enter_async_context(
            fake_instances.run_router(urls, probe_interval_s=60.0)
        )
        yield router


async def list_names(router: fake_instances.RunningRouter) -> list[str]:
    """The models that a client is shown."""
    status, _, shown = await router.get_json(MODELS)
    return [card["id"] for card in shown["data"]] if status == 200 else []


@pytest.mark.parametrize("status", [302, 307])
async def test_redirects_lead_nowhere(status: int) -> None:
    """An instance that redirects makes the router ask nobody else; one that answers itself is listed."""
    secret = Asked(
        models=encode_answer(b'{"data": [{"id": "from-inside"}]}'), health=encode_answer(b"")
    )
    async with raw_http.listen(secret.handle_connection) as url:
        redirects = {
            name: encode_answer(b"", status, f"Location: {url}/{name}")
            for name in ("models", "health", "metrics", "version")
        }
        async with run_router(Asked(**redirects), Asked(models=encode_answer(OWN_MODEL))) as router:
            assert await list_names(router) == ["tiny"]
            await router.get_json("/readyz")
    assert not secret.counts


HEAD: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK: Final = b"8000\r\n" + b" " * 32768 + b"\r\n"


async def test_an_endless_answer_is_given_up() -> None:
    """Of an endless list of models little is read; a list of 50 models beside it is read."""
    endless = Asked(health=encode_answer(b""))
    endless.answers["/models"] = lambda writer: endless.flood(writer, HEAD, CHUNK)
    async with run_router(endless, Asked(models=encode_answer(build_cards(50)))) as router:
        names = await asyncio.wait_for(list_names(router), 20)
    assert len(names) == 50
    # What sockets and streams buffer is more than what the router takes.
    assert endless.sent_bytes < 16 << 20


async def test_an_endless_health_page_is_not_read() -> None:
    """A probe wants the status only."""
    endless = Asked(models=encode_answer(OWN_MODEL))
    endless.answers["/health"] = lambda writer: endless.flood(writer, HEAD, CHUNK)
    async with run_router(endless) as router:
        status, _, said = await router.get_json("/readyz")
    assert (status, said["status"]) == (200, "ready")
    assert endless.sent_bytes < 16 << 20


@pytest.mark.parametrize(
    ("body", "more", "is_read"),
    [
        (build_cards(1000), (), True),
        (build_cards(1025), (), False),
        (build_cards(1, "m" * 200), (), True),
        (build_cards(1, "m" * 300), (), False),
        (b'{"data": ' + b"[" * 100_000, (), False),
        (b'{"data": [{"id": {"a": 1}}, {"id": "tiny"}]}', (), True),
        (gzip.compress(build_cards(1000), mtime=0), ("Content-Encoding: gzip",), True),
        (gzip.compress(b" " * (2 << 20) + OWN_MODEL, mtime=0), ("Content-Encoding: gzip",), False),
        (gzip.compress(build_cards(10), mtime=0)[:-9], ("Content-Encoding: gzip",), False),
        (build_cards(10), ("Content-Encoding: br",), False),
        (b" " * (2 << 20) + OWN_MODEL, (), False),
    ],
)
async def test_lists_of_models_are_bounded(
    body: bytes, more: tuple[str, ...], is_read: bool
) -> None:
    """Number and length of names, bytes also when unpacked; an honest list is read."""
    server = Asked(models=encode_answer(body, 200, *more), health=encode_answer(b""))
    async with run_router(server) as router:
        names = await list_names(router)
        (instance,) = router.fleet
        assert (instance.models is not None) == is_read == bool(names)


async def test_many_clients_ask_once() -> None:
    """100 requests for the models at one time are one question to each instance, and all are answered."""
    servers = [Asked(models=encode_answer(build_cards(2, f"{at}-"))) for at in range(4)]
    async with run_router(*servers) as router:
        await asyncio.sleep(0.1)
        before = [each.counts[MODELS] for each in servers]
        names = await asyncio.gather(*(list_names(router) for _ in range(100)))
        asked = [each.counts[MODELS] - count for each, count in zip(servers, before, strict=True)]
    assert all(len(each) == 8 for each in names)
    # One round, and a second one where the machine is so slow that the first one is old by then.
    assert max(asked) <= 2


async def test_another_key_asks_anew() -> None:
    """The control: what one client's key was answered is not given to another one's."""
    server = Asked(models=encode_answer(OWN_MODEL))
    async with run_router(server) as router:
        # The probe of a new instance asks, too.
        while not server.counts[MODELS]:
            await asyncio.sleep(0.01)
        before = server.counts[MODELS]
        for key in "abc":
            await router.get_json(MODELS, authorization=f"Bearer {key}")
        assert server.counts[MODELS] - before == 3


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        (b'block_size="16",cache_dtype="auto"', 16),
        (b'cache_dtype="auto",block_size="32"', 32),
        (b'block_size="None"', 0),
        (b'hash_block_size="16"', 0),
        (b"a" * (1 << 20), 0),
        (b"a," * (1 << 19), 0),
    ],
    ids=["first", "last", "none", "another", "a long word", "many words"],
)
def test_labels_of_any_length(labels: bytes, wanted: int) -> None:
    """The block size is read from the labels of /metrics, and what they are is looked through once."""
    page = b"# TYPE x gauge\nvllm:cache_config_info{" + labels + b'} 1\nx{block_size="8"} 1\n'
    start_s = time.thread_time()
    assert parse_block_size(page) == wanted
    assert time.thread_time() - start_s < 1


async def test_prompts_go_to_nobody_else() -> None:
    """A render endpoint that redirects gets the prompt, the place to which it points does not."""
    from ttft_otel.router.routing.prompts.prompt_reader import EnginePromptReader
    from ttft_otel.router.types import parse_instance_url
    from ttft_otel.router.upstream.connection_pool import QueryClient

    other = Asked(render=encode_answer(b"[]"))
    async with raw_http.listen(other.handle_connection) as url:
        server = Asked(render=encode_answer(b"", 307, f"Location: {url}/render"))
        async with raw_http.listen(server.handle_connection) as own_url, QueryClient() as queries:
            pool = InstancePool({"mono": [parse_instance_url(own_url, "mono")]})
            reader = EnginePromptReader(None, pool)
            await reader.start(queries)
            prompt = await reader.read_prompt("/v1/completions", "m", b'{"prompt": "secret"}', 16)
            await reader.close()
    assert prompt is None and reader.counts["failed-refused"] == 1
    assert b"secret" in server.bodies[0] and not other.bodies
