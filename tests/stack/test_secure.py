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
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from lab.certificates import make_certificate
from lab.stack.stack_parts import COLLECTOR_CONFIG
from tests.stack import known_requests
from tests.stack.running_stack import RunningCollector, StackStarter

TOKEN = "a-token-for-tests"
SECURE = COLLECTOR_CONFIG.with_name("secure.yaml")
SCALE_OUT = COLLECTOR_CONFIG.parent / "scale-out"
SECURED = (
    (COLLECTOR_CONFIG, SECURE),
    (SCALE_OUT / "tier1.yaml", SECURE, SCALE_OUT / "tier1-secure.yaml"),
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


@pytest.fixture(scope="module", params=SECURED, ids=("one-tier", "first-tier"))
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


@pytest.fixture(scope="module")
def spans() -> list[ReadableSpan]:
    """Some spans of ours."""
    return known_requests.build_known_spans(
        known_requests.build_known_requests()[:2], 1_700_000_000_000_000_000
    )


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


def test_http(
    guarded: SecuredCollector, spans: list[ReadableSpan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP spans arrive with the exporter's own settings: endpoint, certificate, token as a header."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests lets them win over a session's
        monkeypatch.delenv(name, raising=False)
    exporter = OTLPSpanExporter(
        endpoint=guarded.https,
        certificate_file=str(guarded.certificate),
        headers={"authorization": f"Bearer {TOKEN}"},
    )
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()


def test_grpc(
    guarded: SecuredCollector, spans: list[ReadableSpan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gRPC spans arrive with the same settings."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(guarded.certificate))
    exporter = GrpcExporter(
        endpoint=f"https://{guarded.collector.grpc}",
        headers={"authorization": f"Bearer {TOKEN}"},
        timeout=10,
    )
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()


@pytest.mark.parametrize("authorization", (None, "Bearer wrong", TOKEN))
def test_strangers(guarded: SecuredCollector, authorization: str | None) -> None:
    """Without the token, or with another token or scheme, exports are refused."""
    assert post_empty_export(guarded, authorization) == 401
    assert post_empty_export(guarded, f"Bearer {TOKEN}") == 200


def test_plain(guarded: SecuredCollector) -> None:
    """Without TLS there is no response at all."""
    plain = guarded.https.replace("https://", "http://")
    request = urllib.request.Request(plain, data=b"", method="POST")
    with pytest.raises(urllib.error.HTTPError) as found:
        urllib.request.urlopen(request, timeout=10)
    with found.value as answer:
        assert answer.code == 400
