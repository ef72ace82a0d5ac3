# SPDX-License-Identifier: Apache-2.0
"""Trace the pages and API of `ttft-otel serve` itself, where an OTLP endpoint is configured.

Not /v1/traces: a receiver that traces what it receives would send to itself without end. Uses a
tracer provider of its own, not the global one.
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
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from ttft_otel.exporter.otlp_exporter import build_span_exporter, is_endpoint_configured
from ttft_otel.tracing import settings

# Probes and files are asked for all day and say nothing about the page.
EXCLUDED_URLS: Final = "v1/traces,healthz,static"
SERVE_SERVICE: Final = "ttft-otel-serve"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def instrument_app(
    app: FastAPI, own_ports: Collection[int], env: Mapping[str, str] | None = None
) -> TracerProvider | None:
    """Instrument `app`; None when no endpoint is configured, or when it is this server itself.

    own_ports: ports of this server. env: by default os.environ.
    """
    source = os.environ if env is None else env
    if not is_endpoint_configured(source):
        return None
    chosen = settings.read_settings(source)
    # gRPC endpoints may be written without a scheme; "//" makes it a host.
    target = urlsplit(chosen.endpoint if "://" in chosen.endpoint else f"//{chosen.endpoint}")
    if target.hostname in _LOOPBACK and target.port in own_ports:
        return None  # the endpoint is this server: it is set for vLLM servers on this host
    provider = TracerProvider(resource=Resource.create({"service.name": SERVE_SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(build_span_exporter(chosen.protocol)))
    FastAPIInstrumentor.instrument_app(
        app,
        tracer_provider=provider,
        excluded_urls=EXCLUDED_URLS,
        exclude_spans=["send", "receive"],  # one span per request, not one per ASGI message
    )
    return provider
