# SPDX-License-Identifier: Apache-2.0
"""Alertmanager's webhook is answered with the explanation of the alert's window: JSON, log line, an alert.

tests/stack/test_rules.py has the same with a real Alertmanager and Prometheus's rules.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from sample_records import (
    RunningServer,
    fetch_any_status,
    fetch_page,
    fill_database,
    make_leg_record,
)

from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.commands import main as cli
from ttft_otel.model.record import Record
from ttft_otel.report.breakdown_source import ExplainAnswer, ExplainQuestion
from ttft_otel.report.receive import alert_webhook
from ttft_otel.report.report_types import SourceChoice

SCHEMA = json.loads((Path(__file__).parents[3] / "docs/explain.schema.json").read_text("utf-8"))
BEGIN_S = int(time.time()) - 600
LATE_US = 900_000
HOSTILE = "<!channel>"


@pytest.fixture
def alertmanager() -> Iterator[SimpleNamespace]:
    """An Alertmanager that takes alerts with `status`, and keeps what is `posted` to it."""
    made = SimpleNamespace(posted=[], status=200)

    class Handler(SilentHandler):
        def do_POST(self) -> None:
            made.posted.append((self.path, json.loads(self.read_body())))
            self.send_answer(made.status, b"")

    with HttpServerThread(Handler) as server:
        made.url = server.url
        yield made


def make_alert(status: str = "firing", model: str = "chat", **more: str) -> dict[str, Any]:
    """An alert as Alertmanager posts it."""
    started = datetime.fromtimestamp(BEGIN_S + 300, timezone.utc).isoformat()
    return {
        "status": status,
        "labels": {
            "alertname": "TtftBudgetBurnsFast",
            "gen_ai_request_model": model,
            "severity": "page",
            **more,
        },
        "annotations": {"summary": "late", "slo_seconds": "0.5"},
        # Go writes nine digits of the second.
        "startsAt": started.replace("+00:00", ".123456789Z"),
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus/graph",
        "fingerprint": "5ef77f1f8a3ecf8d",
    }


def make_group(*alerts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The body of a webhook, with the fields that Alertmanager's documentation lists."""
    return {
        "version": "4",
        "groupKey": '{}:{alertname="TtftBudgetBurnsFast"}',
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "answers",
        "groupLabels": {"alertname": "TtftBudgetBurnsFast"},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": "http://alertmanager:9093",
        "alerts": list(alerts),
        **more,
    }


def make_window() -> Iterator[Record]:
    """Two hundred requests of two models in the last ten minutes; every tenth of `chat` waits."""
    for number in range(200):
        is_late = number % 20 == 1
        compute_us = 30_000 + 37 * number
        yield make_leg_record(
            "mono",
            {"prefill.queue": LATE_US if is_late else 5000, "prefill.compute": compute_us},
            start_ns=(BEGIN_S + 2 * number) * 10**9,
            request_id=HOSTILE if is_late else f"r{number}",
            model="chat" if number % 2 else "other",
        )


def post(
    server: RunningServer, body: Any, kind: str = "application/json", token: str = ""
) -> tuple[int, Any]:
    """Status and JSON of the route's answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": kind, **({"authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(f"{server.http}/api/alerts", data, headers)
    status, _, answer = fetch_any_status(request)
    return status, json.loads(answer)


def test_answer(
    start_report_server: Callable[..., RunningServer],
    tmp_path: Path,
    alertmanager: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The window of the alert's model is explained: in the JSON, in a line, and as an alert of its own."""
    server = start_report_server(
        path=fill_database(tmp_path / "alerts.db", *make_window()),
        explain=cli.answer_question,
        alertmanager_url=alertmanager.url,
        page_url="https://pages.example",
    )
    status, found = post(server, make_group(make_alert()))
    assert status == 200 and found["left_out"] == 0 and found["not_sent"] is None
    (answer,) = found["answers"]
    explanation = answer["explanation"]
    jsonschema.validate(explanation, SCHEMA)
    assert explanation["requests"] == {"window": 100, "late": 10, "typical": 46}
    assert explanation["stages"][0]["name"] == "prefill.queue" and explanation["slo"]["ms"] == 500
    first = explanation["sentences"][0]
    assert f"alert TtftBudgetBurnsFast: {first}" in capsys.readouterr().out

    ((path, (sent,)),) = alertmanager.posted
    assert path == "/api/v2/alerts"
    assert sent["labels"] == {
        "alertname": "TtftExplanation",
        "explains": "TtftBudgetBurnsFast",
        "gen_ai_request_model": "chat",
        "severity": "info",
    }
    assert sent["annotations"]["summary"] == first
    assert "p99 is" in sent["annotations"]["description"]
    # A client's ID is no command of a chat.
    assert "<" not in json.dumps(sent, ensure_ascii=False)
    assert sent["generatorURL"] == answer["page"]
    # The link leads to the same answer, and from there to traces.
    text = fetch_page(server, answer["page"].removeprefix("https://pages.example"))[1]
    assert "prefill.queue" in text and 'href="/trace/' in text and HOSTILE not in text


