# SPDX-License-Identifier: Apache-2.0
"""The time before our router or server, in a foreign router: shown beside the TTFT, with its error."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import sample_records
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind
from sample_records import RunningServer, capture_text, fetch_page

from lab import report_files
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Record
from ttft_otel.model.stages import INTERMEDIATE_ROLES
from ttft_otel.report.assemble.summary import summarize
from ttft_otel.report.assemble.time_before import measure_before
from ttft_otel.report.report_types import Request, StoredSpan, TimeBefore
from ttft_otel.report.show import json_answers, terminal
from ttft_otel.report.store.database_reader import RequestFilter, StoredTrace, open_reader
from ttft_otel.report.store.span_store import SpanStore
from ttft_otel.tracing import clock

SCHEMA = Path(__file__).parents[2] / "golden" / "report.schema.json"
NS_PER_US = 1000
NS_PER_MS = 1_000_000
BASE_NS = 1_790_000_000_000_000_000
SERVER, CLIENT = 2, 3
TRACE_ID = "4b" * 16
OUR_RESOURCE = {"service.name": "vllm", "service.instance.id": "gpu-1:77"}
SAME_HOST_RESOURCE = {"service.name": "their-router", "host.name": "gpu-1"}
OTHER_HOST_RESOURCE = {"service.name": "their-router", "host.name": "edge-9"}


def make_span(
    span_id: str, parent: str, kind: int, start: int, end: int, **fields: Any
) -> StoredSpan:
    """A foreign router's span; start and end in microseconds after BASE."""
    times = {"start_ns": BASE_NS + start * NS_PER_US, "end_ns": BASE_NS + end * NS_PER_US}
    fields = {
        "service": "their-router",
        "scope": "their.tracer",
        "resource": OTHER_HOST_RESOURCE,
        **fields,
    }
    return StoredSpan(TRACE_ID, span_id * 16, parent * 16, "POST /v1", kind, **times, **fields)


def make_server(start: int, end: int, parent: str = "c", **fields: Any) -> StoredSpan:
    """Our own span of the HTTP request."""
    own = {"service": "vllm", "scope": span_names.SCOPE, "resource": OUR_RESOURCE, **fields}
    return make_span("5", parent, SERVER, start, end, **own)


def measure_callers(
    server: StoredSpan, *callers: StoredSpan, late: int = 3_000
) -> TimeBefore | None:
    """Measure with these spans stored; the first token left `late` us before our span's end."""
    sent_ns = server.end_ns - late * NS_PER_US
    return measure_before(server, sent_ns, {span.span_id: span for span in (server, *callers)})


def make_call(start: int, end: int, parent: str = "", **fields: Any) -> StoredSpan:
    """The foreign router's client span, which is our parent."""
    return make_span("c", parent, CLIENT, start, end, **fields)


def make_received(start: int, end: int, **fields: Any) -> StoredSpan:
    """Its span of the request that it received."""
    return make_span("a", fields.pop("parent", ""), SERVER, start, end, **fields)


