# SPDX-License-Identifier: Apache-2.0
"""Explanations on pages, of the store and of Tempo: linked from a request, safe with any ID."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from sample_records import (
    RunningServer,
    fetch_page,
    make_routed_records,
    make_spans,
    make_stored_spans,
)

from tests.fake_tempo import FakeTempo
from ttft_otel.commands import main as cli
from ttft_otel.report.breakdown_source import ExplainAnswer, ExplainQuestion
from ttft_otel.report.report_types import SourceChoice
from ttft_otel.report.show.pages import DASHBOARD
from ttft_otel.report.store.span_store import SpanStore

ODD_ID = "a/b <script>alert(1)</script>?x"


def open_page(server: RunningServer, path: str) -> tuple[int, str]:
    """Status and text of a page."""
    return fetch_page(server, path)[:2]


def fill_database(path: Path) -> str:
    """Thirty requests, the last one three times as slow; its trace ID."""
    store = SpanStore(path)
    for number in range(30):
        factor = 3.0 if number == 29 else 1 + number / 1000
        name = ODD_ID if number == 29 else f"r{number}"
        records = make_routed_records(name, factor, start_ns=(1_790_000_000 + number) * 10**9)
        store.add(make_stored_spans(records)).result(20)
    store.close()
    return records[-1].trace_id


def test_why(start_report_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    """The link leads to the answer of `ttft-otel explain`; nothing of an ID gets out of the page."""
    trace_id = fill_database(tmp_path / "why.db")
    server = start_report_server(path=tmp_path / "why.db", explain=cli.answer_question)
    link = f"/why/{quote(ODD_ID)}"
    assert f'href="{link}"' in open_page(server, f"/trace/{trace_id}")[1]
    status, text = open_page(server, link)
    assert status == 200 and "against 29 requests" in text, text
    assert "prefill_decode.prefill.compute" in text
    assert "<script>alert" not in text
    status, text = open_page(server, "/why/nobody")
    assert status == 200 and "nothing is stored for" in text


def test_without_explainer(
    start_report_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    """A server that cannot explain shows no link."""
    trace_id = fill_database(tmp_path / "plain.db")
    server = start_report_server(path=tmp_path / "plain.db")
    assert "/why/" not in open_page(server, f"/trace/{trace_id}")[1]
    assert open_page(server, "/why/r1")[0] == 404


def test_one_at_a_time(start_report_server: Callable[..., RunningServer]) -> None:
    """While one request is explained a second one gets 503 and is told to try again; later it is answered."""
    begun, done = threading.Event(), threading.Event()

    def wait_to_answer(_: SourceChoice, question: ExplainQuestion) -> ExplainAnswer:
        begun.set()
        assert done.wait(20)
        return ExplainAnswer([f"because of {question.request_id}"], {})

    server = start_report_server(explain=wait_to_answer)
    answers: list[tuple[int, str]] = []
    first = threading.Thread(target=lambda: answers.append(open_page(server, "/why/one")))
    first.start()
    assert begun.wait(20)
    status, text = open_page(server, "/why/two")
    assert status == 503 and "try again" in text
    done.set()
    first.join()
    assert answers[0][0] == 200 and "because of one" in answers[0][1]
    assert "because of two" in open_page(server, "/why/two")[1]


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


BEGIN_S = int(time.time()) - 600  # by an ID Tempo is searched two weeks back
COUNT = 30
GRAFANA = "http://grafana.example:3000"


@pytest.fixture
def tempo() -> FakeTempo:
    """A Tempo with thirty requests a second apart, the last one three times as slow."""
    made = FakeTempo()
    for number in range(COUNT):
        factor = 3.0 if number == COUNT - 1 else 1 + number / 1000
        start_ns = (BEGIN_S + number) * 10**9
        made.add(make_spans(make_routed_records(f"r{number}", factor, start_ns=start_ns)))
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


@pytest.mark.parametrize(
    "query",
    ["", "from=x&to=y&slo_ms=nan", "from=1e300&to=-1", "trace=%00", "model={a,b}&from=5&to=1"],
)
def test_odd_questions(server: RunningServer, tempo: FakeTempo, query: str) -> None:
    """What is no number restricts nothing; whatever a link asks, the page answers."""
    with tempo:
        assert fetch_page(server, f"/why?{query}")[0] == 200
