# SPDX-License-Identifier: Apache-2.0
"""Traced servers behind a router without our code: one outermost span per request, each leg its role.

The test plays that router by vLLM's contract (its toy proxy's and its EPD proxy's), with OpenTelemetry or
without. docs/router.md lists the real routers that were tried by hand.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from typing import Any

import pytest
from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import NoOpTracer, SpanKind, Tracer

from lab import ttft_client
from lab.ttft_client import TimedResponse
from tests.live.bench import LiveDeployment
from ttft_otel.model.names import keys, span_names
from ttft_otel.model.stages import INTERMEDIATE_ROLES
from ttft_otel.router.disagg.request_plan import KEEP_BLOCKS_PARAMS
from ttft_otel.tracing import clock

pytestmark = pytest.mark.full

REQUESTS = 20
ARRIVAL_S = 20.0
ROUTING_S = 0.03  # what the router takes before it calls anybody
LEGS = {
    "pd": ("prefill", "decode"),
    "epd": ("encode", "prefill_decode"),
    "epd3": ("encode", "prefill", "decode"),
}


def make_tracer(bench: LiveDeployment, traced: bool) -> Tracer:
    """That of the router; its spans come to our receiver, if it is traced."""
    if not traced:
        return NoOpTracer()
    who = Resource({"service.name": "their-router", "host.name": socket.gethostname()})
    provider = TracerProvider(resource=who)
    url = f"{bench.fleet.get_url('receiver')}/v1/traces"
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(url)))
    return provider.get_tracer("their.tracer")


def send_through_foreign_router(
    bench: LiveDeployment, shape: str, stream: bool, tracer: Tracer
) -> str:
    """Send one request through the instances of `shape` as vLLM's proxies do; its ID."""
    name = f"foreign-{os.urandom(8).hex()}"

    def call_instance(role: str, **fields: Any) -> TimedResponse:
        headers: dict[str, str] = {}
        with tracer.start_as_current_span("their call", kind=SpanKind.CLIENT):
            propagate.inject(headers)
            url = bench.fleet.get_url(role)
            named = {"request_id": name, "headers": headers}
            answer = ttft_client.send_timed_request(url, **named, **fields)
        assert answer.status == 200, answer.body
        return answer

    asked: dict[str, Any] = {"prompt": bench.new_prompt(), "words": 200, "max_tokens": 3}
    asked["pictures"] = () if shape == "pd" else (bench.new_picture_seed(),)
    alone = {**asked, "max_tokens": 1, "stream": False}
    extra: dict[str, Any] = {}
    with tracer.start_as_current_span("their request", kind=SpanKind.SERVER):
        time.sleep(ROUTING_S)
        for role in LEGS[shape]:
            if role == "encode":
                answer = call_instance(role, **{**alone, "words": 0})
                extra["ec_transfer_params"] = answer.json()["ec_transfer_params"]
            elif role == "prefill":
                kept = {**extra, "kv_transfer_params": KEEP_BLOCKS_PARAMS}
                answer = call_instance(role, **alone, extra=kept)
                extra["kv_transfer_params"] = answer.json()["kv_transfer_params"]
            else:
                call_instance(role, **asked, stream=stream, extra=extra)
    return name


def collect_requests(
    bench: LiveDeployment, sent: list[str], rows: int, traced: bool
) -> list[dict[str, Any]]:
    """What the report has of these, once it has this many requests and all their last legs."""
    deadline = time.monotonic() + ARRIVAL_S
    found: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        reported = bench.get_json("/api/requests?last=500")
        found = [row for row in reported if row["request_id"] in sent]
        whole = sum(not row["pending"] for row in found)
        has_caller = all(row["before"] for row in found)
        if (len(found), whole, has_caller) == (rows, len(sent), traced):
            return found
        time.sleep(0.3)
    raise AssertionError(f"{len(found)} of {rows} requests: {found[:3]}")


def count_first_tokens(
    bench: LiveDeployment, rows: list[dict[str, Any]]
) -> tuple[Counter[tuple[str, bool]], Counter[str]]:
    """Spans of first tokens in these requests' traces: by role and outermost; outermost by request."""
    counts: Counter[tuple[str, bool]] = Counter()
    outermost: Counter[str] = Counter()
    for trace_id in {row["trace_id"] for row in rows}:
        for span in bench.get_json(f"/api/trace/{trace_id}")["spans"]:
            if span["name"] in (span_names.TTFT, span_names.ENCODE):
                own = span["attributes"]
                counts[own[keys.ROLE], own[keys.OUTERMOST]] += 1
                outermost[own[keys.REQUEST_ID]] += own[keys.OUTERMOST]
    return counts, outermost


def check_once(bench: LiveDeployment, shape: str, traced: bool) -> None:
    """Each request has exactly one outermost span, each leg its role; the time in the foreign router is
    reported with its error, and is in no sum.
    """
    legs, tracer = LEGS[shape], make_tracer(bench, traced)
    sent = [
        send_through_foreign_router(bench, shape, number % 2 == 0, tracer)
        for number in range(REQUESTS)
    ]
    rows = collect_requests(bench, sent, REQUESTS if traced else REQUESTS * len(legs), traced)
    deadline = time.monotonic() + ARRIVAL_S
    counts, outermost = count_first_tokens(bench, rows)
    while counts.total() < REQUESTS * len(legs) and time.monotonic() < deadline:
        time.sleep(0.3)  # each instance's exporter sends when its batch is due
        counts, outermost = count_first_tokens(bench, rows)

    assert counts == {(role, role not in INTERMEDIATE_ROLES): REQUESTS for role in legs}
    assert outermost == dict.fromkeys(sent, 1)
    whole = [row for row in rows if not row["pending"]]
    assert len(whole) == REQUESTS and all(row["closed"] for row in whole)
    for row in whole if traced else ():
        assert tuple(row["roles"]) == legs
        before = row["before"]
        assert before["caller"] == "their-router"
        assert before["error_ms"] == clock.WALL_ERROR_US / 1000
        # It ends with the connection, and with vLLM's event loop, which other requests' ends may hold.
        assert ROUTING_S * 1000 <= before["ms"] < ROUTING_S * 1000 + 100
        reported = sum(row["stages"].values()) + row["unattributed_ms"]
        assert reported == pytest.approx(row["ttft_ms"], abs=0.001)


@pytest.mark.parametrize("traced", [False, True])
def test_prefill_and_decode_count_once(pd: LiveDeployment, traced: bool) -> None:
    """Prefill with do_remote_decode, decode with what prefill answered, both kv_both: decode is outermost."""
    check_once(pd, "pd", traced)


@pytest.mark.parametrize("traced", [False, True])
def test_an_encoder_does_not_count(epd: LiveDeployment, traced: bool) -> None:
    """The encoder, then prefill_decode with what the encoder announced: prefill_decode is outermost."""
    check_once(epd, "epd", traced)


def test_three_count_once(epd3: LiveDeployment) -> None:
    """The encoder, prefill (consumer of encodings and kv_both) and decode: one trace, decode is outermost."""
    check_once(epd3, "epd3", traced=True)
