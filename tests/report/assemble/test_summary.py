# SPDX-License-Identifier: Apache-2.0
"""The summary's percentiles and means, with failed requests and without; its stages have one order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sample_records
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult
from sample_records import RunningServer, assemble_trace, make_stored_spans

from ttft_otel.model import palette, stages
from ttft_otel.model.names import keys
from ttft_otel.model.record import Record
from ttft_otel.report.assemble.summary import summarize
from ttft_otel.report.report_types import Request


def make_requests(*records: sample_records.Record) -> list[Request]:
    """Requests of these single-server records."""
    return [
        request
        for record in records
        for request in assemble_trace(make_stored_spans([record])).requests
    ]


def test_means_add_up() -> None:
    """The means of all stages and of the remainder are the mean TTFT, stages missing or not."""
    found = make_requests(
        sample_records.make_leg_record("mono", sample_records.DECODE_US),
        sample_records.make_leg_record("mono", {"sample": 4000, "kv.transfer": 2000}),
    )
    summary = summarize(found)
    assert abs(sum(line.mean for line in summary.stages) - summary.ttft.mean) < 0.001 * 20
    counts = {line.name: line.count for line in summary.stages}
    assert (counts["sample"], counts["kv.transfer"], counts["unattributed"]) == (2, 1, 2)
    assert summary.closed


def test_failed() -> None:
    """A request that died is counted, and is in no percentile."""
    summary = summarize(
        make_requests(
            sample_records.make_leg_record("mono", {"ipc": 5}, error="EngineDeadError", died="ipc")
        )
    )
    assert (summary.count, summary.failed, summary.closed) == (0, 1, False)


def test_every_stage_has_a_colour() -> None:
    """Each word of the vocabulary has a kind, a colour of its own, a class and a sentence."""
    words = [*stages.STAGE_NAMES, *stages.ROUTER_STAGES]
    assert len({palette.find_color(word) for word in words}) == len(words)
    for word in (*words, "encode.preprocess", "router.hop.encode"):
        assert stages.find_kind(word) in palette.KIND_LABELS
        assert stages.describe_stage(word)
        assert f".{palette.get_css_class(word)}{{" in palette.build_style_sheet()
    assert palette.get_css_class("<script>") == palette.get_css_class(stages.UNATTRIBUTED)


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
    return sample_records.make_leg_record(
        role, {"prefill.compute": length_us}, lost=0, tail=0, **changes
    )


def make_mix() -> list[Record]:
    """The known truth: GOOD_US by servers and by routers, and all of ENDS."""
    records = []
    for number, length_us in enumerate(GOOD_US):
        if number % 2:
            records.append(make_request(length_us, request_id=f"good-{number}"))
            continue
        # A router with one leg; the leg's own span is not outermost.
        router = make_request(length_us, "router", request_id=f"good-{number}")
        leg = make_request(
            length_us - 900,
            trace_id=router.trace_id,
            parent=router.span_id,
            request_id=f"good-{number}",
            outermost=False,
        )
        records += [leg, router]
    for error, (quick, slow) in ENDS.items():
        role = "router" if error in ROUTERS_ENDS else "mono"
        for number in range(quick + slow):
            length_us = 200 if number < quick else 9_000_000
            records.append(make_request(length_us, role, error=error, died="prefill.queue"))
    # A router's request that failed although its leg had a first token: the client saw none.
    router = make_request(300, "router", error="502", died="router.hop.mono")
    leg = make_request(100, trace_id=router.trace_id, parent=router.span_id, outermost=False)
    return [*records, leg, router]


@pytest.fixture
def summary(report_server: RunningServer) -> Any:
    """The summary after the mix was exported, as `ttft-otel report --json` has it."""
    exporter = OTLPSpanExporter(endpoint=f"{report_server.http}/v1/traces", timeout=30)
    spans = sample_records.make_spans(make_mix())
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()
    return sample_records.fetch_json(report_server, "/api/summary?last=1000")[1]


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