SAME, READ_US = {"resource": SAME_HOST_RESOURCE}, clock.WALL_ERROR_US
INNER = make_span("b", "a", 1, 2_000, 91_000, **SAME)
APP = {"resource": {"service.name": "app", "host.name": "gpu-1"}, "service": "app"}
OWN = {"scope": span_names.SCOPE}
# A router's call of 81 ms inside its own request of 120 ms.
NESTED = (make_call(11_400, 92_400, "a"), make_received(0, 120_000))
# Start and end of our span, the spans above it; microseconds before, their error, the span measured from.
MEASURED: tuple[
    tuple[int, int, tuple[StoredSpan, ...], tuple[int, int | None, str] | None], ...
] = (
    # On one host both read the same wall clock: only our clock's calibration is uncertain.
    *(
        (12_345, 80_000, (make_call(0, 90_000, resource=resource),), (12_345, READ_US, "c"))
        for resource in (
            SAME_HOST_RESOURCE,
            {"host.id": "gpu-1"},
            {"service.instance.id": "gpu-1"},
            {"service.instance.id": "gpu-1:1"},
        )
    ),
    # From the router's server span, so that its routing and queueing count.
    (
        9_700,
        80_000,
        (
            make_call(9_000, 90_000, "b", **SAME),
            INNER,
            make_received(0, 92_000, parent="0", **SAME),
        ),
        (9_700, READ_US, "a"),
    ),
    # Spans of an application that calls the router are not taken for the router's.
    (
        9_700,
        80_000,
        (make_call(9_000, 90_000, "a", **SAME), make_received(0, 92_000, **APP)),
        (700, READ_US, "c"),
    ),
    # Across hosts the error is what nesting allows: an 81 ms call around our 80 ms leaves 1 ms.
    (12_000, 95_000, NESTED, (12_000, 600, "a")),
    # A host's clock that is 300 ms behind is corrected as far as the nesting of spans proves it.
    (-288_000, -205_000, NESTED, (11_400, 1_000, "a")),
    # A caller's span that ends with the response's head bounds no clock.
    (
        12_000,
        95_000,
        (make_call(9_000, 90_000, "a"), make_received(0, 95_000)),
        (12_000, 3_000, "a"),
    ),
    # Where the caller's span ends before our answer, the clocks' difference stays unknown.
    (2_000, 90_000, (make_call(0, 10_000),), (2_000, None, "c")),
    # Foreign spans that are each other's parents do not block the search.
    (
        2_000,
        80_000,
        (make_call(0, 90_000, "a"), make_span("a", "c", CLIENT, 0, 90_000)),
        (2_000, 13_000, "c"),
    ),
    # Nothing without a parent, with a router of ours as parent, or with one that is not stored.
    (2_000, 80_000, (), None),
    (2_000, 80_000, (make_call(0, 90_000, **OWN),), None),
    (2_000, 80_000, (make_received(0, 90_000),), None),
)


@pytest.mark.parametrize(("start", "end", "callers", "expected"), MEASURED)
def test_measured(
    start: int,
    end: int,
    callers: tuple[StoredSpan, ...],
    expected: tuple[int, int | None, str] | None,
) -> None:
    """The time before is measured from the caller's span, with the error that the clocks allow."""
    before = measure_callers(make_server(start, end), *callers)
    found = before and (before.us, before.error_us, before.span_id[0])

    assert found == expected and (before is None or before.caller == "their-router")


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_host_without_a_name_is_another_one(host: str) -> None:
    """Without host.name, or with a common one, both are taken for different hosts."""
    resource = {"service.name": "r", "host.name": host}
    server = make_server(4_000, 12_000, resource={"service.instance.id": f"{host}:7"})
    before = measure_callers(server, make_span("c", "", CLIENT, 0, 10_000, resource=resource))

    assert before is not None and before.error_us == 4_000


def test_it_is_never_further_off_than_its_error() -> None:
    """For any difference of the clocks the true time lies within the error."""
    draw = random.Random(13)
    for _ in range(2_000):
        routing, way, work, back, rest, late = (draw.randrange(200_000) for _ in range(6))
        offset = draw.choice((0, draw.randrange(-400_000, 400_000)))
        arrival = routing + way
        first = arrival + work
        callers = (make_call(routing, first + back, "a"), make_received(0, first + back + rest))
        server = make_server(arrival + offset, first + late + offset)
        before = measure_callers(server, *callers, late=late)

        assert before is not None and before.error_us is not None
        assert abs(before.us - arrival) <= before.error_us
        assert before.error_us <= way + back + rest


def make_foreign_trace(*legs: tuple[str, int], lead: int = 7_000) -> list[StoredSpan]:
    """The trace of a request through a foreign router: its server span, a client span for each leg.

    legs: role, and milliseconds from the first leg's arrival to this one's. lead: us before that.
    """
    top = make_span("a", "", SERVER, -lead, 600_000, resource=SAME_HOST_RESOURCE)
    spans, records = [top], []
    for number, (role, shift) in enumerate(legs):
        call = make_span(
            f"{number + 1}", "a", CLIENT, shift * 1000 - 500, 590_000, resource=SAME_HOST_RESOURCE
        )
        spans.append(call)
        lengths = sample_records.ENCODE_US if role == "encode" else sample_records.DECODE_US
        records.append(
            sample_records.make_leg_record(
                role,  # type: ignore[arg-type]
                lengths,
                TRACE_ID,
                call.span_id,
                BASE_NS + shift * NS_PER_MS,
                outermost=role not in INTERMEDIATE_ROLES,
            )
        )
    return spans + [
        replace(span, resource=span.resource | OUR_RESOURCE)
        for span in sample_records.make_stored_spans(records)
    ]


