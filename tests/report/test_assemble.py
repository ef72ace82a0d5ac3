# SPDX-License-Identifier: Apache-2.0
"""Which legs belong to which request, with and without a router of ours, in any order."""

from __future__ import annotations

import time
from dataclasses import replace

import trips

from ttft_otel.record import Record
from ttft_otel.report import assemble, tree
from ttft_otel.report.shape import Request

MS = 1_000_000


def assembled(records: list[Record], lost: frozenset[str] = frozenset()) -> list[Request]:
    """Assemble what is left of these records' spans when some span ids never came."""
    spans = [span for span in trips.stored(records) if span.span_id not in lost]
    parents = {span.span_id: span.parent_id for span in spans}
    trunks = [span for span in spans if span.trunk]
    return assemble.requests(records[0].trace_id, trunks, parents)


def test_two_calls_in_one_trace() -> None:
    """An agent's two calls in one trace are two requests, each with its own legs."""
    trace_id = trips.hexes(32)
    now = time.time_ns()
    first = trips.routed("a", trace_id=trace_id, start_ns=now)
    second = trips.routed("b", trace_id=trace_id, start_ns=now + 20 * MS, encoders=2)
    one, two = assembled([*second, *first])
    assert (one.request_id, len(one.legs)) == ("a", 2)
    assert (two.request_id, len(two.legs)) == ("b", 3)
    assert one.closed and two.closed


def test_lost_client_span() -> None:
    """A leg whose way up is broken is found by its time."""
    records = trips.routed("a")
    calls = frozenset(call.span_id for call in records[-1].calls)
    (request,) = assembled(records, calls)
    assert request.roles == ("router", "encode", "prefill_decode")


def test_slowest_encoder() -> None:
    """Of several encoder legs the slowest one counts; all are kept."""
    (request,) = assembled(trips.routed("a", encoders=3))
    leg = request.leg("encode")
    assert leg is not None
    assert leg.ttft_us == max(each.ttft_us for each in request.legs if each.role == "encode")


def foreign(*shifts: tuple[str, int]) -> list[Record]:
    """Servers behind someone else's router: all outermost, ids of their own, one trace."""
    trace_id = trips.hexes(32)
    now = time.time_ns()
    return [
        trips.leg(
            role,  # type: ignore[arg-type]
            trips.ENCODE if role == "encode" else trips.DECODE,
            trace_id,
            trips.hexes(16),
            now + shift * MS,
            request_id=f"own-{number}",
        )
        for number, (role, shift) in enumerate(shifts)
    ]


def test_foreign_router() -> None:
    """Behind another router legs are chained by time; what lies between them is unattributed."""
    (request,) = assembled(foreign(("encode", 0), ("prefill_decode", 80)))
    encode = sum(trips.ENCODE.values())
    decode = sum(trips.DECODE.values())
    assert request.ttft_us == 80_000 + decode + 300
    assert request.unattributed_us == request.ttft_us - encode - decode
    assert request.stages["encode.encoder.compute"] == trips.ENCODE["encoder.compute"]
    assert request.closed and not request.pending


def test_foreign_parallel() -> None:
    """Prefill and decode that ran side by side are not added up."""
    (request,) = assembled(foreign(("prefill", 0), ("decode", 1)))
    assert request.stages == trips.DECODE
    assert request.ttft_us == sum(trips.DECODE.values()) + 300
    assert request.roles == ("prefill", "decode")


def test_foreign_twice() -> None:
    """Two calls of one trace behind another router are cut where a first token came."""
    first, second = assembled(
        foreign(("encode", 0), ("prefill_decode", 80), ("encode", 400), ("prefill_decode", 500))
    )
    assert (first.request_id, second.request_id) == ("own-1", "own-3")
    assert first.roles == second.roles == ("encode", "prefill_decode")


def test_shared_id() -> None:
    """Where the servers share a request id it decides, though the calls overlap."""
    records = foreign(("encode", 0), ("encode", 1), ("prefill_decode", 90), ("prefill_decode", 91))
    trace = [trips.leg(r.role, {"sample": 5}, r.trace_id, "", r.start_ns, f"id{n % 2}")  # type: ignore[arg-type]
             for n, r in enumerate(records)]  # fmt: skip
    requests = assembled(trace)
    assert [request.request_id for request in requests] == ["id0", "id1"]
    assert all(request.roles == ("encode", "prefill_decode") for request in requests)


def test_encoder_only() -> None:
    """An encoder whose other half never came is a request of its own."""
    (request,) = assembled(foreign(("encode", 0)))
    assert request.roles == ("encode",)
    assert request.closed


def test_loop_of_parents() -> None:
    """Spans that are each other's parents neither hang nor vanish."""
    records = trips.routed("a")
    spans = trips.stored(records)
    parents = {span.span_id: spans[(n + 1) % len(spans)].span_id for n, span in enumerate(spans)}
    found = assemble.requests("t", [span for span in spans if span.trunk], parents)
    assert sum(len(request.legs) + bool(request.router) for request in found) == 3
    looped = [replace(span, parent_id=parents[span.span_id]) for span in spans]
    assert {row.span.span_id for row in tree.rows(looped)} == set(parents)


def test_rows() -> None:
    """The waterfall nests router, client call, server, leg, stage and part; each span once."""
    spans = trips.stored(trips.routed("a"))
    rows = tree.rows(spans)
    assert len(rows) == len(spans)
    found = {(row.depth, row.what, row.span.name) for row in rows}
    assert (0, "server", "POST /v1/chat/completions") in found
    assert (1, "trunk", "ttft") in found
    assert (1, "call", "POST encode") in found
    assert (3, "trunk", "encode") in found
    assert (4, "stage", "encoder.compute") in found
    assert (5, "part", "media") in found
    stages = {row.stage for row in rows if row.what == "stage" and row.role == "router"}
    assert {"router.receive", "router.hop.encode", "prefill_decode.prefill.compute"} <= stages
