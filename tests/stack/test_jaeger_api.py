# SPDX-License-Identifier: Apache-2.0
"""286 known requests of every kind in Jaeger 2 and in VictoriaTraces, which has the same API.

docs/guides/dashboards.md has the result as rows of its table.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from full_record import FULL_RECORD, change_full_record
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan

from lab import free_ports
from lab.server_commands import HOST
from lab.stack import binaries, program_pins, stack_parts
from tests.stack import known_requests, other_programs
from tests.stack.known_requests import KnownRequest, KnownTruth
from tests.stack.running_stack import StackStarter, wait_until
from ttft_otel.exporter.spans import span_builder
from ttft_otel.model.names import keys
from ttft_otel.stack import stack_queries

pytestmark = pytest.mark.full

BUILT_TOOLS: Final = (program_pins.JAEGER_TOOL,)
HOLDER: Final = "a" * 32  # the trace of the request that held up FULL_RECORD's


@dataclass
class FilledTraces:
    """The URL of Jaeger's API, with the rows since a Unix time, and spans of a request that was held up."""

    api: str
    rows: list[KnownRequest]
    start: float
    linked: Sequence[ReadableSpan] = ()

    def search_traces(self, tags: Mapping[str, str], **more: object) -> set[str]:
        """Ids of traces that have a span with these attributes, in any service."""
        more["start"], more["end"] = round((self.start - 300) * 1e6), round(time.time() * 1e6)
        return {
            trace["traceID"].zfill(32)
            for service in stack_queries.fetch_json(f"{self.api}/api/services")["data"] or ()
            for trace in stack_queries.fetch_json(
                f"{self.api}/api/traces", service=service, tags=json.dumps(tags), limit=200, **more
            )["data"]
        }

    def has_spans(self, trace_id: str, names: Counter[str]) -> bool:
        """Whether a trace has spans of exactly these names."""
        try:
            found = stack_queries.fetch_json(f"{self.api}/api/traces/{trace_id}")["data"]
        except stack_queries.BackendQueryError:  # Jaeger's word for none
            return False
        return names == Counter(span["operationName"] for trace in found for span in trace["spans"])


def start_jaeger(bench: StackStarter) -> tuple[str, str]:
    """A Jaeger with its traces in memory; the URLs of its OTLP receiver's path, and of its API."""
    binary = other_programs.find_tool(BUILT_TOOLS[0])
    otlp, query, grpc = (free_ports.find_free_port() for _ in range(3))
    config = {
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query"],
            "pipelines": {
                "traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}
            },
            "telemetry": {"metrics": {"level": "none"}},
        },
        "extensions": {
            "jaeger_storage": {"backends": {"kept": {"memory": {"max_traces": 10_000}}}},
            "jaeger_query": {
                "storage": {"traces": "kept"},
                "http": {"endpoint": f"{HOST}:{query}"},
                "grpc": {"endpoint": f"{HOST}:{grpc}"},
            },
        },
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"{HOST}:{otlp}"}}}},
        "exporters": {"jaeger_storage_exporter": {"trace_storage": "kept"}},
    }
    words = ("--config", f"yaml:{json.dumps(config)}")
    url = other_programs.start_program(
        bench, "jaeger", binary, query, *words, health="/api/services"
    )
    return f"{stack_parts.format_loopback_url(otlp)}/v1/traces", url


def start_victoriatraces(bench: StackStarter) -> tuple[str, str]:
    """A VictoriaTraces, named or on PATH; the same URLs."""
    program = program_pins.VICTORIATRACES
    if not (found := binaries.find_named_program(program) or shutil.which(program.name)):
        pytest.skip(
            "no VictoriaTraces: its releases have a program for Linux; put it on PATH, "
            f"or name it in {program.variable}"
        )
    url = other_programs.start_victoria(bench, program.name, Path(found))
    return f"{url}/insert/opentelemetry/v1/traces", f"{url}/select/jaeger"


@pytest.fixture(scope="module", params=[start_jaeger, start_victoriatraces])
def filled(request: pytest.FixtureRequest, bench: StackStarter) -> FilledTraces:
    """One of them, with all rows' spans: one exporter more in the collector."""
    endpoint, api = request.param(bench)
    overlay = {
        "exporters": {"otlp_http/other": {"traces_endpoint": endpoint}},
        "service": {"pipelines": {"traces/tempo": {"exporters": ["otlp_http/other"]}}},
    }
    collector = bench.start_collector(stack_parts.COLLECTOR_CONFIG, f"yaml:{json.dumps(overlay)}")
    rows = known_requests.build_known_requests()[::7]
    made = FilledTraces(api, rows, time.time())
    known_requests.send_rows(collector.http, made.rows)
    record = change_full_record(start_ns=time.time_ns())
    made.linked = span_builder.build_spans(record, Resource({SERVICE_NAME: "linked"}))
    known_requests.export_spans(collector.http, made.linked)
    return made


def test_traces_are_whole(filled: FilledTraces) -> None:
    """Every span of a request that several servers had is in one trace, under its name."""
    rows = [row for row in filled.rows if row.routed][:20]
    expected: dict[str, Counter[str]] = {}
    for span in known_requests.build_known_spans(rows, time.time_ns()):
        assert span.context
        expected.setdefault(f"{span.context.trace_id:032x}", Counter())[span.name] += 1
    for trace_id, names in expected.items():
        wait_until(partial(filled.has_spans, trace_id, names))
    assert min(sum(names.values()) for names in expected.values()) > 30


def test_links(filled: FilledTraces) -> None:
    """A queue's span names the request that held it up, beside its parent, and no other span does."""
    trace_id = FULL_RECORD.trace_id
    names = Counter(span.name for span in filled.linked)
    wait_until(partial(filled.has_spans, trace_id, names))
    (trace,) = stack_queries.fetch_json(f"{filled.api}/api/traces/{trace_id}")["data"]
    linked = [
        (span["operationName"], reference["traceID"])
        for span in trace["spans"]
        for reference in span["references"]
        if reference["traceID"] != trace_id
    ]
    assert linked == [("prefill.queue", HOLDER)]


def test_traces_are_found(filled: FilledTraces) -> None:
    """By the request's id; the slow ones by name and duration; and by what the collector derives."""
    truth, outermost = KnownTruth(filled.rows), {keys.OUTERMOST: "true"}
    for row in truth.all[:5]:
        wait_until(partial(filled.search_traces, {keys.REQUEST_ID: row.request_id}), interval_s=1.0)
        assert filled.search_traces({keys.REQUEST_ID: row.request_id}) == {row.trace_id}
    slow = {row.trace_id for row in truth.list_slow_rows()}
    assert slow
    assert filled.search_traces(outermost, operation="ttft", minDuration="1000ms") == slow
    slowest = truth.list_slow_rows()[0]
    derived = {**outermost, "ttft_ms": str(slowest.ttft // 1000)}
    assert slowest.trace_id in filled.search_traces(derived, operation="ttft")
