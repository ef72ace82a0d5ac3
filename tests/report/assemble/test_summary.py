# SPDX-License-Identifier: Apache-2.0
"""The summary's percentiles are as documented, its means add up, its stages have one order."""

from __future__ import annotations

import sample_records
from sample_records import assemble_trace, make_stored_spans

from ttft_otel.model import palette, stages
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
