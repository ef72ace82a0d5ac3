# SPDX-License-Identifier: Apache-2.0
"""A live request through E, PD and router, sent on through the real collector to Tempo and Prometheus.

Exporters have one endpoint, and the deployment is shared: what its receiver stored is sent on, span
by span as it came.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from tests.live.bench import Bench as Live
from tests.stack.bench import Bench, Stack, until
from tests.stack.known import export
from ttft_otel import names
from ttft_otel.lab.stack import binaries
from ttft_otel.lab.stack.golang import GoMissing
from ttft_otel.report.query import reader
from ttft_otel.report.shape import Span

KINDS = {1: SpanKind.INTERNAL, 2: SpanKind.SERVER, 3: SpanKind.CLIENT}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Collector, Tempo and Prometheus of its own, beside the deployment."""
    try:
        programs = binaries.gather(lambda _: None)
    except GoMissing as error:
        pytest.skip(f"{error}; then scripts/stack build")
    bench = Bench(programs, tmp_path_factory.mktemp("stack"))
    try:
        yield bench.stack(env={"TTFT_METRICS_INTERVAL": "2s"})
    finally:
        bench.close()


def again(span: Span) -> ReadableSpan:
    """A stored span as the SDK's, to be exported once more."""
    trace_id, flags = int(span.trace_id, 16), TraceFlags(1)
    parent = int(span.parent_id, 16) if span.parent_id else 0
    return ReadableSpan(
        name=span.name,
        context=SpanContext(trace_id, int(span.span_id, 16), False, flags),
        parent=SpanContext(trace_id, parent, False, flags) if parent else None,
        resource=Resource(span.resource),
        attributes=span.attributes,
        kind=KINDS[span.kind],
        status=Status(StatusCode(span.status)),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope(span.scope),
    )


def whole(spans: Sequence[dict[str, Any]]) -> bool:
    """Router, E and PD have told both their halves."""
    trunks = [span for span in spans if span["name"] in (names.TTFT, names.ENCODE)]
    servers = [span for span in spans if span["kind"] == "server"]
    return len(trunks) >= 3 and len(servers) >= 3


def value(span: dict[str, Any], name: str) -> Any:
    """An attribute of a span in Tempo's JSON."""
    [found] = [each["value"] for each in span["attributes"] if each["key"] == name]
    [(kind, plain)] = found.items()
    return int(plain) if kind == "intValue" else plain


def arrived(stack: Stack, trace_id: str, many: int) -> list[dict[str, Any]]:
    """The trace's spans in Tempo, once all are there."""
    found = stack.tempo.trace(trace_id)
    return found if len(found) == many else []


def test_a_live_request_through_the_stack(epd: Live, stack: Stack) -> None:
    """One trace, found by request id; ttft_ms is the floor of the router's own number; metrics add up."""
    trace_id = os.urandom(16).hex()
    parent = {names.TRACEPARENT: f"00-{trace_id}-{'c' * 16}-01"}
    answer = epd.ask(epd.front, pictures=(epd.fresh(),), max_tokens=2, headers=parent)
    epd.trace(trace_id, whole)
    report = epd.get(f"/ttft_report/{answer.request_id}", "router")
    own = round(report["combined"]["ttft_ms"] * 1000)
    with reader(epd.fleet.database) as database:
        stored = database.trace(trace_id)
    assert stored is not None
    export(stack.collector.http, [again(span) for span in stored.spans])

    spans = until(partial(arrived, stack, trace_id, len(stored.spans)), 60)
    query = f'{{ span.{names.REQUEST_ID} = "{answer.request_id}" }}'
    [found] = until(partial(stack.tempo.search, query), 60)
    assert found["traceID"].zfill(32) == trace_id

    trunks = [span for span in spans if span["name"] in (names.TTFT, names.ENCODE)]
    for span in trunks:
        assert value(span, "ttft_ms") == value(span, names.TOTAL_US) // 1000
        total = value(span, "ttft_stage_sum_us") + value(span, "ttft_unattributed_us")
        assert total == value(span, names.TOTAL_US)
    [outermost] = [span for span in trunks if value(span, names.OUTERMOST)]
    assert value(outermost, names.ROLE) == "router"
    assert value(outermost, "ttft_ms") == own // 1000

    count = "sum(histogram_count(ttft_duration_seconds))"
    until(lambda: stack.prometheus.number(count) == 1, 30)
    seconds = "sum(histogram_sum(ttft_duration_seconds))"
    assert stack.prometheus.number(seconds) == pytest.approx(own / 1e6, abs=2e-6)
    stages = "sum(histogram_sum(ttft_stage_duration_seconds))"
    until(lambda: stack.prometheus.number(stages), 30)
    assert stack.prometheus.number(stages) == pytest.approx(own / 1e6, abs=1e-4)
    served = stack.prometheus.query(
        'group by (ttft_instance) (ttft_stage_duration_seconds{ttft_leg!=""})'
    )
    places = {each["metric"].get("ttft_instance") for each in served}
    legs = {epd.fleet.url(name).removeprefix("http://") for name in ("encode", "prefill_decode")}
    assert places == legs
