# SPDX-License-Identifier: Apache-2.0
"""Answer Alertmanager's webhook (version 4): why requests were late in the window of each alert.

report_server.py has the route. An answer is in the response's JSON and a line of the log; and, where the
address of Alertmanager is known, an alert of its own, which goes where alerts go: its annotations are the
sentences. The alert that is explained cannot carry them, because Prometheus overwrites its annotations
within a minute.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from http.client import HTTPException
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode
from urllib.request import HTTPRedirectHandler, Request, build_opener

import click
import msgspec

from ttft_otel.model.names import keys
from ttft_otel.report.breakdown_source import ExplainAnswer, ExplainQuestion, ServeOptions
from ttft_otel.report.show.terminal import remove_controls
from ttft_otel.report.store.database_reader import RequestFilter
from ttft_otel.report.store.database_schema import StoreError

MAX_BODY_BYTES: Final = 1 << 20  # a group of a thousand alerts
MAX_ANSWERS: Final = 100  # to one group: each may be some kilobytes, for an alert of sixty bytes
MAX_QUESTIONS: Final = 4  # of one group: each takes seconds, and Alertmanager waits for the answer
# The alert's own range and its `for` lie before the moment from which it fires.
BEFORE_NS: Final = 1800 * 10**9
MODEL_LABEL: Final = keys.MODEL.replace(".", "_")
SLO_ANNOTATION: Final = "slo_seconds"
ANSWER_NAME: Final = "TtftExplanation"
# Alertmanager sends a group that goes on firing again after 4 hours by default, which renews the answer.
ANSWER_LIFE: Final = timedelta(hours=5)
MAX_ANNOTATION_CHARS: Final = 4000
SEND_TIMEOUT_S: Final = 5.0
# Request IDs are chosen by clients, and chats read <!channel> and <a href> as commands.
HARMLESS: Final = str.maketrans("<>", "‹›")


class _NoRedirects(HTTPRedirectHandler):
    """A redirect is an answer as any other that is no success."""

    def redirect_request(self, *_: Any) -> None:
        """None: nothing is asked elsewhere."""


_open_url: Final = build_opener(_NoRedirects).open


class Alert(msgspec.Struct):
    status: Literal["firing", "resolved"]
    labels: dict[str, str]
    starts_at: Annotated[datetime, msgspec.Meta(tz=True)] = msgspec.field(name="startsAt")
    annotations: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self.labels.get("alertname", "")


class AlertGroup(msgspec.Struct):
    """What Alertmanager posts; what it has besides is not needed."""

    version: Literal["4"]
    alerts: list[Alert]


decode_group: Final = msgspec.json.Decoder(AlertGroup).decode


def answer_group(options: ServeOptions, group: AlertGroup) -> dict[str, Any]:
    """The JSON for a group: an answer for each firing alert, up to MAX_QUESTIONS different ones."""
    now_ns = time.time_ns()
    answers: dict[ExplainQuestion, ExplainAnswer] = {}
    # Alertmanager may be told to send everything here: an answer needs none.
    alerts = [each for each in group.alerts if each.name != ANSWER_NAME]
    firing = [each for each in alerts if each.status == "firing"]
    found = []
    sent = [
        {**_name_answer(each), "endsAt": datetime.now(timezone.utc).isoformat()}
        for each in alerts
        if each.status == "resolved"
    ]
    for alert in firing[:MAX_ANSWERS]:
        question = build_question(alert, now_ns)
        if question not in answers:
            if len(answers) == MAX_QUESTIONS:
                break
            answers[question] = _explain(options, question)
        answer, page = answers[question], _link_page(options, question)
        click.echo(remove_controls(f"alert {alert.name}: {answer.sentences[0]}"))
        found.append({"labels": alert.labels, "page": page, "explanation": answer.document})
        sent.append(_build_answer(alert, answer, page))
    failure = _send(options, sent)
    return {"answers": found, "left_out": len(firing) - len(found), "not_sent": failure or None}


def _explain(options: ServeOptions, question: ExplainQuestion) -> ExplainAnswer:
    assert options.explain is not None
    try:
        return options.explain(options.source, question)
    except StoreError as error:
        return ExplainAnswer.refuse(str(error))


def _link_page(options: ServeOptions, question: ExplainQuestion) -> str:
    wanted = question.wanted
    asked = {"from": wanted.since_ns // 10**6, "to": wanted.until_ns // 10**6}
    more = {"model": wanted.model, "slo_ms": f"{question.slo_us / 1000:g}"}
    return f"{options.page_url}/why?{urlencode(asked | more)}"


def _send(options: ServeOptions, alerts: list[dict[str, Any]]) -> str:
    """Send answers to Alertmanager; why that failed, "" where it did not or nobody is to get them."""
    if not (alerts and options.alertmanager_url):
        return ""
    url = f"{options.alertmanager_url}/api/v2/alerts"
    body = json.dumps(alerts).encode()
    try:
        request = Request(url, body, {"Content-Type": "application/json"})
        with _open_url(request, timeout=SEND_TIMEOUT_S):
            return ""
    # Of http.client are answers that are no HTTP.
    except (OSError, HTTPException) as error:
        click.echo(f"Alertmanager did not take the answer: {error}", err=True)
        return str(error)


def build_question(alert: Alert, now_ns: int) -> ExplainQuestion:
    """What is asked about an alert: requests of its model, later than its objective, until now."""
    start_ns = int(alert.starts_at.timestamp()) * 10**9
    model = alert.labels.get(MODEL_LABEL, "")
    return ExplainQuestion(
        wanted=RequestFilter(
            model=model, since_ns=max(min(start_ns, now_ns) - BEFORE_NS, 1), until_ns=now_ns, last=0
        ),
        slo_us=_read_slo_us(alert.annotations),
    )


def _read_slo_us(annotations: Mapping[str, str]) -> int:
    try:
        seconds = float(annotations.get(SLO_ANNOTATION, ""))
    except ValueError:
        return 0
    # NaN fails the comparison.
    return round(seconds * 1e6) if 0 < seconds < 1e6 else 0


def _name_answer(alert: Alert) -> dict[str, Any]:
    """The labels of the answer to an alert: the same place, but nobody is woken twice."""
    labels = {**alert.labels, "alertname": ANSWER_NAME, "explains": alert.name, "severity": "info"}
    return {"labels": labels}


def _build_answer(alert: Alert, answer: ExplainAnswer, page: str) -> dict[str, Any]:
    first, *rest = (each.translate(HARMLESS) for each in answer.sentences)
    now = datetime.now(timezone.utc)
    return {
        **_name_answer(alert),
        "annotations": {
            "summary": first[:MAX_ANNOTATION_CHARS],
            "description": "\n".join(rest)[:MAX_ANNOTATION_CHARS],
        },
        "startsAt": now.isoformat(),
        "endsAt": (now + ANSWER_LIFE).isoformat(),
        "generatorURL": page,
    }
