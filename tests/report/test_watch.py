# SPDX-License-Identifier: Apache-2.0
"""serve's own traces: pages and API only, and only where the operator asked."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing

import pytest
import trips
from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from trips import Served

from ttft_otel.report import schema, watch


def test_off() -> None:
    """Without an endpoint, or with our own one, nothing is instrumented."""
    app = FastAPI()
    assert watch.install(app, (4317, 4318), {}) is None
    own = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
    assert watch.install(app, (4317, 4318), own) is None


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_on(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    """Another collector gets one span per page, none of the ingestion, health or static files."""
    sink = serve()
    target = sink.http if protocol == "http/protobuf" else f"http://{sink.grpc}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", target)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    watched = serve()
    exporter = OTLPSpanExporter(endpoint=f"{watched.http}/v1/traces")
    exporter.export(trips.spans([trips.leg("mono", {"sample": 5})]))
    exporter.shutdown()
    for path in ("/healthz", "/static/style.css", "/api/summary", "/"):
        with urllib.request.urlopen(f"{watched.http}{path}", timeout=10) as answer:
            answer.read()
    for _ in range(50):
        time.sleep(0.1)
        with urllib.request.urlopen(f"{sink.http}/healthz", timeout=10) as answer:
            if json.load(answer)["stored"]["spans"] >= 2:
                break
    with closing(schema.read(sink.path)) as db:
        rows = db.execute("SELECT name, service FROM spans").fetchall()
    found = {name for name, _ in rows}
    assert found == {"GET /api/summary", "GET /"}
    assert {service for _, service in rows} == {watch.SERVICE}
