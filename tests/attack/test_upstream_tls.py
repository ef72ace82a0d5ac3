# SPDX-License-Identifier: Apache-2.0
"""https:// instances: what their certificates must be, and files that are replaced while the router runs."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
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
from ttft_otel.exporter import batch_exporter
from ttft_otel.exporter.batch_exporter import BatchExporter
from ttft_otel.exporter.exporter_counters import ExporterCounters
from ttft_otel.exporter.metrics.metric_series import SeriesRegistry
from ttft_otel.exporter.metrics.request_metrics import MetricPusher, RequestMetrics
from ttft_otel.exporter.otlp_exporter import build_metric_exporter, build_span_exporter
from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.router.upstream import connection_pool
from ttft_otel.router.upstream.connection_pool import ClientTls

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
    monkeypatch.setattr(batch_exporter, "RETRY_PAUSES_S", (0.1,))
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
