# SPDX-License-Identifier: Apache-2.0
"""Media encoded twice: terminal, pages and JSON have number, instance and remedy."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import sample_records
from rich.console import Console

from lab import report_files
from ttft_otel.model.names import keys, span_names
from ttft_otel.report.assemble.summary import (
    RecomputedCount,
    collect_recomputed,
    describe_recomputed,
    summarize,
)
from ttft_otel.report.report_types import Request, StoredSpan
from ttft_otel.report.show import json_answers, pages, terminal
from ttft_otel.report.store.database_reader import RequestFilter, StoredTrace, open_reader
from ttft_otel.report.store.span_store import SpanStore

SCHEMA = Path(__file__).parents[2] / "golden" / "report.schema.json"
SENTENCE = (
    "2 media items were encoded again on prefill_decode (gpu-1:77) although an encoder had encoded "
    "them: see docs/router.md#encoder-cache-parameters"
)


def store_requests(path: Path, *items: int | None) -> list[Request]:
    """Store one request per number of items that prefill-decode encoded again; None: it does not say."""
    store = SpanStore(path)
    for number, recomputed_items in enumerate(items):
        spans = sample_records.make_stored_spans(
            sample_records.make_routed_records(f"r{number}", start_ns=10**18 + number * 10**9)
        )
        store.add([mark_recomputed(span, recomputed_items) for span in spans]).result(10)
    store.close()
    with open_reader(path) as db_reader:
        return db_reader.list_latest(RequestFilter())[::-1]


def mark_recomputed(span: StoredSpan, items: int | None) -> StoredSpan:
    """The span as an encoder-cache consumer would have sent it, if it is one's."""
    mine = span.name == span_names.TTFT and span.attributes[keys.ROLE] == "prefill_decode"
    if not mine or items is None:
        return span
    resource = span.resource | {"service.instance.id": "gpu-1:77"}
    attributes = span.attributes | {keys.EC_RECOMPUTED_ITEMS: items}
    return replace(span, attributes=attributes, resource=resource)


def load_trace(path: Path, request: Request) -> StoredTrace:
    """The stored trace of a request."""
    with open_reader(path) as db_reader:
        trace = db_reader.find_trace(request.trace_id)
    assert trace is not None
    return trace


def test_items_are_added_up_by_instance(tmp_path: Path) -> None:
    """A request tells its own items, a summary those of all requests, and 0 is no item."""
    requests = store_requests(tmp_path / "spans.db", 2, 0, None, 1)

    each = [collect_recomputed([request]) for request in requests]
    assert each == [
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


def test_the_terminal_says_it_once(tmp_path: Path) -> None:
    """The sentence stands below percentiles and waterfalls, and is absent where the number is 0."""
    path = tmp_path / "spans.db"
    twice, once = store_requests(path, 2, 0)
    shown = []
    for requests in ([twice, once], [once]):
        out = io.StringIO()
        terminal.print_summary(requests, Console(file=out, width=200))
        shown.append(out.getvalue().count(SENTENCE))
    for request in (twice, once):
        out = io.StringIO()
        terminal.print_waterfall(load_trace(path, request), request, Console(file=out, width=200))
        shown.append(out.getvalue().count(SENTENCE))

    assert shown == [1, 0, 1, 0]


def test_pages_say_it(tmp_path: Path) -> None:
    """The list of requests and a trace's page have the sentence, escaped like all that is foreign."""
    path = tmp_path / "spans.db"
    twice, once = store_requests(path, 2, 0)

    assert SENTENCE in pages.render_index([twice, once], RequestFilter(), [])
    assert SENTENCE in pages.render_trace(load_trace(path, twice))
    assert "encoded again" not in pages.render_index([once], RequestFilter(), [])
    assert "encoded again" not in pages.render_trace(load_trace(path, once))
    legs = tuple(replace(leg, instance="<b>") for leg in twice.legs)
    assert "<b>)" not in pages.render_index([replace(twice, legs=legs)], RequestFilter(), [])


def test_json_has_it(tmp_path: Path) -> None:
    """In a request, in the summary and in report.json, which keeps to its schema; a list, also empty."""
    path = tmp_path / "spans.db"
    twice, once = store_requests(path, 2, 0)
    expected = [{"role": "prefill_decode", "instance": "gpu-1:77", "items": 2}]

    assert [json_answers.describe_request(each)["recomputed"] for each in (twice, once)] == [
        expected,
        [],
    ]
    assert json_answers.describe_summary(summarize([twice, once]))["recomputed"] == expected
    written = report_files.write_report_files(path, [], tmp_path)
    jsonschema.validate(written, json.loads(SCHEMA.read_text("utf-8")))
    assert [each["recomputed"] for each in written["requests"]] == [expected, []]
    assert written["summary"]["recomputed"] == expected
