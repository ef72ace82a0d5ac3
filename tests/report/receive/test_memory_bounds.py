# SPDX-License-Identifier: Apache-2.0
"""Memory that a sender can make reading and writing take: of one chunk, and of one trace, not of all."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ttft_otel.model.names import keys, span_names
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.store import database_schema, span_chunks
from ttft_otel.report.store.span_rows import ChunkInserter
from ttft_otel.report.store.span_store import SpanStore

SPANS = 4000
MAX_LISTING_KIB = 40 << 10
MAX_KNOWN_BYTES = 3 << 20
# The most that a span in OTLP's own bytes can become when it is parsed: empty attributes, two bytes each.
EMPTY_ATTRIBUTES = (span_chunks.MAX_RAW_BYTES - 200) // 2

LIST_REQUESTS = """
import resource, sys
from pathlib import Path
from ttft_otel.report.store.database_reader import RequestFilter, open_reader

def list_requests(path):
    with open_reader(Path(path)) as db:
        return db.list_latest(RequestFilter())

small, large = sys.argv[1:]
assert len(list_requests(small)) == 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(list_requests(large)) == 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def build_export(first: int, count: int, attributes: int = 0, trace: int = 1) -> bytes:
    """Spans of ours in one trace, of which number 1 is a `ttft` span."""
    message = ExportTraceServiceRequest()
    scope = message.resource_spans.add().scope_spans.add()
    scope.scope.name = span_names.SCOPE
    for number in range(first, first + count):
        span = scope.spans.add(name="prefill" if number > 1 else span_names.TTFT)
        span.trace_id, span.span_id = trace.to_bytes(16, "big"), number.to_bytes(8, "big")
        if number == 1:
            span.attributes.add(key=keys.TOTAL_US).value.int_value = 1
        else:
            for _ in range(attributes):
                span.attributes.add()
    return message.SerializeToString()


def write_database(path: Path, attributes: int) -> Path:
    """One trace with one request and many other spans."""
    store = SpanStore(path)
    for first in range(1, SPANS, 500):
        chunks = otlp_decoder.chunk_export(build_export(first, 500, attributes)).chunks
        store.add_chunks(chunks).result(60)
    store.close()
    assert store.counts["stored"] == SPANS
    return path


def test_listing(tmp_path: Path) -> None:
    """Other spans of a trace, however large they are in memory, cost the listing of its request nothing."""
    paths = [write_database(tmp_path / f"{size}.db", size) for size in (0, EMPTY_ATTRIBUTES)]
    assert paths[1].stat().st_size > 2 * SPANS * EMPTY_ATTRIBUTES, "they are not kept as they came"
    grown = subprocess.run(
        [sys.executable, "-c", LIST_REQUESTS, *map(str, paths)], stdout=subprocess.PIPE, check=True
    )
    # 72 MB for each thousand of them, when they were parsed.
    assert int(grown.stdout) < MAX_LISTING_KIB


def test_inserting(tmp_path: Path) -> None:
    """A transaction that adds to many large traces has the spans' IDs of one of them at a time."""
    traces = 12
    connection, _ = database_schema.open_for_writing(tmp_path / "spans.db", 1 << 30)
    for trace in range(1, traces + 1):
        chunks = otlp_decoder.chunk_export(build_export(1, SPANS, trace=trace)).chunks
        ChunkInserter(connection, 1).insert_chunks(chunks)
    added = [
        chunk
        for trace in range(1, traces + 1)
        for chunk in otlp_decoder.chunk_export(build_export(SPANS + 1, 1, trace=trace)).chunks
    ]
    tracemalloc.start()
    outcomes = ChunkInserter(connection, 1).insert_chunks(added)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    connection.close()

    assert [outcome.stored for outcome in outcomes] == [1] * traces
    assert peak < MAX_KNOWN_BYTES  # IDs of all traces take three times that
