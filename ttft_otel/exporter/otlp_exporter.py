# SPDX-License-Identifier: Apache-2.0
"""Build the SDK's OTLP exporters, for spans and metrics; batch_exporter.py and request_metrics.py ask.

The SDK is imported when an exporter is built, and reads the OTEL_EXPORTER_OTLP_* variables itself.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter

# By the variable that names a file, what differs if it was replaced; None where there is none.
TlsFiles: TypeAlias = dict[str, "tuple[int, int] | None"]


def build_span_exporter(protocol: str) -> SpanExporter:
    """The SDK's exporter for `protocol`: "grpc", anything else is HTTP."""
    exporter: SpanExporter = _import_exporters(protocol, "trace_exporter").OTLPSpanExporter()
    return exporter


def build_metric_exporter(protocol: str) -> MetricExporter:
    exporter: MetricExporter = _import_exporters(protocol, "metric_exporter").OTLPMetricExporter()
    return exporter


def _import_exporters(protocol: str, signal: str) -> Any:
    """The SDK's module, only that one: grpc alone takes 0.1 s and 15 MB."""
    transport = "grpc" if protocol == "grpc" else "http"
    return importlib.import_module(f"opentelemetry.exporter.otlp.proto.{transport}.{signal}")


def renew_exporter(exporter: Any, known: TlsFiles) -> TlsFiles:
    """Let an exporter of the SDK, which has failed, begin anew if a file was replaced since `known`.

    Returns the files of now: over gRPC the SDK reads them only once.
    """
    found = describe_tls_files()
    if found != known:
        exporter.shutdown()
        # As it was built above: all that it knows is in the environment.
        exporter.__init__()
    return found


def describe_tls_files() -> TlsFiles:
    """The files of OTEL_EXPORTER_OTLP_CERTIFICATE and its like: what tells each from one before it."""
    found: TlsFiles = {}
    for name, path in os.environ.items():
        if name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith(("CERTIFICATE", "CLIENT_KEY")):
            try:
                state = os.stat(path)
                found[name] = (state.st_ino, state.st_ctime_ns)
            except OSError:
                found[name] = None
    return found
