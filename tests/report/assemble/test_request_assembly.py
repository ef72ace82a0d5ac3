# SPDX-License-Identifier: Apache-2.0
"""Which spans belong to which request, in any order, and what is told of requests.

That is the time before them, in a foreign router; and the summary's figures with what stands beside them:
reasons of waits, clock errors, media encoded twice.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from msgspec import structs
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind
from sample_records import (
    DECODE_US,
    ENCODE_US,
    RunningServer,
    assemble_records,
    assemble_trace,
    capture_text,
    change_spans,
    fetch_json,
    fetch_page,
    fill_database,
    make_leg_record,
    make_random_id,
    make_routed_records,
    make_stored_spans,
    read_request,
)

from lab import report_files
from ttft_otel.exporter.span_batch import ResourceCache, SpanBatch, build_spans
from ttft_otel.model import stages
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.record import Record
from ttft_otel.model.stages import INTERMEDIATE_ROLES
from ttft_otel.report.assemble import request_assembly
from ttft_otel.report.assemble.request_assembly import measure_before
from ttft_otel.report.assemble.summary import (
    NOTABLE_ERROR_US,
    collect_recomputed,
    describe_recomputed,
    find_clock_error,
    summarize,
)
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_types import Request, StoredSpan, TimeBefore
from ttft_otel.report.show import json_answers, pages, terminal
from ttft_otel.report.store.database_reader import RequestFilter, StoredTrace, open_reader
from ttft_otel.report.store.span_store import SpanStore
from ttft_otel.tracing import clock, settings

NS_PER_US, NS_PER_MS = 1000, 1_000_000
TRACE_ID = "4b" * 16
BASE_NS = 1_790_000_000_000_000_000


def test_two_calls_in_one_trace() -> None:
    """An agent's two calls in one trace are two requests, each with its own legs."""
    trace_id = make_random_id(32)
    now = time.time_ns()
    first = make_routed_records("a", trace_id=trace_id, start_ns=now)
    second = make_routed_records("b", trace_id=trace_id, start_ns=now + 20 * NS_PER_MS, encoders=2)
    one, two = assemble_records([*second, *first])
    assert (one.request_id, len(one.legs)) == ("a", 2)
    assert (two.request_id, len(two.legs)) == ("b", 3)
    assert one.closed and two.closed


@pytest.mark.parametrize("detail", settings.DETAILS)
def test_detail(detail: str) -> None:
    """However few spans the exporter makes of them, requests, their legs and their stages are the same."""
    records = make_routed_records("a", encoders=2)
    batch = SpanBatch(detail)
    for record in records:
        batch.add_record(record, ResourceCache(1))
    spans = otlp_decoder.decode_export(batch.request.SerializeToString()).spans
    (request,) = assemble_trace(spans).requests
    (expected,) = assemble_records(records)
    assert request.closed
    assert request.stages == expected.stages
    assert [leg.stages for leg in request.legs] == [leg.stages for leg in expected.legs]
    rows = request_assembly.build_rows(spans)
    assert len(rows) == len(spans) and [row.depth for row in rows].count(0) == 1


def test_lost_client_span() -> None:
    """A leg whose client span is missing is assigned by its time."""
    records = make_routed_records("a")
    calls = frozenset(call.span_id for call in records[-1].calls)
    (request,) = assemble_records(records, calls)
    assert request.roles == ("router", "encode", "prefill_decode")


@pytest.mark.parametrize("excess", [0, 1])
def test_engine_only(excess: int) -> None:
    """An engine core behind our router tells the stages of a call that the router knows nothing of.

    One that tells more than that call has is not believed.
    """
    trace_id = make_random_id(32)
    core_us = {"prefill.queue": 300, "prefill.compute": 4000, "output": 60}
    lost = sum(core_us.values()) + 640 - 641 * excess
    router = make_leg_record("router", {"router.route": 90}, trace_id, lost=lost)
    core = make_leg_record(
        "mono", core_us, trace_id, router.span_id, router.start_ns, outermost=False, lost=500
    )
    core = structs.replace(core, server=None, span_id=router.span_id)
    core.attributes[keys.ENGINE_ONLY] = True
    (request,) = assemble_records([core, router])

    told = {} if excess else {f"mono.{name}": us for name, us in core_us.items()}
    assert request.closed
    assert request.stages == {"router.route": 90, **told}
    assert request.unattributed_us == (lost if excess else 640)
    assert request.router is not None and request.router.closed


