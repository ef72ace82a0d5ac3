# SPDX-License-Identifier: Apache-2.0
"""Traced servers behind a router without our code: one outermost span per request, each leg its role.

The test plays that router by vLLM's contract (its toy proxy's and its EPD proxy's), with OpenTelemetry or
without. docs/router.md lists the real routers that were tried by hand.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from collections import Counter
from typing import Any

import pytest

from lab import ttft_client
from lab.ttft_client import TimedResponse
from tests.live.bench import LiveDeployment
from ttft_otel.model.names import header_names, keys, span_names
from ttft_otel.model.stages import INTERMEDIATE_ROLES
from ttft_otel.router.disagg.request_plan import KEEP_BLOCKS_PARAMS
from ttft_otel.tracing import clock

pytestmark = pytest.mark.full

REQUESTS = 20
ROUTING_S = 0.03  # what the router takes before it calls anybody
LEGS = {
    "pd": ("prefill", "decode"),
    "epd": ("encode", "prefill_decode"),
    "epd3": ("encode", "prefill", "decode"),
}


class ForeignRouter:
    """One request on its way through the router: a span of its own and one per call, sent when it ends."""

    def __init__(self, bench: LiveDeployment, traced: bool) -> None:
        self.bench = bench
        self.traced = traced
        self.request_id = f"foreign-{os.urandom(8).hex()}"
        self.trace_id, self.top = os.urandom(16).hex(), os.urandom(8).hex()
        self.start = time.time_ns()
        self.spans: list[dict[str, Any]] = []
        time.sleep(ROUTING_S)

    def call_instance(self, role: str, **fields: Any) -> TimedResponse:
        """Call an instance as such a router does, without a header of ours."""
        span_id = os.urandom(8).hex()
        headers = (
            {header_names.TRACEPARENT: f"00-{self.trace_id}-{span_id}-01"} if self.traced else {}
        )
        start = time.time_ns()
        answer = ttft_client.send_timed_request(
            self.bench.fleet.get_url(role), request_id=self.request_id, headers=headers, **fields
        )
        self.add_span(span_id, self.top, "SPAN_KIND_CLIENT", start)
        assert answer.status == 200, answer.body
        return answer

    def add_span(self, span_id: str, parent: str, kind: str, start: int) -> None:
        """Add a span that ends now."""
        times = {"startTimeUnixNano": str(start), "endTimeUnixNano": str(time.time_ns())}
        ids = {"traceId": self.trace_id, "spanId": span_id, "parentSpanId": parent}
        self.spans.append({**ids, **times, "name": "their span", "kind": kind})

    def finish_request(self) -> None:
        """End the request; a traced router exports its spans."""
        self.add_span(self.top, "", "SPAN_KIND_SERVER", self.start)
        if not self.traced:
            return
        who = {"service.name": "their-router", "host.name": socket.gethostname()}
        resource = [{"key": key, "value": {"stringValue": value}} for key, value in who.items()]
        scopes = [{"scope": {"name": "their.tracer"}, "spans": self.spans}]
        group = {"resource": {"attributes": resource}, "scopeSpans": scopes}
        request = urllib.request.Request(
            f"{self.bench.fleet.get_url('receiver')}/v1/traces",
            json.dumps({"resourceSpans": [group]}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200


def send_through_foreign_router(
    bench: LiveDeployment, shape: str, stream: bool, traced: bool
) -> ForeignRouter:
    """Send one request through the instances of `shape` as vLLM's proxies do."""
    router = ForeignRouter(bench, traced)
    picture = bench.new_picture_seed()
    asked: dict[str, Any] = {"prompt": str(picture), "words": 200, "max_tokens": 3}
    alone = {"max_tokens": 1, "stream": False}
    extra: dict[str, Any] = {}
    for role in LEGS[shape]:
        pictures = () if shape == "pd" else (picture,)
        if role == "encode":
            answer = router.call_instance(role, **{**asked, **alone, "words": 0}, pictures=pictures)
            extra["ec_transfer_params"] = answer.json()["ec_transfer_params"]
        elif role == "prefill":
            kept = {**extra, "kv_transfer_params": KEEP_BLOCKS_PARAMS}
            answer = router.call_instance(role, **{**asked, **alone}, pictures=pictures, extra=kept)
            extra["kv_transfer_params"] = answer.json()["kv_transfer_params"]
        else:
            router.call_instance(role, **asked, stream=stream, pictures=pictures, extra=extra)
    router.finish_request()
    return router


