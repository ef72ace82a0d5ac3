# SPDX-License-Identifier: Apache-2.0
"""The pages: complete, escaped, self-contained; explanations on them, of the store and of Tempo.

In a real browser, with requests of a real vLLM: axe's rules (WCAG 2.2 AA), keys, widths.
"""

from __future__ import annotations

import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from sample_records import (
    DECODE_US,
    RunningServer,
    assemble_trace,
    fetch_page,
    fill_database,
    make_leg_record,
    make_routed_records,
    make_short_record,
    make_spans,
    make_stored_spans,
)

from lab import report_files
from tests.fake_tempo import FakeTempo
from tests.stack.grafana_browser import REMEDY, find_chromium, launch_browser
from ttft_otel.commands import main as cli
from ttft_otel.commands.serve import list_commands, read_recorded
from ttft_otel.model.names import keys
from ttft_otel.model.record import Record
from ttft_otel.report.breakdown_source import ExplainAnswer, ExplainQuestion
from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.show import pages
from ttft_otel.report.show.pages import DASHBOARD
from ttft_otel.report.store.database_reader import RequestFilter

ATTACK = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>"
ODD_ID = "a/b <script>alert(1)</script>?x"
BEGIN_S = int(time.time()) - 600  # by an ID Tempo is searched two weeks back
COUNT = 30
GRAFANA = "http://grafana.example:3000"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
WIDE, NARROW = 1400, 360
# Of a waterfall's rows, which are alike, the first ones.
UNFOLD = """document.querySelectorAll("details:not(.row), .row:nth-of-type(-n+3)")
    .forEach((each) => { each.open = true; })"""
SLOWEST = "demo-25"  # of the recorded requests


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


@pytest.fixture
def far(report_server: RunningServer) -> tuple[RunningServer, list[Record]]:
    """A server with a routed request, and one of a single server; the records of the former."""
    records = make_routed_records("far", encoders=2)
    near = make_leg_record("mono", DECODE_US, request_id="near")
    fill_database(report_server.path, *records, near)
    return report_server, records


def test_list(far: tuple[RunningServer, list[Record]]) -> None:
    """The list shows every request with its bar, the percentiles, and that the sums close."""
    status, text, headers = fetch_page(far[0], "/?model=&role=&error=&min_ttft_ms=&last=abc")
    assert status == 200
    ParsedPage(text)
    for word in ("far", "near", "tiny-vl", "TTFT p50", "every request", "adds up", "Colours"):
        assert word in text
    assert ">near</a>" not in fetch_page(far[0], "/?role=encode")[1]
    assert "No request is stored" in fetch_page(far[0], "/?model=none")[1]
    assert "default-src 'none'" in headers["content-security-policy"]


def test_trace(far: tuple[RunningServer, list[Record]]) -> None:
    """A request's page has its bar, its legs, the sum with its closing line, and every span."""
    server, records = far
    status, text, _ = fetch_page(server, f"/trace/{records[0].trace_id}")
    assert status == 200
    elements = ParsedPage(text).elements
    rows = [have for tag, have in elements if tag == "details" and "row" in (have["class"] or "")]
    assert len(rows) == len(make_spans(records))
    assert "Σ stages + unattributed = ttft" in text
    for service in ("ttft-otel-router", "vllm-encoder", "vllm-prefill-decode"):
        assert service in text
    status, missing, _ = fetch_page(server, f"/trace/{'0' * 32}")
    assert status == 404 and "No such trace" in missing
    # A server that cannot explain shows no link.
    assert "/why/" not in text and fetch_page(server, "/why/r1")[0] == 404


def test_policy(far: tuple[RunningServer, list[Record]]) -> None:
    """Pages keep to their Content-Security-Policy: no inline style or script, no foreign URL."""
    server, records = far
    for path in ("/", f"/trace/{records[0].trace_id}"):
        text = fetch_page(server, path)[1]
        elements = ParsedPage(text).elements
        assert not [have for _, have in elements if "style" in have]
        assert not [have for _, have in elements for name in have if name.startswith("on")]
        assert not [tag for tag, have in elements if tag == "script" and "src" not in have]
        for tag, have in elements:
            link = have.get("src") or (have.get("href") if tag in ("link", "a") else None)
            assert link is None or link.startswith(("/", "#"))
        for link in re.findall(r'(?:href|src)="(/(?:static/|stages)[^"]*)"', text):
            assert fetch_page(server, link)[0] == 200


