# SPDX-License-Identifier: Apache-2.0
"""A collector that other hosts reach: collector/secure.yaml lets in who knows the token, over TLS only."""

from __future__ import annotations

import ssl
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
    OTLPSpanExporter as GrpcExporter,
)
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from tests.stack import known
from tests.stack.bench import Bench, Collector
from ttft_otel.lab.stack.parts import COLLECTOR_CONFIG

TOKEN = "a-token-for-tests"
SECURE = COLLECTOR_CONFIG.with_name("secure.yaml")


@dataclass(frozen=True)
class Guarded:
    """A collector behind TLS, and what its friends have."""

    collector: Collector
    certificate: Path

    @property
    def https(self) -> str:
        """Where traces go."""
        return self.collector.http.replace("http://", "https://") + "/v1/traces"


@pytest.fixture(scope="module")
def guarded(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Guarded:
    """A collector with config.yaml and secure.yaml, and a certificate of its own."""
    folder = tmp_path_factory.mktemp("secrets")
    certificate, key, token = (folder / name for name in ("cert.pem", "key.pem", "token"))
    token.write_text(TOKEN + "\n", "utf-8")
    words = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=collector")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    out = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run(("openssl", "req", *words, *names, *out), check=True, capture_output=True)
    env = {"TTFT_OTLP_CERT": certificate, "TTFT_OTLP_KEY": key, "TTFT_OTLP_TOKEN": token}
    collector = bench.collector(
        COLLECTOR_CONFIG, SECURE, env={name: str(path) for name, path in env.items()}
    )
    return Guarded(collector, certificate)


@pytest.fixture(scope="module")
def spans() -> list[ReadableSpan]:
    """Some spans of ours."""
    return known.spans(known.table()[:2], 1_700_000_000_000_000_000)


def status(guarded: Guarded, authorization: str | None) -> int:
    """What an empty export over TLS is answered with."""
    headers = {"content-type": "application/x-protobuf"}
    if authorization:
        headers["authorization"] = authorization
    request = urllib.request.Request(guarded.https, data=b"", headers=headers)
    context = ssl.create_default_context(cafile=str(guarded.certificate))
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_http(guarded: Guarded, spans: list[ReadableSpan], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter's own settings get spans in: endpoint, certificate, and the token as a header."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests lets them win over a session's
        monkeypatch.delenv(name, raising=False)
    exporter = OTLPSpanExporter(
        endpoint=guarded.https,
        certificate_file=str(guarded.certificate),
        headers={"authorization": f"Bearer {TOKEN}"},
    )
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()


def test_grpc(guarded: Guarded, spans: list[ReadableSpan], monkeypatch: pytest.MonkeyPatch) -> None:
    """So do the same settings over gRPC."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(guarded.certificate))
    exporter = GrpcExporter(
        endpoint=f"https://{guarded.collector.grpc}",
        headers={"authorization": f"Bearer {TOKEN}"},
        timeout=10,
    )
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()


@pytest.mark.parametrize("authorization", (None, "Bearer wrong", TOKEN))
def test_strangers(guarded: Guarded, authorization: str | None) -> None:
    """Without the token, with another, or with another scheme, nothing gets in."""
    assert status(guarded, authorization) == 401
    assert status(guarded, f"Bearer {TOKEN}") == 200


def test_plain(guarded: Guarded) -> None:
    """Without TLS there is no answer that a token could be read from."""
    plain = guarded.https.replace("https://", "http://")
    request = urllib.request.Request(plain, data=b"", method="POST")
    with pytest.raises(urllib.error.HTTPError) as found:
        urllib.request.urlopen(request, timeout=10)
    with found.value as answer:
        assert answer.code == 400
