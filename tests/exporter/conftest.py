# SPDX-License-Identifier: Apache-2.0
"""Fixtures: real OTLP receivers on the loopback, records, and a search for exporter processes."""

from __future__ import annotations

import gzip
import logging
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from opentelemetry import context
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tracing_fakes import make_short_record

from lab.http_servers import HttpServerThread, SilentHandler
from lab.otlp_sinks import SpanSink, to_attributes
from ttft_otel.model import record

UNPACK: Final[dict[str, Callable[[bytes], bytes]]] = {
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
    "": bytes,
}


@pytest.fixture(autouse=True)
def own_context() -> Iterator[None]:
    """The exporter stops instrumentation in its process for good; here it must not outlive a test."""
    before = context.get_current()
    yield
    context.attach(before)


class OtlpCollector:
    """An OTLP/HTTP receiver, with TLS if there are certificates; keeps what it answers with 200.

    status: of its answers. delay_s: before each of them. hang: while it is set there is none.
    headers: by the signal, with the path.
    """

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.status = 200
        self.delay_s = 0.0
        self.hang = threading.Event()
        self.release = threading.Event()
        self.headers: dict[str, list[dict[str, str]]] = {"traces": [], "metrics": []}
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        outer = self

        class Handler(SilentHandler):
            def do_POST(self) -> None:
                body = UNPACK[self.headers.get("content-encoding", "")](self.read_body())
                if outer.hang.is_set():
                    outer.release.wait(30)
                    return
                time.sleep(outer.delay_s)
                signal = "metrics" if "metrics" in self.path else "traces"
                outer.headers[signal].append(self.list_headers() | {"path": self.path})
                if outer.status == 200 and signal == "traces":
                    outer.traces.append(ExportTraceServiceRequest.FromString(body))
                elif outer.status == 200:
                    outer.metrics.append(ExportMetricsServiceRequest.FromString(body))
                self.send_answer(outer.status)

        self.server = HttpServerThread(Handler, port=port)
        self.url = self.server.url
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
            self.url = self.url.replace("http:", "https:")

    @property
    def resource(self) -> dict[str, Any]:
        """Attributes of the first resource that came with spans."""
        return to_attributes(self.traces[0].resource_spans[0].resource.attributes)

    @property
    def spans(self) -> list[Span]:
        """All spans that came."""
        groups = [each for request in self.traces for each in request.resource_spans]
        return [span for each in groups for span in each.scope_spans[0].spans]

    def list_pushes(self) -> list[list[Metric]]:
        """The metrics of each push."""
        return [
            [metric for each in push.resource_metrics for metric in each.scope_metrics[0].metrics]
            for push in self.metrics
        ]

    def close(self) -> None:
        """Stop listening; what was received stays readable."""
        self.release.set()
        self.server.close()


@pytest.fixture
def grpc_collector() -> Iterator[SpanSink]:
    """A receiver for gRPC, which refuses metrics."""
    made = SpanSink()
    yield made
    made.stop()


@pytest.fixture
def restored_loggers() -> Iterator[None]:
    """The loggers that the exporter's worker changes, as they were, after the test."""
    loggers = [logging.getLogger(name) for name in ("opentelemetry", "urllib3", "requests", "grpc")]
    yield
    for logger in loggers:
        logger.handlers.clear()
        logger.propagate = True


@pytest.fixture(scope="module")
def make_collector() -> Iterator[Callable[..., OtlpCollector]]:
    """Start a receiver, now; arguments of OtlpCollector."""
    made: list[OtlpCollector] = []

    def start_collector(port: int = 0, tls: ssl.SSLContext | None = None) -> OtlpCollector:
        made.append(OtlpCollector(port, tls))
        return made[-1]

    yield start_collector
    for each in made:
        each.close()


@pytest.fixture
def collector(make_collector: Callable[[], OtlpCollector]) -> Iterator[OtlpCollector]:
    """A receiver that accepts everything."""
    made = make_collector()
    yield made
    made.close()


@pytest.fixture
def make_record() -> Callable[[int], record.Record]:
    """Small records of four spans: server, ttft, two stages; ids made from their number."""

    def build_record(number: int = 0) -> record.Record:
        return make_short_record(
            trace_id=f"{number + 1:032x}",
            span_id=f"{number + 1:016x}",
            request_id=f"request-{number}",
            ttft=record.Ttft(
                f"{number + 1 + (1 << 40):016x}",
                "ttft",
                *(0, 900),
                {"receive": 100, "preprocess": 800},
                unattributed=0,
                clamped=0,
                pieces=(
                    record.Piece("stage", "receive", 0, 100),
                    record.Piece("stage", "preprocess", 100, 900),
                ),
            ),
            server=record.Server("POST /v1/completions", 2000, 200),
        )

    return build_record


@pytest.fixture
def unused_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
