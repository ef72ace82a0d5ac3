# SPDX-License-Identifier: Apache-2.0
"""The page's "Why?": linked from a request, answered in sentences, safe with any request ID."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from sample_records import RunningServer, fetch_page, make_routed_records, make_stored_spans

from ttft_otel.commands import main as cli
from ttft_otel.report.breakdown_source import ExplainAnswer, ExplainQuestion
from ttft_otel.report.report_types import SourceChoice
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
