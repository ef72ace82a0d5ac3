# SPDX-License-Identifier: Apache-2.0
"""Build the SDK's OTLP exporters, for spans and metrics; batch_exporter.py and request_metrics.py ask.

The SDK is imported when an exporter is built, and reads the OTEL_EXPORTER_OTLP_* variables itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter


def build_span_exporter(protocol: str) -> SpanExporter:
    """The SDK's exporter for `protocol`: "grpc", anything else is HTTP."""
    # Import only the one that is needed: grpc alone takes 0.1 s and 15 MB.
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    return http.OTLPSpanExporter()


def build_metric_exporter(protocol: str) -> MetricExporter:
    """The SDK's exporter of metrics for `protocol`: "grpc", anything else is HTTP."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc

        return grpc.OTLPMetricExporter()
    from opentelemetry.exporter.otlp.proto.http import metric_exporter as http

    return http.OTLPMetricExporter()