def test_escaping() -> None:
    """Names, values, ids, models and services of foreign spans stay text everywhere."""
    names = (ATTACK, keys.REQUEST_ID, keys.MODEL, keys.ROLE, keys.ERROR_TYPE, keys.DIED_IN)
    spans = [
        replace(
            span,
            name=ATTACK if not span.is_ttft_span else span.name,
            service=ATTACK,
            message=ATTACK,
            attributes={
                **span.attributes,
                **dict.fromkeys((*names, *({keys.STAGE} & span.attributes.keys())), ATTACK),
            },
            resource={ATTACK: ATTACK},
        )
        for span in make_stored_spans(make_routed_records("far"))
    ]
    trace = assemble_trace(spans)
    assert trace.requests
    entries = [(request, trace, ATTACK, 1.0) for request in trace.requests]
    for text in (
        pages.render_trace(trace),
        pages.render_index(trace.requests, RequestFilter(model=ATTACK, role=ATTACK), [ATTACK]),
        pages.render_template("missing.html", trace_id=ATTACK),
        report_files.render_document(ATTACK, pages.summarize(trace.requests), entries),
    ):
        elements = ParsedPage(text).elements
        assert "alert" in text
        assert not [tag for tag, have in elements if tag == "img" or "onerror" in have]
        assert sum(tag == "script" for tag, _ in elements) == 1


def test_document(tmp_path: Path) -> None:
    """report.html is one file that loads nothing."""
    path = fill_database(tmp_path / "spans.db", *make_routed_records("far"), make_short_record())
    report_files.write_report_files(path, [], tmp_path / "out", "a demo")
    text = (tmp_path / "out" / "report.html").read_text("utf-8")
    elements = ParsedPage(text).elements
    links = [have.get("src") or have.get("href") for _, have in elements]
    assert {link for link in links if link} == {"#main"}
    assert "url(http" not in text and "@import" not in text
    assert "a demo" in text and "far" in text


def test_window() -> None:
    """A trace of one instant, with ends before starts, or without a first token, is drawn all the same."""
    spans = [
        replace(span, end_ns=span.start_ns)
        for span in make_stored_spans(make_routed_records("far"))
    ]
    ParsedPage(pages.render_trace(assemble_trace(spans)))
    ParsedPage(pages.render_trace(assemble_trace(spans[:1])))
    alone = make_stored_spans([msgspec.structs.replace(make_short_record(), ttft=None)])
    assert "No first token" in pages.render_trace(assemble_trace(alone))


def test_numbers() -> None:
    """Durations are rounded for reading, and exact where they are to be added up."""
    assert [pages.format_duration(us) for us in (7, 1234, 123_456, 1_234_567)] == [
        *("7 µs", "1.23 ms", "123.5 ms", "1.23 s")
    ]
    assert pages.format_exact_ms(1_234_567) == "1,234.567"
    assert pages.compute_share(5, 0) == 0.0


def make_late_records(begin_s: int, last_id: str) -> list[Record]:
    """COUNT requests a second apart, of which the last one took three times as long."""
    return [
        record
        for number in range(COUNT)
        for record in make_routed_records(
            last_id if number == COUNT - 1 else f"r{number}",
            3.0 if number == COUNT - 1 else 1 + number / 1000,
            start_ns=(begin_s + number) * 10**9,
        )
    ]


