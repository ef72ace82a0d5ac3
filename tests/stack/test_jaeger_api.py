# SPDX-License-Identifier: Apache-2.0
"""286 known requests of every kind in VictoriaTraces, asked through its API, which is Jaeger's."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from lab.stack import binaries, program_pins, stack_parts
from tests.stack import known_requests, other_programs
from tests.stack.known_requests import KnownRequest, KnownTruth
from tests.stack.running_stack import StackStarter, wait_until
from ttft_otel.model.names import keys
from ttft_otel.stack import stack_queries

pytestmark = pytest.mark.full


@dataclass
class FilledTraces:
    """The URL of Jaeger's API, with the rows since a Unix time."""

    api: str
    rows: list[KnownRequest]
    start: float

    def search_traces(self, tags: Mapping[str, str], **more: object) -> set[str]:
        """Ids of traces that have a span with these attributes, in any service."""
        more["start"], more["end"] = round((self.start - 300) * 1e6), round(time.time() * 1e6)
        return {
            trace["traceID"].zfill(32)
            for service in stack_queries.fetch_json(f"{self.api}/api/services")["data"]
            for trace in stack_queries.fetch_json(
                f"{self.api}/api/traces", service=service, tags=json.dumps(tags), limit=200, **more
            )["data"]
        }

    def has_spans(self, trace_id: str, names: Counter[str]) -> bool:
        """Whether a trace has spans of exactly these names."""
        found = stack_queries.fetch_json(f"{self.api}/api/traces/{trace_id}")["data"]
        return names == Counter(span["operationName"] for trace in found for span in trace["spans"])


@pytest.fixture(scope="module")
def filled(bench: StackStarter) -> FilledTraces:
    """A VictoriaTraces, named or on PATH, with all rows' spans: one exporter more in the collector."""
    program = program_pins.VICTORIATRACES
    if not (found := binaries.find_named_program(program) or shutil.which(program.name)):
        pytest.skip(
            "no VictoriaTraces: its releases have a program for Linux; put it on PATH, "
            f"or name it in {program.variable}"
        )
    url = other_programs.start_victoria(bench, program.name, Path(found))
    endpoint = f"{url}/insert/opentelemetry/v1/traces"
    overlay = {
        "exporters": {"otlp_http/victoriatraces": {"traces_endpoint": endpoint}},
        "service": {"pipelines": {"traces/tempo": {"exporters": ["otlp_http/victoriatraces"]}}},
    }
    collector = bench.start_collector(stack_parts.COLLECTOR_CONFIG, f"yaml:{json.dumps(overlay)}")
    rows = known_requests.build_known_requests()[::7]
    made = FilledTraces(f"{url}/select/jaeger", rows, time.time())
    known_requests.send_rows(collector.http, made.rows)
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