def make_foreign_records(*shifts: tuple[str, int]) -> list[Record]:
    """Servers behind someone else's router: ids of their own, one trace; E and P are not outermost."""
    return [
        make_leg_record(
            role,  # type: ignore[arg-type]
            ENCODE_US if role == "encode" else DECODE_US,
            TRACE_ID,
            make_random_id(16),
            BASE_NS + shift * NS_PER_MS,
            request_id=f"own-{number}",
            outermost=role not in INTERMEDIATE_ROLES,
        )
        for number, (role, shift) in enumerate(shifts)
    ]


def test_foreign_router() -> None:
    """Behind another router legs are chained by time; what lies between them is unattributed."""
    (request,) = assemble_records(make_foreign_records(("encode", 0), ("prefill_decode", 80)))
    encode = sum(ENCODE_US.values())
    decode = sum(DECODE_US.values())
    assert request.ttft_us == 80_000 + decode + 300
    assert request.unattributed_us == request.ttft_us - encode - decode
    assert request.stages["encode.encoder.compute"] == ENCODE_US["encoder.compute"]
    assert request.closed and not request.pending


def test_foreign_parallel() -> None:
    """Prefill and decode that ran side by side are not added up."""
    (request,) = assemble_records(make_foreign_records(("prefill", 0), ("decode", 1)))
    assert request.stages == DECODE_US
    assert request.ttft_us == sum(DECODE_US.values()) + 300
    assert request.roles == ("prefill", "decode")


def test_foreign_twice() -> None:
    """Two calls of one trace behind another router are cut where a first token came."""
    first, second = assemble_records(
        make_foreign_records(
            ("encode", 0), ("prefill_decode", 80), ("encode", 400), ("prefill_decode", 500)
        )
    )
    assert (first.request_id, second.request_id) == ("own-1", "own-3")
    assert first.roles == second.roles == ("encode", "prefill_decode")


def test_shared_id() -> None:
    """Where the servers share a request id it decides, though the calls overlap."""
    records = make_foreign_records(
        ("encode", 0), ("encode", 1), ("prefill_decode", 90), ("prefill_decode", 91)
    )
    trace = [make_leg_record(r.role, {"sample": 5}, r.trace_id, "", r.start_ns, f"id{n % 2}")  # type: ignore[arg-type]
             for n, r in enumerate(records)]  # fmt: skip
    requests = assemble_records(trace)
    assert [request.request_id for request in requests] == ["id0", "id1"]
    assert all(request.roles == ("encode", "prefill_decode") for request in requests)


def test_encoder_only() -> None:
    """An encoder whose other half never came is a request of its own, which no percentile counts."""
    (request,) = assemble_records(make_foreign_records(("encode", 0)))
    assert request.roles == ("encode",)
    assert request.closed and request.pending
    assert summarize([request]).count == 0


def test_loop_of_parents() -> None:
    """Spans that name each other as parents neither block the assembly nor get lost."""
    records = make_routed_records("a")
    spans = make_stored_spans(records)
    parents = {span.span_id: spans[(n + 1) % len(spans)].span_id for n, span in enumerate(spans)}
    requests = request_assembly.assemble_requests(
        "t", [span for span in spans if span.is_ttft_span], parents
    )
    assert sum(len(request.legs) + bool(request.router) for request in requests) == 3
    looped = [replace(span, parent_id=parents[span.span_id]) for span in spans]
    assert {row.span.span_id for row in request_assembly.build_rows(looped)} == set(parents)


def test_rows() -> None:
    """The waterfall nests router, client call, server, leg, stage and part; each span once."""
    spans = make_stored_spans(make_routed_records("a"))
    rows = request_assembly.build_rows(spans)
    assert len(rows) == len(spans)
    row_kinds = {(row.depth, row.what, row.span.name) for row in rows}
    assert (0, "server", "POST /v1/chat/completions") in row_kinds
    assert (1, "trunk", "ttft") in row_kinds
    assert (1, "call", "POST encode") in row_kinds
    assert (3, "trunk", "encode") in row_kinds
    assert (4, "stage", "encoder.compute") in row_kinds
    assert (5, "part", "media") in row_kinds
    stages = {row.stage for row in rows if row.what == "stage" and row.role == "router"}
    assert {"router.receive", "router.hop.encode", "prefill_decode.prefill.compute"} <= stages


