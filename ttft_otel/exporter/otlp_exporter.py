# SPDX-License-Identifier: Apache-2.0
"""Build the SDK's OTLP exporters, for spans and metrics; batch_exporter.py and request_metrics.py ask.

The SDK is imported when an exporter is built, and reads the OTEL_EXPORTER_OTLP_* variables itself.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.trace.export import SpanExporter


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


class TlsFiles:
    """The files of OTEL_EXPORTER_OTLP_CERTIFICATE and its like, which the SDK over gRPC reads only once."""

    def __init__(self) -> None:
        self._known = _describe_tls_files()

    def renew_exporter(self, exporter: Any) -> None:
        """Let an exporter of the SDK, which has failed, begin anew if a file was replaced."""
        found = _describe_tls_files()
        if found != self._known:
            self._known = found
            exporter.shutdown()
            # As it was built above: all that it knows is in the environment.
            exporter.__init__()


def _describe_tls_files() -> dict[str, tuple[int, int] | None]:
    """What tells a file from the one that was there before, by the variable that names it."""
    found: dict[str, tuple[int, int] | None] = {}
    for name, path in os.environ.items():
        if name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith(("CERTIFICATE", "CLIENT_KEY")):
            try:
                state = os.stat(path)
                found[name] = (state.st_ino, state.st_ctime_ns)
            except OSError:
                found[name] = None
    return found
