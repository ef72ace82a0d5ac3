# SPDX-License-Identifier: Apache-2.0
"""The report's pages: complete, escaped, self-contained, and clear about what is missing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
import sample_records
from sample_records import RunningServer, fetch_page

from lab import report_files
from tests.stack.grafana_browser import REMEDY, find_chromium
from ttft_otel.model.names import keys
from ttft_otel.model.record import Record
from ttft_otel.report.show import pages
from ttft_otel.report.store.database_reader import RequestFilter
from ttft_otel.report.store.span_store import SpanStore

ATTACK = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>"


class ParsedPage(HTMLParser):
    """Every tag with its attributes, and whether each was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open_tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "br", "img"):
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag that closes itself."""
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Every end has its beginning, except where HTML lets it out."""
        while (
            self.open_tags and self.open_tags[-1] in ("option", "p") and self.open_tags[-1] != tag
        ):
            self.open_tags.pop()
        assert self.open_tags and self.open_tags.pop() == tag, (tag, self.getpos())


def store_records(served: RunningServer, records: Sequence[Record]) -> None:
    """Store records behind a running server."""
    store = SpanStore(served.path)
    sample_records.store_records(store, records)
    store.close()


def test_list(report_server: RunningServer) -> None:
    """The list shows every request with its bar, the percentiles, and that the sums close."""
    assert "No request is stored" in fetch_page(report_server, "/")[1]
    store_records(
        report_server,
        [
            *sample_records.make_routed_records("far"),
            sample_records.make_leg_record("mono", sample_records.DECODE_US, request_id="near"),
        ],
    )
    status, text, headers = fetch_page(report_server, "/?model=&role=&error=&min_ttft_ms=&last=abc")
    assert status == 200
    ParsedPage(text)
    for word in ("far", "near", "tiny-vl", "TTFT p50", "every request", "adds up", "Colours"):
        assert word in text
    assert ">near</a>" not in fetch_page(report_server, "/?role=encode")[1]
    assert "default-src 'none'" in headers["content-security-policy"]


def test_trace(report_server: RunningServer) -> None:
    """A request's page has its bar, its legs, the sum with its closing line, and every span."""
    records = sample_records.make_routed_records("far", encoders=2)
    store_records(report_server, records)
    status, text, _ = fetch_page(report_server, f"/trace/{records[0].trace_id}")
    assert status == 200
    elements = ParsedPage(text)
    rows = [have for tag, have in elements.elements if tag == "details" and "row" in have["class"]]  # type: ignore[operator]
    assert len(rows) == len(sample_records.make_spans(records))
    assert "Σ stages + unattributed = ttft" in text
    for service in ("ttft-otel-router", "vllm-encoder", "vllm-prefill-decode"):
        assert service in text
    status, text, _ = fetch_page(report_server, f"/trace/{'0' * 32}")
    assert status == 404 and "No such trace" in text


def test_no_token(report_server: RunningServer) -> None:
    """A trace without any span of ours is shown, with a note that it has no first token."""
    record = replace_ttft(sample_records.make_short_record())
    store_records(report_server, [record])
    status, text, _ = fetch_page(report_server, f"/trace/{record.trace_id}")
    assert status == 200 and "No first token" in text


def replace_ttft(record: Record) -> Record:
    """The server half of a record."""
    return msgspec.structs.replace(record, ttft=None)


def test_policy(report_server: RunningServer) -> None:
    """Pages keep to their Content-Security-Policy: no inline style or script, no foreign URL."""
    records = sample_records.make_routed_records("far")
    store_records(report_server, records)
    for path in ("/", f"/trace/{records[0].trace_id}"):
        text = fetch_page(report_server, path)[1]
        elements = ParsedPage(text).elements
        assert not [have for _, have in elements if "style" in have]
        assert not [have for _, have in elements for name in have if name.startswith("on")]
        assert not [tag for tag, have in elements if tag == "script" and "src" not in have]
        for tag, have in elements:
            link = have.get("src") or (have.get("href") if tag in ("link", "a") else None)
            assert link is None or link.startswith(("/", "#"))
        for link in re.findall(r'(?:href|src)="(/(?:static/|stages)[^"]*)"', text):
            assert fetch_page(report_server, link)[0] == 200