def test_why(start_report_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    """The link leads to the answer of `ttft-otel explain`; nothing of an ID gets out of the page."""
    records = make_late_records(1_790_000_000, ODD_ID)
    path = fill_database(tmp_path / "why.db", *records)
    server = start_report_server(path=path, explain=cli.answer_question)
    link = f"/why/{quote(ODD_ID)}"
    assert f'href="{link}"' in fetch_page(server, f"/trace/{records[-1].trace_id}")[1]
    status, text, _ = fetch_page(server, link)
    assert status == 200 and "against 29 requests" in text, text
    assert "prefill_decode.prefill.compute" in text
    assert "<script>alert" not in text
    status, text, _ = fetch_page(server, "/why/nobody")
    assert status == 200 and "nothing is stored for" in text


def test_one_at_a_time(start_report_server: Callable[..., RunningServer]) -> None:
    """While one request is explained a second one gets 503 and is told to try again; later it is answered."""
    begun, done = threading.Event(), threading.Event()

    def wait_to_answer(_: SourceChoice, question: ExplainQuestion) -> ExplainAnswer:
        begun.set()
        assert done.wait(20)
        return ExplainAnswer([f"because of {question.request_id}"], {})

    server = start_report_server(explain=wait_to_answer)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(fetch_page, server, "/why/one")
        assert begun.wait(20)
        status, text, _ = fetch_page(server, "/why/two")
        assert status == 503 and "try again" in text
        done.set()
        status, text, _ = first.result()
    assert status == 200 and "because of one" in text
    assert "because of two" in fetch_page(server, "/why/two")[1]


def test_without_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is missing the page says how to install it."""
    for module in [name for name in sys.modules if name.startswith("ttft_otel.explain")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "numpy", None)
    answer = cli.answer_question(
        SourceChoice(db=tmp_path / "spans.db"), ExplainQuestion(request_id="r1")
    )
    assert "pip install 'ttft-otel[explain]'" in answer.sentences[0]
    assert not answer.document["answered"]


@pytest.fixture
def tempo() -> FakeTempo:
    """A Tempo with those requests."""
    made = FakeTempo()
    made.add(make_spans(make_late_records(BEGIN_S, f"r{COUNT - 1}")))
    return made


@pytest.fixture
def server(
    start_report_server: Callable[..., RunningServer], tempo: FakeTempo, tmp_path: Path
) -> RunningServer:
    """A server over that Tempo."""
    return start_report_server(
        path=tmp_path / "unused.db",
        explain=cli.answer_question,
        tempo=SourceChoice(tempo=tempo.url),
        grafana_url=GRAFANA,
    )


def test_links(server: RunningServer, tempo: FakeTempo, tmp_path: Path) -> None:
    """A panel's link leads to the explanation of its time range, that to a trace, and both to Grafana."""
    with tempo:
        window = {"from": BEGIN_S * 1000, "to": (BEGIN_S + COUNT) * 1000}
        asked = "&".join(f"{name}={value}" for name, value in window.items())
        # As Grafana writes it with All chosen.
        status, why, _ = fetch_page(server, f"/why?{asked}&model=.*&slo_ms=")
        assert status == 200 and "the slowest 5 of 30 requests" in why, why
        dashboard = re.search(rf'href="({GRAFANA}/d/[^"]+)"', why)
        assert dashboard and f"/d/{DASHBOARD}?" in dashboard[1]
        shown = parse_qs(urlsplit(dashboard[1].replace("&amp;", "&")).query)
        assert shown == {name: [str(value)] for name, value in window.items()}
        begin = datetime.fromtimestamp(BEGIN_S, timezone.utc).isoformat(timespec="milliseconds")
        assert f"ttft-otel explain --since {begin}.." in why

        link = re.search(r'href="(/trace/([0-9a-f]{32}))">r29<', why)
        assert link
        status, page, _ = fetch_page(server, link[1])
        assert status == 200 and "Why did it take so long?" in page
        assert f"{GRAFANA}/d/{DASHBOARD}?from=" in page and f"var-trace={link[2]}" in page
        for single in (f"/why?trace={link[2]}", "/why/r29"):
            status, why, _ = fetch_page(server, single)
            assert status == 200 and "against 29 requests" in why, why
        assert "r29" in fetch_page(server, "/")[1]
        # One model as Grafana writes it, and several.
        for model, found in (("{tiny-vl}", 30), ("{other}", 0), ("{tiny-vl,other}", 30)):
            answered = f"the slowest 5 of {found} requests" if found else "0 requests with"
            assert answered in fetch_page(server, f"/why?{asked}&model={model}")[1]
    assert not (tmp_path / "unused.db").exists()


def test_nothing_is_received(server: RunningServer, tempo: FakeTempo) -> None:
    """There is no route for spans, and a Tempo that is away is said."""
    assert server.grpc.endswith(":-1")
    assert fetch_page(server, "/v1/traces")[0] == 404
    assert fetch_page(server, "/healthz")[0] == 200
    tempo.server.close()
    status, text, _ = fetch_page(server, "/why")
    assert status == 503 and "is not reachable" in text


def test_odd_questions(server: RunningServer, tempo: FakeTempo) -> None:
    """What is no number restricts nothing; whatever a link asks, the page answers."""
    with tempo:
        for query in (
            *("", "from=x&to=y&slo_ms=nan", "from=1e300&to=-1", "trace=%00"),
            "model={a,b}&from=5&to=1",
        ):
            assert fetch_page(server, f"/why?{query}")[0] == 200, query


@pytest.fixture
def recorded(start_report_server: Callable[..., RunningServer], tmp_path: Path) -> dict[str, str]:
    """The addresses of the kinds of pages, of a server of the recorded requests with explanations."""
    spans = read_recorded(time.time_ns())
    path = fill_database(tmp_path / "recorded.db", spans=spans)
    words = shlex.split(list_commands(spans, path)[2])
    windows = urlencode({name[2:]: words[words.index(name) + 1] for name in ("--a", "--b")})
    (trace,) = {s.trace_id for s in spans if s.attributes.get(keys.REQUEST_ID) == SLOWEST}
    server = start_report_server(path=path, explain=cli.answer_question)
    paths = {
        "list": "/",
        "empty list": "/?model=none",
        "trace": f"/trace/{trace}",
        "missing": f"/trace/{'0' * 32}",
        "why": f"/why/{SLOWEST}",
        "why window": "/why",
        "refused": "/why/nobody",
        "diff": f"/diff?{windows}",
        "refused diff": "/diff?a=x",
    }
    return {name: server.http + place for name, place in paths.items()}


@pytest.fixture
def tab() -> Iterator[Any]:
    """A tab of a browser whose errors, also those of the Content-Security-Policy, fail the test."""
    if find_chromium() is None:
        pytest.skip(REMEDY)
    with launch_browser() as browser:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda told: errors.append(told.text) if told.type == "error" else None)
        yield page
        # That of a page that is not there is expected.
        assert not [each for each in errors if "404 (Not Found)" not in each]


