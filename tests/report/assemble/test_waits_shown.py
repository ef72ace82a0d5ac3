# SPDX-License-Identifier: Apache-2.0
"""The reasons of a wait stand below queue and stall, in terminal, pages and JSON."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import sample_records
from rich.console import Console

from ttft_otel.model.names import keys
from ttft_otel.report.show import json_answers, pages, terminal
from ttft_otel.report.store.database_reader import RequestFilter, open_reader
from ttft_otel.report.store.span_store import SpanStore

REASONS = {
    "ttft.queue.kv_blocks_us": 9_000,
    "ttft.queue.in_step_us": 400,
    "ttft.stall.token_budget_us": 4_100,
    "ttft.queue.no_reason_us": 7,
}
HELD = {"ttft.held.decode_us": 8_500, "ttft.held.idle_us": 900, "ttft.held.other_us": 3}


def test_shown(tmp_path: Path) -> None:
    """Also behind a router a leg's stage has that leg's reasons, longest first; other stages have none."""
    records = sample_records.make_routed_records("r", start_ns=10**18)
    spans = [
        replace(span, attributes=span.attributes | REASONS | HELD)
        if span.is_ttft_span and span.attributes[keys.ROLE] == "prefill_decode"
        else span
        for span in sample_records.make_stored_spans(records)
    ]
    store = SpanStore(tmp_path / "spans.db")
    store.add(spans).result(10)
    store.close()
    with open_reader(tmp_path / "spans.db") as reader:
        (request,) = reader.list_latest(RequestFilter())
        trace = reader.find_trace(request.trace_id)
    assert trace is not None
    console = Console(file=io.StringIO(), width=200)
    terminal.print_waterfall(trace, console=console)
    assert isinstance(console.file, io.StringIO)
    text, page = console.file.getvalue(), pages.render_trace(trace)

    assert request.list_wait_reasons("prefill_decode.prefill.queue") == [
        ("kv_blocks", 9_000),
        ("in_step", 400),
    ]
    assert request.list_wait_reasons("prefill_decode.prefill.stall") == [("token_budget", 4_100)]
    assert request.list_wait_reasons("prefill_decode.prefill.compute") == []
    assert request.list_wait_reasons("encode.encoder.queue") == []
    assert request.list_holding_kinds("prefill_decode.prefill.queue") == [
        ("decode", 8_500),
        ("idle", 900),
    ]
    assert request.list_holding_kinds("prefill_decode.prefill.stall") == []
    for word in ("kv_blocks", "in_step", "token_budget", "held by: decode"):
        assert word in text and word in page
    leg = request.find_leg("prefill_decode")
    assert leg is not None
    assert json_answers.describe_leg(leg)["reasons"] == {
        "queue": {"kv_blocks": 9.0, "in_step": 0.4},
        "stall": {"token_budget": 4.1},
    }
    assert json_answers.describe_leg(leg)["held"] == {"decode": 8.5, "idle": 0.9}