def test_escaping() -> None:
    """Names, values, ids, models and services of foreign spans stay text everywhere."""
    spans = [
        replace(
            span,
            name=ATTACK if not span.is_ttft_span else span.name,
            service=ATTACK,
            message=ATTACK,
            attributes={
                **span.attributes,
                ATTACK: ATTACK,
                keys.REQUEST_ID: ATTACK,
                keys.MODEL: ATTACK,
                keys.ROLE: ATTACK,
                keys.ERROR_TYPE: ATTACK,
                keys.DIED_IN: ATTACK,
                **({keys.STAGE: ATTACK} if keys.STAGE in span.attributes else {}),
            },
            resource={ATTACK: ATTACK},
        )
        for span in sample_records.make_stored_spans(sample_records.make_routed_records("far"))
    ]
    trace = sample_records.assemble_trace(spans)
    assert trace.requests
    entries = [(request, trace, ATTACK, 1.0) for request in trace.requests]
    for text in (
        pages.render_trace(trace),
        pages.render_index(trace.requests, RequestFilter(model=ATTACK, role=ATTACK), [ATTACK]),
        pages.render_missing(ATTACK),
        report_files.render_document(ATTACK, pages.summarize(trace.requests), entries),
    ):
        elements = ParsedPage(text).elements
        assert "alert" in text
        assert not [tag for tag, have in elements if tag == "img" or "onerror" in have]
        scripts = [have for tag, have in elements if tag == "script"]
        assert len(scripts) == 1


def test_document(store: SpanStore) -> None:
    """report.html is one file that loads nothing."""
    sample_records.store_records(
        store,
        [
            *sample_records.make_routed_records("far"),
            sample_records.make_leg_record("mono", sample_records.DECODE_US),
        ],
    )
    store.close()
    folder = store.path.parent / "out"
    report_files.write_report_files(store.path, [], folder, "a demo")
    text = (folder / "report.html").read_text("utf-8")
    elements = ParsedPage(text).elements
    links = [have.get("src") or have.get("href") for _, have in elements]
    assert {link for link in links if link} == {"#main"}
    assert "url(http" not in text and "@import" not in text
    assert "a demo" in text and "far" in text


def test_window(store: SpanStore) -> None:
    """A trace of one instant, or with ends before starts, is drawn all the same."""
    spans = [
        replace(span, end_ns=span.start_ns)
        for span in sample_records.make_stored_spans(sample_records.make_routed_records("far"))
    ]
    ParsedPage(pages.render_trace(sample_records.assemble_trace(spans)))
    ParsedPage(pages.render_trace(sample_records.assemble_trace(spans[:1])))


def test_numbers() -> None:
    """Durations are rounded for reading, and exact where they are to be added up."""
    assert [pages.format_duration(us) for us in (7, 1234, 123_456, 1_234_567)] == [
        *("7 µs", "1.23 ms", "123.5 ms", "1.23 s")
    ]
    assert pages.format_exact_ms(1_234_567) == "1,234.567"
    assert pages.compute_share(5, 0) == 0.0


def test_browser(report_server: RunningServer, tmp_path: Path) -> None:
    """A real browser draws the page and its script runs: local times, buttons, no error."""
    browser = find_chromium()
    if browser is None:
        pytest.skip(REMEDY)
    records = sample_records.make_routed_records("far")
    store_records(report_server, records)
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={tmp_path}", "--virtual-time-budget=3000"),
            f"{report_server.http}/trace/{records[0].trace_id}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Show the legs' stages in the router's sum" in done.stdout
    assert re.search(r'class="row w-stage copy hide"', done.stdout)
