# SPDX-License-Identifier: Apache-2.0
"""Traces of `ttft-otel serve` itself: pages and API only, and only where an endpoint is configured."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing

import pytest
import sample_records
from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from sample_records import RunningServer

from ttft_otel.report import report_server
from ttft_otel.report.store import database_schema
from ttft_otel.report.store.trace_reader import TraceReader


def test_off() -> None:
    """Without an endpoint, or with our own one, nothing is instrumented."""
    app = FastAPI()
    assert report_server.instrument_app(app, (4317, 4318), {}) is None
    own = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
    assert report_server.instrument_app(app, (4317, 4318), own) is None


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_on(
    start_report_server: Callable[..., RunningServer],
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
) -> None:
    """Another collector gets one span per page, none of the ingestion, health or static files."""
    sink = start_report_server()
    target = sink.http if protocol == "http/protobuf" else f"http://{sink.grpc}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", target)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    watched = start_report_server()
    exporter = OTLPSpanExporter(endpoint=f"{watched.http}/v1/traces")
    exporter.export(sample_records.make_spans([sample_records.make_short_record()]))
    exporter.shutdown()
    for path in ("/healthz", "/static/style.css", "/api/summary", "/"):
        with urllib.request.urlopen(f"{watched.http}{path}", timeout=10) as answer:
            answer.read()
    for _ in range(50):
        time.sleep(0.1)
        with urllib.request.urlopen(f"{sink.http}/healthz", timeout=10) as answer:
            if json.load(answer)["stored"]["spans"] >= 2:
                break
    with closing(database_schema.open_for_reading(sink.path)) as db:
        traces = db.execute("SELECT id, trace_id FROM traces").fetchall()
        spans = [
            span for row in traces for span in TraceReader(db, row[0], row[1].hex()).list_spans()
        ]
    assert {span.name for span in spans} == {"GET /api/summary", "GET /"}
    assert {span.service for span in spans} == {report_server.SERVE_SERVICE}