SCHEMA = Path(__file__).parents[2] / "golden" / "report.schema.json"
SERVER, CLIENT = 2, 3
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
    spans = [make_span("a", "", SERVER, -lead, 600_000, **SAME)]
    records = []
    for number, (record, (_, shift)) in enumerate(
        zip(make_foreign_records(*legs), legs, strict=True), 1
    ):
        call = make_span(f"{number}", "a", CLIENT, shift * 1000 - 500, 590_000, **SAME)
        spans.append(call)
        records.append(structs.replace(record, parent_id=call.span_id))
    return spans + [
        replace(span, resource=span.resource | OUR_RESOURCE) for span in make_stored_spans(records)
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
    record = make_leg_record("mono", DECODE_US, TRACE_ID, top.span_id, BASE_NS, error="500")
    request, _ = stored_request(store, [top, *make_stored_spans([record])])

    assert request.before == TimeBefore(2_000, 30_000, "their-router", "a" * 16)


def test_a_gateway_in_front_of_our_router(store: SpanStore) -> None:
    """The time in a gateway before our router is given as well."""
    records = make_routed_records("r1", trace_id=TRACE_ID, start_ns=BASE_NS)
    records[-1] = structs.replace(records[-1], parent_id="a" * 16)
    gateway = make_span("a", "", SERVER, -3_000, 900_000, resource={"service.name": "gateway"})
    request, _ = stored_request(store, [gateway, *make_stored_spans(records)])

    assert request.before is not None and request.before.us == 3_000
    assert request.roles == ("router", "encode", "prefill_decode")


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
    first, second = (
        capture_text(lambda console, each=each: terminal.print_waterfall(trace, each, console))
        for each in (request, unknown)
    )
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
    record = make_leg_record("mono", DECODE_US, trace_id, f"{context.span_id:016x}", arrived)
    resource = Resource.create(OUR_RESOURCE)
    ours = OTLPSpanExporter(f"{report_server.http}/v1/traces")
    ours.export(build_spans(record, resource))
    ours.shutdown()
    provider.shutdown()

    request = read_request(report_server.path)
    start = top.start_time  # type: ignore[attr-defined]
    assert request.before is not None and request.before.error_us == clock.WALL_ERROR_US
    assert abs(request.before.us - (arrived - start) // 1000) <= 1
    status, page, _ = fetch_page(report_server, f"/trace/{trace_id}")
    assert status == 200
    assert "before, in their-router" in page and keys.BEFORE_US in page
    assert "in a router that is not ours; not in the sum" in fetch_page(report_server, "/")[1]


def make_requests(*records: Record) -> list[Request]:
    """Requests of these single-server records."""
    return [request for each in records for request in assemble_records([each])]


def test_means_add_up() -> None:
    """The means of all stages and of the remainder are the mean TTFT; a request that died is only counted."""
    died = make_leg_record("mono", {"ipc": 5}, error="EngineDeadError", died="ipc")
    found = make_requests(
        make_leg_record("mono", DECODE_US),
        make_leg_record("mono", {"sample": 4000, "kv.transfer": 2000}),
        died,
    )
    summary, alone = summarize(found), summarize(make_requests(died))
    assert abs(sum(line.mean for line in summary.stages) - summary.ttft.mean) < 0.001 * 20
    counts = {line.name: line.count for line in summary.stages}
    assert (counts["sample"], counts["kv.transfer"], counts["unattributed"]) == (2, 1, 2)
    assert summary.closed and (alone.count, alone.failed, alone.closed) == (0, 1, False)


def test_every_stage_has_a_colour() -> None:
    """Each word of the vocabulary has a kind, a colour of its own, a class and a sentence."""
    words = [*stages.STAGE_NAMES, *stages.ROUTER_STAGES]
    assert len({stages.find_color(word) for word in words}) == len(words)
    for word in (*words, "encode.preprocess", "router.hop.encode"):
        assert stages.find_kind(word) in stages.KIND_LABELS
        assert stages.describe_stage(word)
        assert f".{stages.get_css_class(word)}{{" in stages.build_style_sheet()
    assert stages.get_css_class("<script>") == stages.get_css_class(stages.UNATTRIBUTED)


def test_order() -> None:
    """Stages stand in the order in which they happen, legs one after the other."""
    names = ["unattributed", "router.egress", "prefill_decode.receive", "encode.ec.transfer"]
    names += ["router.hop.prefill_decode", "encode.encoder.compute", "encode.receive"]
    names += ["router.hop.encode", "router.route", "router.receive"]
    assert sorted(names, key=stages.rank_stage) == [
        *("router.receive", "router.route", "router.hop.encode", "encode.receive"),
        *("encode.encoder.compute", "encode.ec.transfer", "router.hop.prefill_decode"),
        *("prefill_decode.receive", "router.egress", "unattributed"),
    ]


# error.type, and how many requests end so within 0.2 ms, and after 9 s; most end at once.
ENDS = {
    keys.ERROR_ENGINE: (40, 3),
    keys.ERROR_NO_TOKEN: (40, 3),
    "500": (40, 0),
    "502": (0, 5),
    keys.ERROR_CANCELLED: (10, 4),
    keys.ERROR_DISCONNECTED: (20, 2),
    keys.ERROR_STOPPED: (0, 6),
    "400": (30, 0),
    "429": (25, 1),
}
ROUTERS_ENDS = (keys.ERROR_NO_TOKEN, keys.ERROR_DISCONNECTED, keys.ERROR_STOPPED)
GOOD_US = [100_000 + 1_700 * number for number in range(50)]


def make_request(length_us: int, role: Any = "mono", **changes: Any) -> Record:
    """One request of this length, all of it in one stage."""
    return make_leg_record(role, {"prefill.compute": length_us}, lost=0, tail=0, **changes)


def make_mix() -> list[Record]:
    """The known truth: GOOD_US by servers and by routers, and all of ENDS."""

    def make_routed(length_us: int, leg_us: int, **changes: Any) -> list[Record]:
        # A router with one leg; the leg's own span is not outermost.
        router = make_request(length_us, "router", **changes)
        above = {"trace_id": router.trace_id, "parent": router.span_id}
        return [make_request(leg_us, **above, outermost=False), router]

    records = []
    for number, length_us in enumerate(GOOD_US):
        routed = make_routed(length_us, length_us - 900)
        records += [make_request(length_us)] if number % 2 else routed
    for error, (quick, slow) in ENDS.items():
        role = "router" if error in ROUTERS_ENDS else "mono"
        for number in range(quick + slow):
            length_us = 200 if number < quick else 9_000_000
            records.append(make_request(length_us, role, error=error, died="prefill.queue"))
    # A router's request that failed although its leg had a first token: the client saw none.
    return [*records, *make_routed(300, 100, error="502", died="router.hop.mono")]


@pytest.fixture
def summary(report_server: RunningServer) -> Any:
    """The summary after the mix was stored, as `ttft-otel report --json` has it."""
    fill_database(report_server.path, *make_mix())
    return fetch_json(report_server, "/api/summary?last=1000")[1]


def test_percentiles_are_those_of_first_tokens(summary: Any) -> None:
    """Count, percentiles, mean and stage means are those of the requests that got a first token."""
    ttft = summary["ttft"]
    true = np.array(GOOD_US) / 1000

    assert summary["count"] == ttft["count"] == len(GOOD_US)
    for name, share in (("p50", 50), ("p95", 95), ("p99", 99)):
        assert ttft[name] == pytest.approx(np.percentile(true, share), abs=0.001)
    assert ttft["mean"] == pytest.approx(true.mean(), abs=0.001)
    means = [line["mean"] for line in summary["stages"].values()]
    assert sum(means) == pytest.approx(ttft["mean"], abs=0.001 * len(means))


def test_ends_are_counted_by_whose_doing(summary: Any) -> None:
    """All others count as failed, with those that the client ended or the router refused apart."""
    counts = {error: sum(pair) for error, pair in ENDS.items()}

    assert summary["failed"] == sum(counts.values()) + 1
    assert summary["left"] == counts["cancelled"] + counts["disconnected"]
    assert summary["refused"] == counts["400"] + counts["429"]


CLOCK_SENTENCE = "up to 1.9 ms off"
SENTENCE = (
    "2 media items were encoded again on prefill_decode (gpu-1:77) although an encoder had encoded "
    "them: see docs/router.md#encoder-cache-parameters"
)
REASONS = {
    "ttft.queue.kv_blocks_us": 9_000,
    "ttft.queue.in_step_us": 400,
    "ttft.stall.token_budget_us": 4_100,
    "ttft.queue.no_reason_us": 7,
}
HELD = {"ttft.held.decode_us": 8_500, "ttft.held.idle_us": 900, "ttft.held.other_us": 3}


def test_waits() -> None:
    """Also behind a router a leg's stage has that leg's reasons, longest first; other stages have none."""
    trace = assemble_trace(change_spans(make_routed_records(), "prefill_decode", REASONS | HELD))
    (request,) = trace.requests
    _, text, _, page = show_trace(trace)
    queue, stall = "prefill_decode.prefill.queue", "prefill_decode.prefill.stall"

    assert request.list_wait_reasons(queue) == [("kv_blocks", 9_000), ("in_step", 400)]
    assert request.list_wait_reasons(stall) == [("token_budget", 4_100)]
    for other in ("prefill_decode.prefill.compute", "encode.encoder.queue"):
        assert request.list_wait_reasons(other) == []
    assert request.list_holding_kinds(queue) == [("decode", 8_500), ("idle", 900)]
    assert request.list_holding_kinds(stall) == []
    for word in ("kv_blocks", "in_step", "token_budget", "held by: decode"):
        assert word in text and word in page
    leg = request.find_leg("prefill_decode")
    assert leg is not None
    described = json_answers.describe_leg(leg)
    queued = {"kv_blocks": 9.0, "in_step": 0.4}
    assert described["reasons"] == {"queue": queued, "stall": {"token_budget": 4.1}}
    assert described["held"] == {"decode": 8.5, "idle": 0.9}


@pytest.mark.parametrize(("error_us", "said"), [(1900, True), (NOTABLE_ERROR_US, False)])
def test_clock_error(error_us: int, said: bool) -> None:
    """Terminal and pages show it, for many requests and for one; not while it is small."""
    error = {keys.CLOCK_ERROR_US: error_us}
    trace = assemble_trace(change_spans(make_routed_records(), "prefill_decode", error))

    assert [text.count(CLOCK_SENTENCE) for text in show_trace(trace)] == [said] * 4
    assert find_clock_error(trace.requests) == error_us * said


def make_recomputed(number: int, items: int | None) -> list[StoredSpan]:
    """A routed request whose media an encoder-cache consumer encoded again; None: it does not say."""
    records = make_routed_records(f"r{number}", start_ns=10**18 + number * 10**9)
    told = {} if items is None else {keys.EC_RECOMPUTED_ITEMS: items}
    return change_spans(records, "prefill_decode", told, service_instance_id="gpu-1:77")


def test_the_sentence_names_what_to_check() -> None:
    """Items are added up by instance, and never are more instances named than fit; 0 is no item."""
    requests = [
        assemble_trace(make_recomputed(number, items)).requests[0]
        for number, items in enumerate((2, 0, None, 1))
    ]
    many = Counter({("prefill", f"gpu-{number}:1"): 1 for number in range(6)})

    assert summarize(requests).recomputed == {("prefill_decode", "gpu-1:77"): 3}
    assert describe_recomputed(collect_recomputed(requests[1:3])) == ""
    assert describe_recomputed(collect_recomputed(requests[:1])) == SENTENCE
    one = describe_recomputed(Counter({("prefill", ""): 1}))
    assert one.startswith(
        "1 media item was encoded again on prefill although an encoder had encoded it:"
    )
    assert "gpu-3:1), 2 more although" in describe_recomputed(many)


@pytest.mark.parametrize("items", [2, 0])
def test_recomputed_items(store: SpanStore, items: int) -> None:
    """Terminal, pages and JSON say once what was encoded again, and nothing of it where that is 0."""
    spans = make_recomputed(0, items)
    trace = assemble_trace(spans)
    (request,) = trace.requests
    shown = show_trace(trace)
    expected = [{"role": "prefill_decode", "instance": "gpu-1:77", "items": 2}] if items else []
    store.add(spans).result(10)
    written = report_files.write_report_files(store.path, [], store.path.parent)

    assert [text.count(SENTENCE) for text in shown] == [bool(items)] * 4
    assert [text.count("encoded again") for text in shown] == [bool(items)] * 4
    legs = tuple(replace(leg, instance="<b>") for leg in request.legs)
    assert "<b>)" not in pages.render_index([replace(request, legs=legs)], RequestFilter(), [])
    assert json_answers.describe_summary(summarize([request]))["recomputed"] == expected
    jsonschema.validate(written, json.loads(SCHEMA.read_text("utf-8")))
    assert written["requests"][0]["recomputed"] == written["summary"]["recomputed"] == expected


def show_trace(trace: StoredTrace) -> list[str]:
    """What terminal and pages show of a trace: many requests and one, of either."""
    return [
        capture_text(lambda console: terminal.print_summary(trace.requests, console)),
        capture_text(lambda console: terminal.print_waterfall(trace, console=console)),
        pages.render_index(trace.requests, RequestFilter(), []),
        pages.render_trace(trace),
    ]