def describe_violations(page: Any) -> list[str]:
    """What axe finds, one line for each element."""
    found = Axe().run(page, options={"runOnly": RULES}).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:120]} {node['any'][0]['message'] if node['any'] else ''}"
        for rule in found
        for node in rule["nodes"]
    ]


@pytest.mark.full
@pytest.mark.parametrize(("theme", "width"), [("light", NARROW), ("dark", WIDE)])
def test_everybody_can_read_the_pages(
    recorded: dict[str, str], tab: Any, theme: str, width: int
) -> None:
    """No rule of axe is broken on any page with everything unfolded, and none scrolls sideways."""
    broken: dict[str, list[str]] = {}
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=theme)
    for name, url in recorded.items():
        tab.goto(url)
        tab.evaluate(UNFOLD)
        found = describe_violations(tab)
        if tab.evaluate("document.documentElement.scrollWidth > innerWidth"):
            found.append("the page scrolls sideways")
        if found:
            broken[name] = found
    assert not broken


@pytest.mark.full
def test_axe_sees_a_fault(recorded: dict[str, str], tab: Any) -> None:
    """The check is not blind: grey text on grey is told."""
    tab.goto(recorded["list"])
    tab.evaluate("document.querySelector('h2').style.color = '#ddd'")
    assert any("color-contrast" in each for each in describe_violations(tab))


def test_a_late_request_is_reached_by_keys(recorded: dict[str, str], tab: Any) -> None:
    """Tab leads to the late dots of the picture, in sight, and Enter to why one of them was late."""
    tab.goto(recorded["list"])
    for _ in range(60):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.closest('.scatter') !== null"):
            break
    name = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    ring = tab.evaluate(
        "getComputedStyle(document.activeElement.querySelector('.late')).strokeWidth"
    )
    assert ring == "3px"
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/why/*")
    request_id = name.partition(",")[0]
    assert tab.title() == f"Why? {request_id} · ttft-otel"
    assert request_id in tab.inner_text("main")


def test_the_script_runs(recorded: dict[str, str], tab: Any) -> None:
    """It hides the legs' stages that the router's sum repeats, behind a button."""
    tab.goto(recorded["trace"])
    assert "Show the legs' stages in the router's sum" in tab.inner_text("main")
    assert tab.locator(".row.w-stage.copy.hide").count() > 0


def test_before_and_after(recorded: dict[str, str], tab: Any) -> None:
    """The form compares what it was given; bars are to one scale, and stages within chance are said so."""
    tab.goto(recorded["diff"])
    assert "28 requests" in tab.inner_text(".answer")
    before, after = (
        sum(
            float(each.get_attribute("width").rstrip("%"))
            for each in bar.query_selector_all("rect")
        )
        for bar in tab.query_selector_all(".pair svg")
    )
    assert before == pytest.approx(100, abs=0.5) and 40 < after < 65  # 955 and 514 ms
    assert "within chance" in tab.inner_text(".evidences")
    tab.fill("input[name=a]", "5m..4m")
    tab.click("text=Compare")
    assert "ttft-otel diff --a 5m..4m --b" in tab.inner_text("main")
