# SPDX-License-Identifier: Apache-2.0
"""Which spans belong to which request, with and without our router, in any order."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import sample_records
from msgspec import structs

from ttft_otel.exporter.spans.resource_cache import ResourceCache
from ttft_otel.exporter.spans.span_batch import SpanBatch
from ttft_otel.model.names import keys
from ttft_otel.model.record import Record
from ttft_otel.model.stages import INTERMEDIATE_ROLES
from ttft_otel.report.assemble import request_assembly, waterfall_rows
from ttft_otel.report.assemble.summary import summarize
from ttft_otel.report.receive import otlp_decoder
from ttft_otel.report.report_types import Request
from ttft_otel.tracing import settings

NS_PER_MS = 1_000_000


def assemble_records(
    records: list[Record], lost: frozenset[str] = frozenset()
) -> tuple[Request, ...]:
    """Assemble what is left of these records' spans when some span ids never came."""
    spans = [span for span in sample_records.make_stored_spans(records) if span.span_id not in lost]
    return sample_records.assemble_trace(spans).requests


def test_two_calls_in_one_trace() -> None:
    """An agent's two calls in one trace are two requests, each with its own legs."""
    trace_id = sample_records.make_random_id(32)
    now = time.time_ns()
    first = sample_records.make_routed_records("a", trace_id=trace_id, start_ns=now)
    second = sample_records.make_routed_records(
        "b", trace_id=trace_id, start_ns=now + 20 * NS_PER_MS, encoders=2
    )
    one, two = assemble_records([*second, *first])
    assert (one.request_id, len(one.legs)) == ("a", 2)
    assert (two.request_id, len(two.legs)) == ("b", 3)
    assert one.closed and two.closed


@pytest.mark.parametrize("detail", settings.DETAILS)
def test_detail(detail: str) -> None:
    """However few spans the exporter makes of them, requests, their legs and their stages are the same."""
    records = sample_records.make_routed_records("a", encoders=2)
    batch = SpanBatch(detail)
    for record in records:
        batch.add_record(record, ResourceCache(1))
    spans = otlp_decoder.decode_export(batch.request.SerializeToString()).spans
    (request,) = sample_records.assemble_trace(spans).requests
    (expected,) = assemble_records(records)
    assert request.closed
    assert request.stages == expected.stages
    assert [leg.stages for leg in request.legs] == [leg.stages for leg in expected.legs]
    rows = waterfall_rows.build_rows(spans)
    assert len(rows) == len(spans) and [row.depth for row in rows].count(0) == 1


def test_lost_client_span() -> None:
    """A leg whose client span is missing is assigned by its time."""
    records = sample_records.make_routed_records("a")
    calls = frozenset(call.span_id for call in records[-1].calls)
    (request,) = assemble_records(records, calls)
    assert request.roles == ("router", "encode", "prefill_decode")


def test_slowest_encoder() -> None:
    """Of several encoder legs the slowest one counts; all are kept."""
    (request,) = assemble_records(sample_records.make_routed_records("a", encoders=3))
    leg = request.find_leg("encode")
    assert leg is not None
    assert leg.ttft_us == max(each.ttft_us for each in request.legs if each.role == "encode")


@pytest.mark.parametrize("excess", [0, 1])
def test_engine_only(excess: int) -> None:
    """An engine core behind our router tells the stages of a call that the router knows nothing of.

    One that tells more than that call has is not believed.
    """
    trace_id = sample_records.make_random_id(32)
    core_us = {"prefill.queue": 300, "prefill.compute": 4000, "output": 60}
    lost = sum(core_us.values()) + 640 - 641 * excess
    router = sample_records.make_leg_record("router", {"router.route": 90}, trace_id, lost=lost)
    core = sample_records.make_leg_record(
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
    trace_id = sample_records.make_random_id(32)
    now = time.time_ns()
    return [
        sample_records.make_leg_record(
            role,  # type: ignore[arg-type]
            sample_records.ENCODE_US if role == "encode" else sample_records.DECODE_US,
            trace_id,
            sample_records.make_random_id(16),
            now + shift * NS_PER_MS,
            request_id=f"own-{number}",
            outermost=role not in INTERMEDIATE_ROLES,
        )
        for number, (role, shift) in enumerate(shifts)
    ]


def test_foreign_router() -> None:
    """Behind another router legs are chained by time; what lies between them is unattributed."""
    (request,) = assemble_records(make_foreign_records(("encode", 0), ("prefill_decode", 80)))
    encode = sum(sample_records.ENCODE_US.values())
    decode = sum(sample_records.DECODE_US.values())
    assert request.ttft_us == 80_000 + decode + 300
    assert request.unattributed_us == request.ttft_us - encode - decode
    assert request.stages["encode.encoder.compute"] == sample_records.ENCODE_US["encoder.compute"]
    assert request.closed and not request.pending


def test_foreign_parallel() -> None:
    """Prefill and decode that ran side by side are not added up."""
    (request,) = assemble_records(make_foreign_records(("prefill", 0), ("decode", 1)))
    assert request.stages == sample_records.DECODE_US
    assert request.ttft_us == sum(sample_records.DECODE_US.values()) + 300
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
    trace = [sample_records.make_leg_record(r.role, {"sample": 5}, r.trace_id, "", r.start_ns, f"id{n % 2}")  # type: ignore[arg-type]
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
    records = sample_records.make_routed_records("a")
    spans = sample_records.make_stored_spans(records)
    parents = {span.span_id: spans[(n + 1) % len(spans)].span_id for n, span in enumerate(spans)}
    requests = request_assembly.assemble_requests(
        "t", [span for span in spans if span.is_ttft_span], parents
    )
    assert sum(len(request.legs) + bool(request.router) for request in requests) == 3
    looped = [replace(span, parent_id=parents[span.span_id]) for span in spans]
    assert {row.span.span_id for row in waterfall_rows.build_rows(looped)} == set(parents)


def test_rows() -> None:
    """The waterfall nests router, client call, server, leg, stage and part; each span once."""
    spans = sample_records.make_stored_spans(sample_records.make_routed_records("a"))
    rows = waterfall_rows.build_rows(spans)
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