def stored_request(store: SpanStore, spans: Sequence[StoredSpan]) -> tuple[Request, StoredTrace]:
    """The one request of these spans, as a reader gives it, and its trace."""
    store.add(spans).result(10)
    with open_reader(store.path) as db_reader:
        (request,) = db_reader.list_latest(RequestFilter())
        trace = db_reader.find_trace(TRACE_ID)
    assert trace is not None
    assert trace.requests == (request,)
    return request, trace


@pytest.mark.parametrize("legs", [(("mono", 0),), (("prefill", 0), ("decode", 130))])
def test_a_request_behind_a_foreign_router(
    store: SpanStore, legs: tuple[tuple[str, int], ...]
) -> None:
    """The time before ends with the first leg; the sum of stages does not include it."""
    request, _ = stored_request(store, make_foreign_trace(*legs))

    assert request.before == TimeBefore(7_000, clock.WALL_ERROR_US, "their-router", "a" * 16)
    assert request.closed and not request.pending
    assert request.roles == tuple(role for role, _ in legs)
    assert request.start_ns == BASE_NS


def test_a_failed_request_is_bounded_by_its_arrival(store: SpanStore) -> None:
    """Its TTFT ends when its response has gone, and its caller may have ended by then."""
    top = make_span("a", "", SERVER, -2_000, 30_000)
    record = sample_records.make_leg_record(
        "mono", sample_records.DECODE_US, TRACE_ID, top.span_id, BASE_NS, error="500"
    )
    request, _ = stored_request(store, [top, *sample_records.make_stored_spans([record])])

    assert request.before == TimeBefore(2_000, 30_000, "their-router", "a" * 16)


def test_behind_our_router_nothing_is_before(store: SpanStore) -> None:
    """Behind our router no time is given: its `ttft` span starts at the client's request."""
    sample_records.store_records(store, sample_records.make_routed_records("r1"))
    request = sample_records.read_request(store.path)

    assert request.before is None


def test_a_gateway_in_front_of_our_router(store: SpanStore) -> None:
    """The time in a gateway before our router is given as well."""
    records = sample_records.make_routed_records("r1", trace_id=TRACE_ID, start_ns=BASE_NS)
    records[-1] = set_parent(records[-1], "a" * 16)
    gateway = make_span("a", "", SERVER, -3_000, 900_000, resource={"service.name": "gateway"})
    request, _ = stored_request(store, [gateway, *sample_records.make_stored_spans(records)])

    assert request.before is not None and request.before.us == 3_000
    assert request.roles == ("router", "encode", "prefill_decode")


def set_parent(record: Record, span_id: str) -> Record:
    """The record of a request that came with this parent."""
    return msgspec.structs.replace(record, parent_id=span_id)


def test_the_routers_spans_may_come_last(store: SpanStore) -> None:
    """Until the foreign router's spans have arrived no time is given."""
    spans = make_foreign_trace(("mono", 0))
    theirs = [span for span in spans if span.scope != span_names.SCOPE]
    request, _ = stored_request(store, [span for span in spans if span.scope == span_names.SCOPE])
    assert request.before is None

    request, _ = stored_request(store, theirs)
    assert request.before is not None


