# SPDX-License-Identifier: Apache-2.0
"""A backend that keeps all it receives: spans by gRPC in place of Tempo, metrics in place of Prometheus.

Tests and kube_trial.py read here what a collector sends on, without a backend's delay; where the backend's
own behaviour matters, real ones stand behind the collector.
"""

from __future__ import annotations

import gzip
from collections import defaultdict
from concurrent import futures
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
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from lab import free_ports
from lab.http_servers import HttpServerThread, SilentHandler
from lab.server_commands import HOST

# Overlay: spans come out soon after they went in.
QUICK_FLUSH_CONFIG = "yaml:exporters::otlp_grpc/tempo::sending_queue::batch::flush_timeout: 50ms"
EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def to_python_value(value: AnyValue) -> Any:
    """An attribute's value as Python knows it."""
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None


def to_attributes(pairs: Any) -> dict[str, Any]:
    """Attributes of a span, a point or a resource."""
    return {pair.key: to_python_value(pair.value) for pair in pairs}


class SpanSink(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Takes spans in place of Tempo, from now on; can be stopped and started again on the same port."""

    def __init__(self, host: str = HOST, port: int = 0) -> None:
        self.host = host
        self.port = port or free_ports.find_free_port()
        self.taken: list[bytes] = []
        self.read: list[ResourceSpans] = []
        self.by_trace: defaultdict[str, list[tuple[Resource, Span]]] = defaultdict(list)
        self.parsed = 0
        self.called: set[str] = set()  # methods, also those that it refuses
        self.server: grpc.Server | None = None
        self.start()

    @property
    def env(self) -> dict[str, str]:
        """Variables that a collector needs to find it."""
        return {"TTFT_TEMPO_OTLP": f"{self.host}:{self.port}"}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Accept one request as bytes; they are parsed when somebody asks for them."""
        self.called.add(details.method)
        if details.method != EXPORT_METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(self.store_request)

    def store_request(self, body: bytes, _: grpc.ServicerContext) -> bytes:
        """Keep the request."""
        self.taken.append(body)
        return ExportTraceServiceResponse().SerializeToString()

    def start(self) -> None:
        """Begin to listen."""
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers((self,))
        self.server.add_insecure_port(f"{self.host}:{self.port}")
        self.server.start()

    def stop(self) -> None:
        """Stop listening; what was received can still be read."""
        if self.server:
            self.server.stop(0).wait()
            self.server = None

    def list_resources(self) -> list[ResourceSpans]:
        """Everything taken so far, with resources; each request is parsed once."""
        while self.parsed < len(self.taken):
            request = ExportTraceServiceRequest.FromString(self.taken[self.parsed])
            self.parsed += 1
            self.read += request.resource_spans
            for each in request.resource_spans:
                for span in (span for scope in each.scope_spans for span in scope.spans):
                    self.by_trace[span.trace_id.hex()].append((each.resource, span))
        return self.read

    def list_pod_spans(self, trace_id: str) -> list[tuple[str, Span]]:
        """Spans of a trace with the pod that each is from, "" where none is named."""
        self.list_resources()
        return [
            (to_attributes(resource.attributes).get("k8s.pod.name", ""), span)
            for resource, span in self.by_trace.get(trace_id, ())
        ]

    def list_spans(self) -> list[Span]:
        """Everything taken so far."""
        return [
            span
            for each in self.list_resources()
            for scope in each.scope_spans
            for span in scope.spans
        ]

    def get_span(self, span_id: bytes) -> Span:
        """The only span of an id."""
        found = [span for span in self.list_spans() if span.span_id == span_id]
        assert len(found) == 1, (span_id.hex(), len(found))
        return found[0]

    def group_by_trace(self) -> dict[str, list[Span]]:
        """Everything taken so far, by trace id."""
        self.list_resources()
        return {trace: [span for _, span in found] for trace, found in self.by_trace.items()}


class MetricSink:
    """Takes metrics in place of Prometheus, from now on; keeps the last push of every series."""

    def __init__(self, host: str = HOST, port: int = 0) -> None:
        self.points: dict[tuple[str, frozenset[tuple[str, Any]]], Any] = {}
        self.points_by_series: list[Any] = []  # points of histograms, all pushes
        outer = self

        class Handler(SilentHandler):
            def do_POST(self) -> None:
                body = self.read_body()
                packed = self.headers.get("content-encoding") == "gzip"
                outer.store_push(gzip.decompress(body) if packed else body)
                answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_answer(200, answer, content_type="application/x-protobuf")

        self.server = HttpServerThread(Handler, host, port)

    @property
    def env(self) -> dict[str, str]:
        """Variables that a collector needs to find it, and to push every second."""
        return {"TTFT_PROMETHEUS_URL": self.server.url, "TTFT_METRICS_INTERVAL": "1s"}

    def store_push(self, body: bytes) -> None:
        """Keep each series' newest point, labelled as Prometheus would: job and instance too."""
        for each in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            resource = to_attributes(each.resource.attributes)
            who = {"job": resource.get("service.name")}
            who |= {"instance": resource.get("service.instance.id")}
            for scope in each.scope_metrics:
                for metric in scope.metrics:
                    self.store_metric(metric, who)

    def store_metric(self, metric: Metric, who: dict[str, Any]) -> None:
        """All points of one metric."""
        kind = metric.WhichOneof("data") or ""
        for point in getattr(metric, kind).data_points:
            labels = frozenset((who | to_attributes(point.attributes)).items())
            self.points[metric.name, labels] = point
            if "histogram" in kind:
                self.points_by_series.append(point)

    def get_series(self, metric: str, **only: Any) -> list[tuple[dict[str, Any], Any]]:
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

    def sum_field(self, metric: str, field: str = "count", **only: Any) -> float:
        """Sum over series of a point's field: count or sum of histograms, as_int of counters."""
        return sum(getattr(point, field, 0) for _, point in self.get_series(metric, **only))

    def list_exemplars(self) -> list[Any]:
        """All that came, of every histogram."""
        return [exemplar for point in list(self.points_by_series) for exemplar in point.exemplars]

    def close(self) -> None:
        """Stop listening."""
        self.server.close()
