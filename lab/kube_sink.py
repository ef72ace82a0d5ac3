# SPDX-License-Identifier: Apache-2.0
"""What the collector in a cluster sends on: spans by gRPC as to Tempo, metrics by HTTP as to Prometheus.

kube_trial.py starts both on the node's address and asks which traces have arrived.
"""

from __future__ import annotations

import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

EXPORT_METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class TraceArrivals(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Takes spans over gRPC and keeps for each trace the names of its spans and their pods."""

    def __init__(self, address: str, port: int) -> None:
        self.address = address
        self.port = port
        self._lock = threading.Lock()
        self._spans: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(f"{address}:{port}")

    def start(self) -> None:
        """Begin to take."""
        self._server.start()

    def stop(self) -> None:
        """Take no more."""
        self._server.stop(0).wait()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """One method: exports of spans."""
        if details.method != EXPORT_METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(self.store_request)

    def store_request(self, body: bytes, _: grpc.ServicerContext) -> bytes:
        """Keep what one request brings."""
        found = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for resource in found.resource_spans:
                attributes = {
                    pair.key: pair.value.string_value for pair in resource.resource.attributes
                }
                pod = attributes.get("k8s.pod.name", "")
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    values = {
                        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "int_value")
                        for pair in span.attributes
                    }
                    self._spans.setdefault(span.trace_id.hex(), []).append((span.name, pod, values))
        return ExportTraceServiceResponse().SerializeToString()

    def list_spans(self, trace_id: str) -> list[tuple[str, str, dict[str, Any]]]:
        """Spans of a trace that have arrived: name, pod, attributes."""
        with self._lock:
            return list(self._spans.get(trace_id, ()))


class MetricArrivals:
    """Counts the requests with metrics that come over HTTP, by path."""

    def __init__(self, address: str, port: int) -> None:
        self.counts: dict[str, int] = {}
        counts = self.counts

        class Handler(BaseHTTPRequestHandler):
            """Says that all is well."""

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                counts[self.path] = counts.get(self.path, 0) + 1
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer((address, port), Handler)

    def start(self) -> None:
        """Begin to take."""
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Take no more."""
        self._server.shutdown()
        self._server.server_close()
