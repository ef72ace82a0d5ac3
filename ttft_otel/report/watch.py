# SPDX-License-Identifier: Apache-2.0
"""Trace serve's own pages and API where the operator named an endpoint; server.py gives the app.

Never /v1/traces: a receiver that traces what it receives would feed itself. Private provider.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

from fastapi import FastAPI
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from ttft_otel import names, settings

QUIET: Final = "v1/traces,healthz,static"
SERVICE: Final = "ttft-otel-serve"
_HERE: Final = ("127.0.0.1", "localhost", "::1")


def install(
    app: FastAPI, own: Collection[int], env: Mapping[str, str] | None = None
) -> TracerProvider | None:
    """Instrument the control plane. own: our ports; None when there is nowhere to send."""
    source = os.environ if env is None else env
    if not (source.get(names.ENV_TRACES_ENDPOINT) or source.get(names.ENV_ENDPOINT)):
        return None
    found = settings.read(source)
    target = urlsplit(found.endpoint if "://" in found.endpoint else f"//{found.endpoint}")
    if target.hostname in _HERE and target.port in own:
        return None  # the endpoint is meant for the servers, and it is us
    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(_exporter(found.protocol)))
    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, excluded_urls=QUIET, exclude_spans=["send", "receive"]
    )
    return provider


def _exporter(protocol: str) -> SpanExporter:
    """The SDK's own exporter, which reads the standard variables itself."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http()