def collect_requests(
    bench: LiveDeployment, sent: list[ForeignRouter], rows: int
) -> list[dict[str, Any]]:
    """What the report has of these, once it has this many requests and all their last legs."""
    ids = {router.request_id for router in sent}
    deadline = time.monotonic() + 20
    found: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        found = [
            row for row in bench.get_json("/api/requests?last=500") if row["request_id"] in ids
        ]
        whole = sum(not row["pending"] for row in found)
        reported = all(row["before"] for row in found) == sent[0].traced
        if (len(found), whole, reported) == (rows, len(sent), True):
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


def check_once(bench: LiveDeployment, shape: str, traced: bool) -> list[dict[str, Any]]:
    """Send requests; each has exactly one outermost span, each leg its role. Gives the report's rows."""
    sent = [send_through_foreign_router(bench, shape, n % 2 == 0, traced) for n in range(REQUESTS)]
    legs = LEGS[shape]
    rows = collect_requests(bench, sent, REQUESTS if traced else REQUESTS * len(legs))
    expected = {(role, role not in INTERMEDIATE_ROLES): REQUESTS for role in legs}
    deadline = time.monotonic() + 20
    counts, outermost = count_first_tokens(bench, rows)
    while counts.total() < REQUESTS * len(legs) and time.monotonic() < deadline:
        time.sleep(0.3)  # each instance's exporter sends when its batch is due
        counts, outermost = count_first_tokens(bench, rows)

    assert counts == expected
    assert outermost == {router.request_id: 1 for router in sent}
    whole = [row for row in rows if not row["pending"]]
    assert len(whole) == REQUESTS and all(row["closed"] for row in whole)
    return whole


def check_before(rows: list[dict[str, Any]], legs: tuple[str, ...]) -> None:
    """Check that the time in the foreign router is reported with its error, and is in no sum."""
    for row in rows:
        assert tuple(row["roles"]) == legs
        before = row["before"]
        assert (before["caller"], before["error_ms"]) == (
            "their-router",
            clock.WALL_ERROR_US / 1000,
        )
        # It ends with the connection, and with vLLM's event loop, which other requests' ends may hold.
        assert ROUTING_S * 1000 <= before["ms"] < ROUTING_S * 1000 + 100
        reported = sum(row["stages"].values()) + row["unattributed_ms"]
        assert reported == pytest.approx(row["ttft_ms"], abs=0.001)


@pytest.mark.parametrize("traced", [False, True])
def test_prefill_and_decode_count_once(pd: LiveDeployment, traced: bool) -> None:
    """Prefill with do_remote_decode, decode with what prefill answered, both kv_both: decode's span is
    the outermost one.
    """
    rows = check_once(pd, "pd", traced)

    if traced:
        check_before(rows, LEGS["pd"])


@pytest.mark.parametrize("traced", [False, True])
def test_an_encoder_does_not_count(epd: LiveDeployment, traced: bool) -> None:
    """The encoder, then prefill_decode with what the encoder announced: prefill_decode's span is the
    outermost one.
    """
    rows = check_once(epd, "epd", traced)

    if traced:
        check_before(rows, LEGS["epd"])


def test_three_count_once(epd3: LiveDeployment) -> None:
    """The encoder, prefill (encoder-cache consumer and kv_both) and decode: one trace, decode's span the
    outermost one.
    """
    check_before(check_once(epd3, "epd3", traced=True), LEGS["epd3"])
