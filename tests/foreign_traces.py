# SPDX-License-Identifier: Apache-2.0
"""The golden traces of other products, for tests that read them back from a store or from Tempo.

tests/golden/foreign/ has what their own code made; tests/report/foreign/test_products.py says how.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind

from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_types import StoredSpan

GOLDEN = Path(__file__).parent / "golden" / "foreign"
FILES = ("vllm", "sglang", "dynamo")


def read_golden(name: str, begin_ns: int = 0) -> list[StoredSpan]:
    """The spans of a golden file; with begin_ns the first one begins then."""
    body = (GOLDEN / f"{name}.json").read_bytes()
    spans = otlp_decoder.decode_export(body, as_json=True).spans
    later = begin_ns - min(span.start_ns for span in spans) if begin_ns else 0
    return [
        replace(span, start_ns=span.start_ns + later, end_ns=span.end_ns + later) for span in spans
    ]


def to_sdk_span(span: StoredSpan) -> ReadableSpan:
    """The span as an SDK has it."""
    ids = int(span.trace_id, 16), int(span.span_id, 16)
    above = int(span.parent_id or "0", 16)
    return ReadableSpan(
        span.name,
        SpanContext(*ids, is_remote=False),
        SpanContext(ids[0], above, is_remote=True) if above else None,
        Resource(span.resource),
        span.attributes,
        kind=list(SpanKind)[max(span.kind - 1, 0)],
        instrumentation_scope=InstrumentationScope(span.scope),
        start_time=span.start_ns,
        end_time=span.end_ns,
    )
