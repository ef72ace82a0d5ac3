# SPDX-License-Identifier: Apache-2.0
"""Instances that lead the router elsewhere, fill its memory, hold its loop, or cannot prove who they are.

No answer to what the router itself asks does so. https:// instances: what their certificates must be, and
files that are replaced while the router runs.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gzip
import json
import re
import shutil
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import grpc
import pytest
from aiohttp import web
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.trace.export import SpanExportResult
from router import fake_instances, raw_http
from router.fake_instances import FakeInstance, InstancePlan, RunningRouter, find_unused_url

from lab.certificates import make_certificate, sign_certificate
from ttft_otel.exporter import export_worker
from ttft_otel.exporter.export_worker import BatchExporter
from ttft_otel.exporter.otlp_exporter import build_metric_exporter, build_span_exporter
from ttft_otel.exporter.record_queue import ExporterCounters
from ttft_otel.exporter.request_metrics import MetricPusher, RequestMetrics, SeriesRegistry
from ttft_otel.exporter.span_batch import ResourceCache
from ttft_otel.router.routing.prefixes.prefix_source import parse_block_size
from ttft_otel.router.upstream import connection_pool
from ttft_otel.router.upstream.connection_pool import ClientTls
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


REQUESTS: Final = 12
REMEDY: Final = "see --upstream-ca"
NAME: Final = "vllm.internal"
Pair = tuple[Path, Path]


class Authorities(NamedTuple):
    """Two of them, and what they have signed: certificates with their keys."""

    old: Pair
    new: Pair
    signed: dict[str, Pair]


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    """Made once: keys take a moment."""
    folder = tmp_path_factory.mktemp("authorities")
    old, new = (make_certificate(folder, "DNS:authority", stem) for stem in ("old", "new"))
    signed = {
        "right": sign_certificate(old, "right"),
        "named": sign_certificate(old, "named", f"DNS:{NAME}"),
        "expired": sign_certificate(old, "expired", days=-1),
        "renewed": sign_certificate(new, "renewed"),
        "client": sign_certificate(old, "client", "DNS:router"),
        "next client": sign_certificate(new, "next-client", "DNS:router"),
    }
    return Authorities(old, new, signed)


@contextlib.asynccontextmanager
async def run_encrypted_app(
    app: web.Application, own: Pair, clients: Path | None, port: int
) -> AsyncIterator[str]:
    """A server that shows this certificate and, if asked, wants one of an authority in `clients`; its URL."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=clients)
    context.load_cert_chain(*own)
    context.verify_mode = ssl.CERT_REQUIRED if clients else ssl.CERT_NONE
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=context, reuse_address=True)
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def run_encrypted(
    own: Pair, clients: Path | None = None, port: int = 0
) -> AsyncIterator[FakeInstance]:
    """An instance behind such a server."""
    instance = FakeInstance(InstancePlan({}))
    async with run_encrypted_app(instance.build_app(), own, clients, port) as instance.url:
        yield instance


def find_port() -> int:
    """For servers that come one after the other."""
    return int(find_unused_url().rpartition(":")[2])


async def post(router: RunningRouter) -> int:
    """The status of a request."""
    return (await router.post_chat())[0]