def test_it_is_shown_and_never_stored(store: SpanStore) -> None:
    """A `ttft` span that is read has both attributes; the stored one does not."""
    spans = make_foreign_trace(("mono", 0))
    _, trace = stored_request(store, spans)
    (trunk,) = [span for span in trace.spans if span.is_ttft_span]

    assert trunk.attributes[keys.BEFORE_US] == 7_000
    assert trunk.attributes[keys.BEFORE_ERROR_US] == clock.WALL_ERROR_US
    assert not [span for span in spans if keys.BEFORE_US in span.attributes]
    (shown,) = [
        span
        for span in json_answers.describe_trace(trace)["spans"]
        if span["name"] == span_names.TTFT
    ]
    assert shown["attributes"][keys.BEFORE_US] == 7_000


def test_in_the_terminal(store: SpanStore) -> None:
    """A line before the waterfall, and one below the percentiles."""
    request, trace = stored_request(store, make_foreign_trace(("mono", 0), lead=12_300))
    unknown = replace(request, before=TimeBefore(5, None, "\x1b[2Jthem", "a" * 16))
    first = capture_text(lambda console: terminal.print_waterfall(trace, request, console))
    second = capture_text(lambda console: terminal.print_waterfall(trace, unknown, console))
    summary = capture_text(lambda console: terminal.print_summary([request], console))
    expected = 'before (router "their-router", not in the sum) 12.30 ms ± 11 µs'

    assert first.splitlines()[0].split() == expected.split()
    assert "± unknown" in second and "\x1b[2J" not in second
    assert "before, not in the sum" in summary


def test_in_json(store: SpanStore) -> None:
    """A list, a trace and report.json have it with its error; null where there is none."""
    request, trace = stored_request(store, make_foreign_trace(("mono", 0)))
    expected = {"ms": 7.0, "error_ms": 0.011, "caller": "their-router", "span_id": "a" * 16}
    report = report_files.write_report_files(store.path, [], store.path.parent / "out")

    assert json_answers.describe_request(request)["before"] == expected
    assert json_answers.describe_trace(trace)["requests"][0]["before"] == expected
    assert report["requests"][0]["before"] == expected
    assert (
        report["summary"]["before"] == json_answers.describe_summary(summarize([request]))["before"]
    )
    assert report["summary"]["before"]["p50"] == 7.0
    jsonschema.validate(report, json.loads(SCHEMA.read_text("utf-8")))
    nothing = replace(request, before=None)
    assert (
        json_answers.describe_request(nothing)["before"]
        is json_answers.describe_summary(summarize([nothing]))["before"]
        is None
    )
    unbounded = replace(request, before=TimeBefore(7, None, "r", "a" * 16))
    assert json_answers.describe_request(unbounded)["before"]["error_ms"] is None


def test_by_a_real_tracer(report_server: RunningServer) -> None:
    """With spans of the OpenTelemetry SDK as foreign router the page shows the time."""
    exporter = OTLPSpanExporter(f"{report_server.http}/v1/traces")
    provider = TracerProvider(
        resource=Resource.create(OUR_RESOURCE | {"service.name": "their-router"})
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("their.tracer")
    with tracer.start_as_current_span("POST /v1", kind=SpanKind.SERVER) as top:
        with tracer.start_as_current_span("call", kind=SpanKind.CLIENT) as call:
            arrived = clock.to_wall_ns(clock.now_us())
    context = call.get_span_context()
    trace_id = f"{context.trace_id:032x}"
    record = sample_records.make_leg_record(
        "mono", sample_records.DECODE_US, trace_id, f"{context.span_id:016x}", arrived
    )
    resource = Resource.create(OUR_RESOURCE)
    ours = OTLPSpanExporter(f"{report_server.http}/v1/traces")
    ours.export([span for span in sample_records.exporter.build_spans(record, resource)])
    ours.shutdown()
    provider.shutdown()

    request = sample_records.read_request(report_server.path)
    start = top.start_time  # type: ignore[attr-defined]
    assert request.before is not None and request.before.error_us == clock.WALL_ERROR_US
    assert abs(request.before.us - (arrived - start) // 1000) <= 1
    status, page, _ = fetch_page(report_server, f"/trace/{trace_id}")
    assert status == 200
    assert "before, in their-router" in page and keys.BEFORE_US in page
    assert "in a router that is not ours; not in the sum" in fetch_page(report_server, "/")[1]
