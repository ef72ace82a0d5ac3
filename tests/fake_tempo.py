# SPDX-License-Identifier: Apache-2.0
"""A Tempo of the tests on a real loopback socket: it stores OTLP exports, searches, and fails as told.

Its search knows the conditions that tempo_source.py writes; tests/stack/test_tempo_source.py holds the same
against the real program. Below it are the golden traces of other products, to be read back from a store or
from it: tests/golden/foreign/ has what their own code made, tests/report/foreign/test_products.py says how.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind

from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.model.names import keys
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_types import StoredSpan


@dataclass
class TempoFault:
    """What goes wrong: an answer (status, body, header) for paths that begin with `path`.

    delay_s: before any answer. missing_jobs: jobs of a search that failed.
    """

    path: str = "-"
    status: int = 500
    body: bytes = b"it broke"
    location: str = ""
    delay_s: float = 0.0
    missing_jobs: int = 0


@dataclass
class FakeTempo:
    """Traces by ID, and what was asked. max_limit, max_range_s: as Tempo's configuration has them."""

    version: str = "2.8.0"
    retention: str = "336h0m0s"
    max_limit: int = 0
    max_range_s: int = 0
    fault: TempoFault = field(default_factory=TempoFault)
    traces: dict[str, list[ReadableSpan]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        owner = self

        class Handler(TempoHandler):
            tempo = owner

        self.server = HttpServerThread(Handler)
        self.url = self.server.url

    def __enter__(self) -> FakeTempo:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()

    def add(self, spans: Sequence[ReadableSpan]) -> None:
        """Store spans, as an exporter sends them."""
        for span in spans:
            assert span.context is not None
            self.traces.setdefault(f"{span.context.trace_id:032x}", []).append(span)

    def list_searches(self) -> list[dict[str, str]]:
        """The parameters of all searches."""
        return [asked for path, asked in self.asked if path == "/api/search"]

    def list_fetched(self) -> list[str]:
        """The traces that were fetched, by their paths."""
        return [path for path, _ in self.asked if path.startswith("/api/traces/")]

    def count_fetched(self) -> int:
        """How many traces were fetched."""
        return len(self.list_fetched())

    def search(self, asked: dict[str, str]) -> tuple[int, dict[str, object] | str]:
        """Status and answer of a search: traces that overlap the window and hold a matching span."""
        since, until, limit = (int(asked[name]) for name in ("start", "end", "limit"))
        if self.max_range_s and until - since > self.max_range_s:
            return 400, f"range specified by start and end exceeds {self.max_range_s}s."
        if self.max_limit and limit > self.max_limit:
            return 400, f"limit {limit} exceeds max limit {self.max_limit}"
        found = []
        for trace_id, spans in self.traces.items():
            start = min(span.start_time or 0 for span in spans)
            end = max(span.end_time or 0 for span in spans)
            overlaps = start < until * 10**9 and end > since * 10**9
            matching = [span for span in spans if is_matching(span, asked["q"])]
            if overlaps and matching:
                shown = [show_span(span, asked["q"]) for span in matching[: int(asked["spss"])]]
                found.append(
                    {
                        "traceID": trace_id.lstrip("0"),
                        "startTimeUnixNano": str(start),
                        "durationMs": (end - start) // 1_000_000,
                        "spanSets": [{"spans": shown, "matched": len(matching)}],
                    }
                )
        # No order at all: Tempo gives what its blocks give first.
        metrics = {"completedJobs": 3 - self.fault.missing_jobs, "totalJobs": 3}
        return 200, {"traces": found[:limit], "metrics": metrics}


def show_span(span: ReadableSpan, query: str) -> dict[str, object]:
    """A span of a hit, with the attributes that the query selects."""
    assert span.context is not None
    values: dict[str, object] = {
        key: value
        for key, value in (span.attributes or {}).items()
        if f"span.{key}" in query.partition("select(")[2]
    }
    if not span.status.is_ok:
        values["status"] = "error"
    kinds = {bool: "boolValue", int: "intValue", str: "stringValue"}
    return {
        "spanID": f"{span.context.span_id:016x}",
        "name": span.name,
        "startTimeUnixNano": str(span.start_time),
        "durationNanos": str((span.end_time or 0) - (span.start_time or 0)),
        "attributes": [
            {"key": key, "value": {kinds[type(value)]: str(value) if type(value) is int else value}}
            for key, value in values.items()
        ],
    }


def is_matching(span: ReadableSpan, query: str) -> bool:
    """Whether a span meets the conditions of `query` that this fake knows."""
    attributes = span.attributes or {}
    kinds = re.findall(r'name = "(\w+)"', query.partition("span.")[0])
    wanted = [
        attributes.get(key) == json.loads(value)
        for key, value in re.findall(r'span\.(\S+) = ("[^ ]*")', query)
    ]
    others = re.findall(r"span\.(\S+) != nil", query)
    has_total = f"span.{keys.TOTAL_US} >= 0" not in query or keys.TOTAL_US in attributes
    is_ours = (not kinds or span.name in kinds) and has_total
    return (is_ours or any(each in attributes for each in others)) and any(wanted or [True])


class TempoHandler(SilentHandler):
    """One connection to a FakeTempo."""

    tempo: FakeTempo

    def do_GET(self) -> None:
        """Answer, or fail as told."""
        tempo, parts = self.tempo, urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
        tempo.asked.append((parts.path, asked))
        tempo.headers.append(self.list_headers())
        if parts.path.startswith(tempo.fault.path):
            time.sleep(tempo.fault.delay_s)
            where = {"location": tempo.fault.location} if tempo.fault.location else {}
            self.send_answer(tempo.fault.status, tempo.fault.body, **where)
        elif parts.path == "/api/status/buildinfo":
            self.send_answer(200, json.dumps({"version": tempo.version}).encode())
        elif parts.path == "/status/config":
            self.send_answer(200, f"compactor:\n  block_retention: {tempo.retention}\n".encode())
        elif parts.path == "/api/search":
            status, answer = tempo.search(asked)
            self.send_answer(
                status, (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            )
        elif spans := tempo.traces.get(parts.path.rpartition("/")[2]):
            self.send_answer(200, encode_spans(spans).SerializeToString())
        else:
            self.send_answer(404, b"")


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
