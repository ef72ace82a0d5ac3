# SPDX-License-Identifier: Apache-2.0
"""A backend that keeps all it is sent: OTLP spans by gRPC in Tempo's place, metrics in Prometheus's.

Tests that ask what the collector makes of spans read it here, exactly and at once; real backends stand
behind the collector where a backend's behaviour matters.
"""

from __future__ import annotations

import gzip
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from ttft_otel.lab import ports
from ttft_otel.lab.recipes import HOST

# Overlay: spans come out soon after they went in.
QUICK = "yaml:exporters::otlp_grpc/tempo::sending_queue::batch::flush_timeout: 50ms"
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def plain(value: AnyValue) -> Any:
    """An attribute's value as Python knows it."""
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None


def attributes(pairs: Any) -> dict[str, Any]:
    """Attributes of a span, a point or a resource."""
    return {pair.key: plain(pair.value) for pair in pairs}


class Spans(grpc.GenericRpcHandler):
    """In Tempo's place; may be stopped and started again on its port, as Tempo may."""

    def __init__(self) -> None:
        self.port = ports.free()
        self.taken: list[bytes] = []
        self.read: list[ResourceSpans] = []
        self.parsed = 0
        self.server: grpc.Server | None = None
        self.start()

    @property
    def env(self) -> dict[str, str]:
        """Variables that a collector needs to find it."""
        return {"TTFT_TEMPO_OTLP": f"{HOST}:{self.port}"}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Take one request as bytes: to read them can wait."""
        if details.method != EXPORT:
            return None
        return grpc.unary_unary_rpc_method_handler(self.take)

    def take(self, body: bytes, _: grpc.ServicerContext) -> bytes:
        """Keep it."""
        self.taken.append(body)
        return ExportTraceServiceResponse().SerializeToString()

    def start(self) -> None:
        """Listen."""
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers((self,))
        self.server.add_insecure_port(f"{HOST}:{self.port}")
        self.server.start()

    def stop(self) -> None:
        """Be gone; what was taken stays readable."""
        if self.server:
            self.server.stop(0).wait()
            self.server = None

    def resources(self) -> list[ResourceSpans]:
        """Everything taken so far, with resources; each request is parsed once."""
        while self.parsed < len(self.taken):
            self.read += ExportTraceServiceRequest.FromString(
                self.taken[self.parsed]
            ).resource_spans
            self.parsed += 1
        return self.read

    def spans(self) -> list[Span]:
        """Everything taken so far."""
        return [
            span for each in self.resources() for scope in each.scope_spans for span in scope.spans
        ]

    def span(self, span_id: bytes) -> Span:
        """The only span of an id."""
        found = [span for span in self.spans() if span.span_id == span_id]
        assert len(found) == 1, (span_id.hex(), len(found))
        return found[0]

    def traces(self) -> dict[str, list[Span]]:
        """Everything taken so far, by trace id."""
        found: dict[str, list[Span]] = {}
        for span in self.spans():
            found.setdefault(span.trace_id.hex(), []).append(span)
        return found


class Metrics:
    """In Prometheus's place: keeps the last push of every series."""

    def __init__(self) -> None:
        self.points: dict[tuple[str, frozenset[tuple[str, Any]]], Any] = {}
        self.every: list[Any] = []  # points of histograms, all pushes
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                packed = self.headers.get("content-encoding") == "gzip"
                outer.take(gzip.decompress(body) if packed else body)
                answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer((HOST, 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    @property
    def env(self) -> dict[str, str]:
        """Variables that a collector needs to find it, and to push every second."""
        url = f"http://{HOST}:{self.server.server_port}"
        return {"TTFT_PROMETHEUS_URL": url, "TTFT_METRICS_INTERVAL": "1s"}

    def take(self, body: bytes) -> None:
        """Keep each series' newest point, labelled as Prometheus would: job and instance too."""
        for each in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            resource = attributes(each.resource.attributes)
            who = {"job": resource.get("service.name")}
            who |= {"instance": resource.get("service.instance.id")}
            for scope in each.scope_metrics:
                for metric in scope.metrics:
                    self.keep(metric, who)

    def keep(self, metric: Metric, who: dict[str, Any]) -> None:
        """All points of one metric."""
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            labels = frozenset((who | attributes(point.attributes)).items())
            self.points[metric.name, labels] = point
            if "histogram" in kind:
                self.every.append(point)

    def series(self, metric: str, **only: Any) -> list[tuple[dict[str, Any], Any]]:
        """Labels and newest point of every series of a metric; `only` with _ for . in names."""
        found = [
            (dict(labels), point)
            for (name, labels), point in list(self.points.items())
            if name == metric
        ]
        return [
            (labels, point)
            for labels, point in found
            if all(labels.get(key.replace("_", ".")) == value for key, value in only.items())
        ]

    def total(self, metric: str, field: str = "count", **only: Any) -> float:
        """Sum over series of a point's field: count or sum of histograms, as_int of counters."""
        return sum(getattr(point, field) for _, point in self.series(metric, **only))

    def exemplars(self) -> list[Any]:
        """All that came, of every histogram."""
        return [exemplar for point in list(self.every) for exemplar in point.exemplars]

    def close(self) -> None:
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
