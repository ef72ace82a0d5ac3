# SPDX-License-Identifier: Apache-2.0
"""The SDK's tracer and BatchSpanProcessor, for the same spans: the reference of exporter.py and hooks.py.

    python -m benchmarks.sdk_exporter

A process of its own, with the OTEL_* variables of the exporter. It reads commands from standard input and
answers each on standard output with one line: "start" when the first span is exported, "requests N" when so
many requests are; the answer is the number of spans so far. Spans are prepared as plain data before the first
command is read, so that the reference pays for making and exporting them only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from time import process_time_ns
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Status, Tracer, set_span_in_context

from benchmarks.exporter_records import build_request_spans
from ttft_otel.exporter.otlp_exporter import build_span_exporter
from ttft_otel.model.names import env_names, span_names

REQUESTS_PER_FLUSH: Final = 64  # then wait: more than 2,048 spans would be dropped from its queue


def make_spans(tracer: Tracer, templates: list[ReadableSpan]) -> None:
    """Make one request's spans as instrumentation would: start, attributes, end; parents by context."""
    # Parents by their ids in the templates: a live span has an id of its own.
    contexts: dict[int, Context] = {}
    for template in templates:
        parent = contexts.get(template.parent.span_id) if template.parent else None
        span = tracer.start_span(
            template.name,
            # An empty context, not None: None would take the one that is current.
            context=parent or Context(),
            kind=template.kind,
            attributes=template.attributes,
            start_time=template.start_time,
        )
        if not template.status.is_unset:
            span.set_status(Status(template.status.status_code))
        contexts[template.context.span_id] = set_span_in_context(span, Context())
        span.end(template.end_time)


def build_provider(exporter: SpanExporter) -> TracerProvider:
    """A provider that samples everything and exports in the background, as the SDK does by default."""
    provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class EncodingExporter(SpanExporter):
    """Encodes spans as the SDK's OTLP exporters do, and sends them nowhere."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encode and forget."""
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def build_exported_spans(requests: int, spans: int) -> Callable[[], int]:
    """A loop in which the SDK makes and encodes `spans` for each of so many requests; it returns CPU ns."""
    provider = build_provider(EncodingExporter())
    tracer = provider.get_tracer(span_names.SCOPE)
    templates = build_request_spans(0)[:spans]

    def run_requests() -> int:
        began_ns = process_time_ns()  # of all threads: the processor exports in one of its own
        for number in range(1, requests + 1):
            make_spans(tracer, templates)
            if number % REQUESTS_PER_FLUSH == 0:
                provider.force_flush()
        provider.force_flush()
        return process_time_ns() - began_ns

    return run_requests


def serve_commands() -> None:
    """Answer commands until standard input ends."""
    protocol = os.environ.get(env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, "http/protobuf")
    provider = build_provider(build_span_exporter(protocol))
    tracer = provider.get_tracer(span_names.SCOPE)
    # All requests from the same templates: what is measured is the SDK, which keeps nothing of them.
    templates = build_request_spans(0)
    made = 0
    for line in sys.stdin:
        word, _, number = line.partition(" ")
        for count in range(1, int(number or 1) + 1):
            make_spans(tracer, templates if word == "requests" else templates[:1])
            made += len(templates) if word == "requests" else 1
            # 64 requests of 15 spans are 960, less than half of the queue.
            if count % REQUESTS_PER_FLUSH == 0:
                # Nothing is left for later: the caller reads the CPU time when it has the answer.
                provider.force_flush()
        provider.force_flush()
        sys.stdout.write(f"{made}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve_commands()