def test_what_is_answered(
    start_report_server: Callable[..., RunningServer], alertmanager: SimpleNamespace
) -> None:
    """Each question once; an answer needs none; what is resolved ends its answer; many are left out."""
    asked: list[ExplainQuestion] = []

    def answer(_: SourceChoice, question: ExplainQuestion) -> ExplainAnswer:
        asked.append(question)
        return ExplainAnswer([f"because of {question.wanted.model}"], {"answered": True})

    server = start_report_server(explain=answer, alertmanager_url=alertmanager.url)
    group = make_group(
        make_alert(),
        make_alert(severity="ticket"),
        make_alert(alertname="TtftExplanation"),
        make_alert("resolved", model="other"),
    )
    _, found = post(server, group)
    assert [each.wanted.model for each in asked] == ["chat"] and len(found["answers"]) == 2
    (question,) = asked
    length_s = (question.wanted.until_ns - question.wanted.since_ns) / 1e9
    assert length_s == pytest.approx(time.time() - BEGIN_S - 300 + 1800, abs=30)
    assert question.slo_us == 500_000 and question.wanted.last == 0
    ended, *_ = alertmanager.posted[0][1]
    assert ended["labels"]["gen_ai_request_model"] == "other" and "annotations" not in ended
    assert datetime.fromisoformat(ended["endsAt"]).timestamp() == pytest.approx(time.time(), abs=30)

    asked.clear()
    _, found = post(server, make_group(*(make_alert(model=f"m{each}") for each in range(9))))
    assert len(asked) == len(found["answers"]) == alert_webhook.MAX_QUESTIONS
    assert found["left_out"] == 9 - alert_webhook.MAX_QUESTIONS

    for alertmanager.status in (500, 1_000_000):  # the other is no status line of HTTP
        status, found = post(server, make_group(make_alert()))
        assert status == 200 and str(alertmanager.status) in found["not_sent"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{}", "application/json", 400),
        (b"nonsense", "application/json", 400),
        (make_group(make_alert(), version="5"), "application/json", 400),
        ({**make_group(), "alerts": [{"status": "firing"}]}, "application/json", 400),
        (make_group(), "text/plain", 415),
        (b"[" + b" " * alert_webhook.MAX_BODY_BYTES + b"]", "application/json", 413),
    ],
)
def test_refused(
    start_report_server: Callable[..., RunningServer], body: Any, kind: str, status: int
) -> None:
    """What is not Alertmanager's, or too large, is refused before anything is explained."""

    def answer(_: SourceChoice, question: ExplainQuestion) -> ExplainAnswer:
        raise AssertionError("explained")

    assert post(start_report_server(explain=answer), body, kind)[0] == status


def test_token(start_report_server: Callable[..., RunningServer]) -> None:
    """The route asks for the token as the others do."""
    server = start_report_server(token="secret", explain=lambda *_: ExplainAnswer(["so"], {}))
    assert post(server, make_group())[0] == 401
    assert post(server, make_group(), token="secret")[0] == 200
