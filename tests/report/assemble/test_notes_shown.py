# SPDX-License-Identifier: Apache-2.0
"""What stands beside the figures: reasons of waits, another clock's error, media encoded twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from sample_records import (
    assemble_trace,
    capture_text,
    change_spans,
    make_routed_records,
)

from lab import report_files
from ttft_otel.model.names import keys
from ttft_otel.report.assemble.summary import (
    NOTABLE_ERROR_US,
    RecomputedCount,
    collect_recomputed,
    describe_recomputed,
    summarize,
)
from ttft_otel.report.report_types import StoredSpan
from ttft_otel.report.show import json_answers, pages, terminal
from ttft_otel.report.store.database_reader import RequestFilter
from ttft_otel.report.store.span_store import SpanStore

SCHEMA = Path(__file__).parents[2] / "golden" / "report.schema.json"
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
    text = capture_text(lambda console: terminal.print_waterfall(trace, console=console))
    page = pages.render_trace(trace)

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


@pytest.mark.parametrize(("error_us", "said"), [(1900, True), (NOTABLE_ERROR_US, False)])
def test_clock_error(error_us: int, said: bool) -> None:
    """Terminal and pages show it, for many requests and for one; not while it is small."""
    error = {keys.CLOCK_ERROR_US: error_us}
    trace = assemble_trace(change_spans(make_routed_records(), "prefill_decode", error))
    shown = [
        capture_text(lambda console: terminal.print_summary(trace.requests, console)),
        capture_text(lambda console: terminal.print_waterfall(trace, console=console)),
        pages.render_trace(trace),
    ]

    assert [text.count(CLOCK_SENTENCE) for text in shown] == [said] * 3
    assert summarize(trace.requests).clock_error_us == error_us * said


def make_recomputed(number: int, items: int | None) -> list[StoredSpan]:
    """A routed request whose media an encoder-cache consumer encoded again; None: it does not say."""
    records = make_routed_records(f"r{number}", start_ns=10**18 + number * 10**9)
    told = {} if items is None else {keys.EC_RECOMPUTED_ITEMS: items}
    return change_spans(records, "prefill_decode", told, service_instance_id="gpu-1:77")


def test_items_are_added_up_by_instance() -> None:
    """A request tells its own items, a summary those of all requests, and 0 is no item."""
    requests = [
        assemble_trace(make_recomputed(number, items)).requests[0]
        for number, items in enumerate((2, 0, None, 1))
    ]

    assert [collect_recomputed([request]) for request in requests] == [
        (RecomputedCount("prefill_decode", "gpu-1:77", 2),),
        (),
        (),
        (RecomputedCount("prefill_decode", "gpu-1:77", 1),),
    ]
    assert summarize(requests).recomputed == (RecomputedCount("prefill_decode", "gpu-1:77", 3),)


def test_the_sentence_names_what_to_check() -> None:
    """One item and many, with and without an instance, and never more instances than fit."""
    many = [RecomputedCount("prefill", f"gpu-{number}:1", 1) for number in range(6)]

    assert describe_recomputed([]) == ""
    assert describe_recomputed([RecomputedCount("prefill_decode", "gpu-1:77", 2)]) == SENTENCE
    one = describe_recomputed([RecomputedCount("prefill", "", 1)])
    assert one.startswith(
        "1 media item was encoded again on prefill although an encoder had encoded it:"
    )
    assert "gpu-3:1), 2 more although" in describe_recomputed(many)
    assert describe_recomputed(many).startswith("6 media items were")


@pytest.mark.parametrize("items", [2, 0])
def test_recomputed_items(store: SpanStore, items: int) -> None:
    """Terminal, pages and JSON say once what was encoded again, and nothing of it where that is 0."""
    spans = make_recomputed(0, items)
    trace = assemble_trace(spans)
    (request,) = trace.requests
    shown = [
        capture_text(lambda console: terminal.print_summary([request], console)),
        capture_text(lambda console: terminal.print_waterfall(trace, request, console)),
        pages.render_index([request], RequestFilter(), []),
        pages.render_trace(trace),
    ]
    expected = [{"role": "prefill_decode", "instance": "gpu-1:77", "items": 2}] if items else []
    store.add(spans).result(10)
    written = report_files.write_report_files(store.path, [], store.path.parent)

    assert [text.count(SENTENCE) for text in shown] == [bool(items)] * 4
    assert [text.count("encoded again") for text in shown] == [bool(items)] * 4
    legs = tuple(replace(leg, instance="<b>") for leg in request.legs)
    assert "<b>)" not in pages.render_index([replace(request, legs=legs)], RequestFilter(), [])
    assert json_answers.describe_request(request)["recomputed"] == expected
    assert json_answers.describe_summary(summarize([request]))["recomputed"] == expected
    jsonschema.validate(written, json.loads(SCHEMA.read_text("utf-8")))
    assert written["requests"][0]["recomputed"] == written["summary"]["recomputed"] == expected