@pytest.mark.parametrize(
    ("shown", "trusted", "problem"),
    [
        ("right", "", "unable to get local issuer|self-signed"),
        ("right", "new", "unable to get local issuer"),
        ("named", "old", "IP address mismatch"),
        ("expired", "old", "certificate has expired"),
    ],
)
async def test_refused(
    authorities: Authorities,
    shown: str,
    trusted: str,
    problem: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An instance that cannot prove who it is gets no byte of a request: another one does, or nobody."""
    tls = ClientTls(str(getattr(authorities, trusted)[0])) if trusted else None
    async with run_encrypted(authorities.signed[shown]) as bad:
        async with fake_instances.run_router([bad.url], tls=tls) as router:
            status, _, body = await router.post_chat()
            assert status == 502 and b"ClientConnectorCertificateError" in body
            assert (await router.get_json("/readyz"))[0] == 503
        async with fake_instances.run_instance(InstancePlan({})) as good:
            urls = [bad.url, good.url]
            async with fake_instances.run_router(urls, tls=tls) as router:
                assert [await post(router) for _ in range(REQUESTS)] == [200] * REQUESTS
            assert len(good.received) == REQUESTS
    assert not bad.received
    assert caplog.text.count(REMEDY) >= 1
    assert any(each in caplog.text for each in problem.split("|"))


async def test_another_name(authorities: Authorities) -> None:
    """--upstream-name: where instances are found by addresses, and have certificates for a name."""
    async with run_encrypted(authorities.signed["named"]) as one:
        for name, expected in ((NAME, 200), ("elsewhere", 502)):
            tls = ClientTls(str(authorities.old[0]), name=name)
            async with fake_instances.run_router([one.url], tls=tls) as router:
                assert await post(router) == expected


def replace(path: Path, content: Path) -> None:
    """As an operator, or kubelet, does it: all at once."""
    draft = path.with_suffix(".draft")
    shutil.copy(content, draft)
    draft.replace(path)


async def test_a_new_authority(
    authorities: Authorities, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is replaced, then broken, then right again: connections follow it, and forget the old one."""
    trusted, port = tmp_path / "ca.crt", find_port()
    shutil.copy(authorities.old[0], trusted)
    right, renewed = authorities.signed["right"], authorities.signed["renewed"]
    tls = ClientTls(str(trusted))
    async with fake_instances.run_router([f"https://127.0.0.1:{port}"], tls=tls) as router:
        async with run_encrypted(right, port=port):
            assert await post(router) == 200
            assert (await router.get_json("/v1/models"))[2]["data"][0]["id"] == "tiny"
        async with run_encrypted(renewed, port=port):
            assert await post(router) == 502
            replace(trusted, authorities.new[0])
            assert await post(router) == 200
        assert caplog.text.count("which was replaced") == 1
        trusted.write_text("no certificate")
        async with run_encrypted(renewed, port=port):
            assert [await post(router) for _ in range(2)] == [200, 200]
        assert caplog.text.count("cannot be used") == 1
        trusted.unlink()
        async with run_encrypted(renewed, port=port):
            assert await post(router) == 200
        async with run_encrypted(right, port=port):
            assert await post(router) == 502
            replace(trusted, authorities.old[0])
            assert await post(router) == 200


async def test_a_certificate_of_our_own(
    authorities: Authorities, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An instance that asks for one: none, another authority's, the right one, and one that replaces it."""
    shown, key, port = tmp_path / "tls.crt", tmp_path / "tls.key", find_port()
    url, right = f"https://127.0.0.1:{port}", authorities.signed["right"]
    trusted = str(authorities.old[0])
    async with run_encrypted(right, authorities.old[0], port) as one:
        async with fake_instances.run_router([url], tls=ClientTls(trusted)) as router:
            assert await post(router) == 502
        assert not one.received and "(--upstream-cert)" in caplog.text
    for path, content in zip((shown, key), authorities.signed["client"], strict=True):
        shutil.copy(content, path)
    tls = ClientTls(trusted, str(shown), str(key))
    async with fake_instances.run_router([url], tls=tls) as router:
        async with run_encrypted(right, authorities.old[0], port):
            assert await post(router) == 200
        async with run_encrypted(right, authorities.new[0], port):
            assert await post(router) == 502
            # One after the other, as no file system replaces two at once; between both nothing changes.
            replace(shown, authorities.signed["next client"][0])
            assert await post(router) == 502
            assert "cannot be used" in caplog.text
            replace(key, authorities.signed["next client"][1])
            assert await post(router) == 200


async def test_no_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that accepts connections and never shows a certificate is given up: nothing was sent."""
    monkeypatch.setattr(connection_pool, "CONNECT_TIMEOUT_S", 0.3)
    received = bytearray()

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(4096):
            received.extend(part)
        writer.close()

    async with (
        raw_http.listen(keep_silent) as url,
        fake_instances.run_instance(InstancePlan({})) as good,
    ):
        silent = url.replace("http:", "https:")
        async with fake_instances.run_router([silent]) as router:
            assert (await asyncio.wait_for(router.post_chat(), 10))[0] == 503
        async with fake_instances.run_router([silent, good.url]) as router:
            assert await asyncio.wait_for(post(router), 10) == 200
            assert await asyncio.wait_for(post(router), 10) == 200
    assert b"tiny" not in received


async def test_spans_follow_the_file(
    authorities: Authorities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exports over HTTP verify the collector by the file that is there when they connect."""
    trusted, port = tmp_path / "ca.crt", find_port()
    shutil.copy(authorities.old[0], trusted)
    # The HTTP client would take these for the file.
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"https://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(trusted))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    exporter = build_span_exporter("http/protobuf")

    async def take(_: web.Request) -> web.Response:
        answer = web.Response()
        answer.force_close()  # each export opens a connection
        return answer

    async def export_to(own: Pair) -> list[bool]:
        """Whether exports succeed, before and after the file is that of the new authority."""
        app = web.Application()
        app.router.add_post("/v1/traces", take)
        results = []
        async with run_encrypted_app(app, own, None, port):
            for _ in range(2):
                results.append(await asyncio.to_thread(exporter.export, []))
                replace(trusted, authorities.new[0])
        return [each is SpanExportResult.SUCCESS for each in results]

    assert (await export_to(authorities.signed["right"]))[0]
    shutil.copy(authorities.old[0], trusted)
    assert await export_to(authorities.signed["renewed"]) == [False, True]
    exporter.shutdown()


def build_senders(url: str) -> tuple[Callable[[], bool], Callable[[], bool]]:
    """Both of an exporter process, over gRPC; each says whether what it sent was taken."""
    spans = BatchExporter(build_span_exporter("grpc"), ExporterCounters(), url, Event())
    pusher = MetricPusher(
        RequestMetrics(SeriesRegistry(ResourceCache(0), False), ExporterCounters()),
        build_metric_exporter("grpc"),
        url,
    )

    def send_spans() -> bool:
        spans.export_batch([])
        return not spans.is_failing

    return send_spans, lambda: pusher._try_export(MetricsData([]))


@contextlib.contextmanager
def run_grpc_collector(own: Pair, clients: Path, port: int) -> Iterator[None]:
    """What takes everything over gRPC, and wants a certificate of an authority in `clients`."""

    def take(_: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda *_: b"")

    server = grpc.server(ThreadPoolExecutor(2), handlers=[SimpleNamespace(service=take)])
    pair = (own[1].read_bytes(), own[0].read_bytes())
    credentials = grpc.ssl_server_credentials([pair], clients.read_bytes(), True)
    server.add_secure_port(f"127.0.0.1:{port}", credentials)
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


@pytest.mark.full
@pytest.mark.parametrize("sender", [0, 1], ids=["spans", "metrics"])
def test_exports_over_grpc_follow_the_files(
    authorities: Authorities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sender: int
) -> None:
    """Another authority of the collector, then a certificate of ours, are used once their files are there."""
    trusted, shown, key = (tmp_path / name for name in ("ca.crt", "tls.crt", "tls.key"))
    client, port = authorities.signed["client"], find_port()
    for path, content in ((trusted, authorities.old[0]), (shown, client[0]), (key, client[1])):
        shutil.copy(content, path)
    url = f"https://127.0.0.1:{port}"
    for name, value in (
        ("ENDPOINT", url), ("CERTIFICATE", trusted), ("CLIENT_CERTIFICATE", shown),
        ("CLIENT_KEY", key), ("TIMEOUT", 2),
    ):  # fmt: skip
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", str(value))
    monkeypatch.setattr(export_worker, "RETRY_PAUSES_S", (0.1,))
    send = build_senders(url)[sender]
    right, renewed = authorities.signed["right"], authorities.signed["renewed"]
    with run_grpc_collector(right, authorities.old[0], port):
        assert send()
    with run_grpc_collector(renewed, authorities.old[0], port):
        assert not send()
        replace(trusted, authorities.new[0])
        assert any(send() for _ in range(2))
    with run_grpc_collector(renewed, authorities.new[0], port):
        assert not send()
        for path, content in zip((shown, key), authorities.signed["next client"], strict=True):
            replace(path, content)
        assert any(send() for _ in range(2))
