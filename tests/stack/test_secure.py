# SPDX-License-Identifier: Apache-2.0
"""A collector with collector/secure.yaml, for other hosts: it accepts only TLS with the right token."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
    OTLPSpanExporter as GrpcExporter,
)
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from lab.certificates import make_certificate
from lab.stack.stack_parts import COLLECTOR_CONFIG
from tests.stack import known_requests
from tests.stack.running_stack import RunningCollector, StackStarter

TOKEN = "a-token-for-tests"
SECURE = COLLECTOR_CONFIG.with_name("secure.yaml")
SCALE_OUT = COLLECTOR_CONFIG.parent / "scale-out"
SECURED = (
    pytest.param((COLLECTOR_CONFIG, SECURE), id="one-tier"),
    pytest.param(
        (SCALE_OUT / "tier1.yaml", SECURE, SCALE_OUT / "tier1-secure.yaml"),
        id="first-tier",
        marks=pytest.mark.full,
    ),
)


@dataclass(frozen=True)
class SecuredCollector:
    """A collector behind TLS, and the certificate that its clients need."""

    collector: RunningCollector
    certificate: Path

    @property
    def https(self) -> str:
        """Where traces go."""
        return self.collector.http.replace("http://", "https://") + "/v1/traces"


@pytest.fixture(scope="module", params=SECURED)
def guarded(
    bench: StackStarter, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> SecuredCollector:
    """A collector of one tier, or a first of two, with secure.yaml and a certificate of its own."""
    folder = tmp_path_factory.mktemp("secrets")
    certificate, key = make_certificate(folder)
    token = folder / "token"
    token.write_text(TOKEN + "\n", "utf-8")
    env = {"TTFT_OTLP_CERT": certificate, "TTFT_OTLP_KEY": key, "TTFT_OTLP_TOKEN": token}
    collector = bench.start_collector(
        *request.param, env={name: str(path) for name, path in env.items()}
    )
    return SecuredCollector(collector, certificate)


def post_empty_export(guarded: SecuredCollector, authorization: str | None) -> int:
    """The status that an empty export over TLS gets."""
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


def test_exporters(guarded: SecuredCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans arrive with the exporters' own settings: endpoint, certificate, token as a header."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests lets them win over a session's
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(guarded.certificate))
    headers = {"authorization": f"Bearer {TOKEN}"}
    rows = known_requests.build_known_requests()[:2]
    spans = known_requests.build_known_spans(rows, 1_700_000_000_000_000_000)
    for exporter in (
        OTLPSpanExporter(endpoint=guarded.https, headers=headers),
        GrpcExporter(endpoint=f"https://{guarded.collector.grpc}", headers=headers, timeout=10),
    ):
        assert exporter.export(spans) is SpanExportResult.SUCCESS
        exporter.shutdown()


def test_strangers(guarded: SecuredCollector) -> None:
    """Without the token, or with another token or scheme, exports are refused; so is all without TLS."""
    assert post_empty_export(guarded, f"Bearer {TOKEN}") == 200
    for authorization in (None, "Bearer wrong", TOKEN):
        assert post_empty_export(guarded, authorization) == 401
    plain = guarded.https.replace("https://", "http://")
    request = urllib.request.Request(plain, data=b"", method="POST")
    with pytest.raises(urllib.error.HTTPError) as found:
        urllib.request.urlopen(request, timeout=10)
    with found.value as answer:
        assert answer.code == 400
