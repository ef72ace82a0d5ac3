# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a real OTLP receiver on the loopback, records, and a search for exporter processes."""

from __future__ import annotations

import gzip
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from full_record import make_short_record
from opentelemetry import context
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import ResourceMetrics
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.model import record


@pytest.fixture(autouse=True)
def own_context() -> Iterator[None]:
    """The exporter stops instrumentation in its process for good; here it must not outlive a test."""
    before = context.get_current()
    yield
    context.attach(before)


class OtlpCollector:
    """An OTLP/HTTP receiver that answers with `status`, or not at all while `hang` is set."""

    def __init__(self, port: int = 0) -> None:
        self.status = 200
        self.hang = threading.Event()
        self.release = threading.Event()
        self.received: list[ResourceSpans] = []
        self.pushes: list[list[ResourceMetrics]] = []  # of metrics
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(SilentHandler):
            def do_POST(self) -> None:
                body = self.read_body()
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                if outer.hang.is_set():
                    outer.release.wait(30)
                    return
                outer.headers.append(self.list_headers())
                if outer.status == 200 and self.path == "/v1/metrics":
                    pushed = ExportMetricsServiceRequest.FromString(body).resource_metrics
                    outer.pushes.append(list(pushed))
                elif outer.status == 200:
                    outer.received += ExportTraceServiceRequest.FromString(body).resource_spans
                self.send_answer(outer.status)

        self.server = HttpServerThread(Handler, port=port)
        self.port, self.url = self.server.server_port, self.server.url

    def spans(self) -> list[Span]:
        """Everything accepted so far."""
        return _list_spans(self.received)

    def close(self) -> None:
        """Stop listening; what was received stays readable."""
        self.release.set()
        self.server.close()


def _list_spans(received: list[ResourceSpans]) -> list[Span]:
    return [span for each in received for scope in each.scope_spans for span in scope.spans]


class GrpcCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP/gRPC receiver that accepts everything."""

    def __init__(self) -> None:
        self.received: list[ResourceSpans] = []
        self.server = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.url = f"http://127.0.0.1:{self.port}"
        self.server.start()

    def Export(self, request: ExportTraceServiceRequest, context: object) -> object:
        """Called by gRPC for each request."""
        self.received += request.resource_spans
        return ExportTraceServiceResponse()

    def list_spans(self) -> list[Span]:
        """Everything accepted so far."""
        return _list_spans(self.received)


@pytest.fixture
def grpc_collector() -> Iterator[GrpcCollector]:
    """A gRPC receiver that accepts everything."""
    made = GrpcCollector()
    yield made
    made.server.stop(None).wait()


@pytest.fixture
def restored_loggers() -> Iterator[None]:
    """The loggers that the exporter's worker changes, as they were, after the test."""
    loggers = [logging.getLogger(name) for name in ("opentelemetry", "urllib3", "requests", "grpc")]
    yield
    for logger in loggers:
        logger.handlers.clear()
        logger.propagate = True


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    """A receiver that accepts everything."""
    made = OtlpCollector()
    yield made
    made.close()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a check is true; the last assertion speaks for itself."""

    def wait(check: Callable[[], object], seconds: float = 10.0) -> None:
        until = time.monotonic() + seconds
        while not (found := check()) and time.monotonic() < until:
            time.sleep(0.02)
        assert found

    return wait


@pytest.fixture
def find_exporters() -> Callable[[int], list[int]]:
    """Process ids of the exporters that a host started and that still run."""

    def find_running(host: int) -> list[int]:
        process_ids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            # Its arguments: a socket, a page, the host, and what the host tells of its engine.
            if b"ttft_otel.exporter" in words and words[-3] == b"%d" % host and state != "Z":
                process_ids.append(int(folder.name))
        return process_ids

    return find_running


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


@pytest.fixture
def make_collector() -> Iterator[Callable[[int], OtlpCollector]]:
    """Start a receiver on a given port, now."""
    collectors: list[OtlpCollector] = []

    def start_collector(port: int) -> OtlpCollector:
        collectors.append(OtlpCollector(port))
        return collectors[-1]

    yield start_collector
    for collector in collectors:
        collector.close()
