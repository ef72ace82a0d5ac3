# SPDX-License-Identifier: Apache-2.0
"""Query a stack's Tempo and Prometheus as dashboards do, for tests and benchmarks."""

from __future__ import annotations

from typing import Any

from ttft_otel.stack.stack_queries import BackendQueryError, fetch_json


def fetch_trace_spans(tempo: str, trace_id: str) -> list[dict[str, Any]]:
    """All spans of one trace as OTLP JSON; empty while Tempo does not know it."""
    try:
        document = fetch_json(f"{tempo}/api/traces/{trace_id}")
    except BackendQueryError as error:
        # Not yet is no error: a trace is found only after Tempo has flushed or indexed it.
        if "answered 404" in str(error):
            return []
        raise
    return [
        span
        for batch in document["batches"]
        for scope in batch["scopeSpans"]
        for span in scope["spans"]
    ]


def query_instant(prometheus: str, query: str, time: float | None = None) -> list[dict[str, Any]]:
    """The result of a PromQL `query`: [{"metric": {...}, "value": [time, "1.5"]}]."""
    found = fetch_json(f"{prometheus}/api/v1/query", query=query, time=time)
    vector: list[dict[str, Any]] = found["data"]["result"]
    return vector


def sum_instant_query(prometheus: str, query: str) -> float | None:
    """The sum of the values of a PromQL `query`; None when there are none."""
    # No series is not 0: a counter that nobody has counted is missing.
    samples = query_instant(prometheus, query)
    return sum(float(each["value"][1]) for each in samples) if samples else None
