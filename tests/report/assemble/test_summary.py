# SPDX-License-Identifier: Apache-2.0
"""The summary's figures, and what stands beside them: reasons of waits, clock errors, media encoded twice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from sample_records import (
    DECODE_US,
    RunningServer,
    assemble_records,
    assemble_trace,
    capture_text,
    change_spans,
    fetch_json,
    fill_database,
    make_leg_record,
    make_routed_records,
)

from lab import report_files
from ttft_otel.model import stages
from ttft_otel.model.names import keys
from ttft_otel.model.record import Record
from ttft_otel.report.assemble.summary import (
    NOTABLE_ERROR_US,
    collect_recomputed,
    describe_recomputed,
    find_clock_error,
    summarize,
)
from ttft_otel.report.report_types import Request, StoredSpan
from ttft_otel.report.show import json_answers, pages, terminal
from ttft_otel.report.store.database_reader import RequestFilter, StoredTrace
from ttft_otel.report.store.span_store import SpanStore


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
