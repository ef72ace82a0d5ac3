# SPDX-License-Identifier: Apache-2.0
"""POST /api/alerts of `ttft-otel serve`, by whoever reaches it, and an Alertmanager that leads elsewhere."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from attack.serve_thread import run_serve
from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.report.breakdown_source import ExplainAnswer
from ttft_otel.report.receive import alert_webhook, receiver

SCRIPT = '"><script>alert(1)</script>'


def explain(*_: Any) -> ExplainAnswer:
    """As long as an answer may be."""
    stage = {"name": "x" * 1000, "typical_ms": 1.0, "late_ms": 2.0, "share": 0.1}
    return ExplainAnswer(["because"], {"answered": True, "stages": [stage] * 8, "held": None})


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts `serve` with these options; its address."""
    with ExitStack() as stack:

        def start_server(**more: Any) -> str:
            server = stack.enter_context(run_serve(tmp_path, explain=explain, **more))
            return f"http://127.0.0.1:{server.http_port}"

        yield start_server


def make_alert(model: str = "chat", **more: str) -> dict[str, Any]:
    """One that fires."""
    labels = {"alertname": "Late", "gen_ai_request_model": model, **more}
    return {"status": "firing", "labels": labels, "startsAt": "2026-01-01T00:00:00Z"}


def make_group(*alerts: dict[str, Any]) -> dict[str, Any]:
    """What Alertmanager posts."""
    return {"version": "4", "alerts": list(alerts)}


def post(url: str, body: Any) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = {"Content-Type": "application/json"}
    try:
        with urlopen(Request(f"{url}/api/alerts", data, kind), timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, error.read()


def begin_post(url: str, length: int) -> socket.socket:
    """A connection that has announced a webhook of so many bytes, and sent nothing of it."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), 10)
    head = f"POST /api/alerts HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
    return connection


@pytest.mark.parametrize(
    "body",
    [
        b'{"version": "4", "alerts": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        json.dumps(make_group(make_alert(model="\xff")), ensure_ascii=False).encode("latin-1"),
        make_group({**make_alert(), "startsAt": "0001-01-01T00:00:00"}),
    ],
    ids=["deep", "no text", "no time"],
)
def test_what_cannot_be_read_is_refused(
    start: Callable[..., str],
    body: Any,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It is the sender's fault, and nothing of ours failed."""
    assert post(start(), body)[0] == 400
    assert "Traceback" not in capfd.readouterr().err


def test_who_leaves_is_no_failure(
    start: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No traceback for each connection that ends within a body."""
    url = start()
    for _ in range(3):
        connection = begin_post(url, 1000)
        connection.sendall(b"{")
        time.sleep(0.1)
        connection.close()
    assert post(url, make_group())[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_bodies_share_the_receiver_s_room(
    start: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many webhooks arrive at once: the largest gives way, a small one is answered."""
    monkeypatch.setattr(receiver.BodyBudget.__init__, "__defaults__", (1 << 20,))
    url = start()
    slow = [begin_post(url, alert_webhook.MAX_BODY_BYTES - each) for each in range(4)]
    for connection in slow:
        connection.sendall(b" " * 600_000)
        time.sleep(0.3)
    assert post(url, make_group(make_alert()))[0] == 200
    answers = []
    for connection in slow:
        connection.settimeout(1)
        try:
            connection.sendall(b" ")
            answers.append(connection.recv(12))
        except TimeoutError:
            answers.append(b"")
        connection.close()
    assert answers.count(b"HTTP/1.1 503") == 3


def test_an_answer_is_no_multiple_of_the_question(
    start: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Thousands of alerts in one body get no explanation each."""
    alert = {"status": "firing", "labels": {}, "startsAt": "2026-01-01T00:00:00Z"}
    status, found = post(start(), make_group(*[alert] * 9000))
    assert status == 200 and len(found["answers"]) == alert_webhook.MAX_ANSWERS
    assert found["left_out"] == 9000 - alert_webhook.MAX_ANSWERS
    assert len(json.dumps(found)) < alert_webhook.MAX_BODY_BYTES
    assert len(capsys.readouterr().out.splitlines()) < 200


@pytest.fixture
def elsewhere() -> Iterator[tuple[list[str], str]]:
    """Requests at an address that nobody named, and an Alertmanager that redirects everything to it."""
    asked: list[str] = []

    class Inside(SilentHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_answer(200, b"")

        do_POST = do_GET

    inside = HttpServerThread(Inside)

    class Leading(SilentHandler):
        def do_POST(self) -> None:
            self.read_body()
            self.send_response(302)
            self.send_header("Location", f"{inside.url}/latest/meta-data")
            self.send_header("Content-Length", "0")
            self.end_headers()

    leading = HttpServerThread(Leading)
    yield asked, leading.url
    leading.close()
    inside.close()


def test_no_redirect_is_followed(
    start: Callable[..., str],
    elsewhere: tuple[list[str], str],
) -> None:
    """An Alertmanager leads us to no other address."""
    asked, alertmanager = elsewhere
    url = start(alertmanager_url=alertmanager)
    status, found = post(url, make_group(make_alert()))
    assert (status, "302" in found["not_sent"], asked) == (200, True, [])


def test_labels_are_text(start: Callable[..., str]) -> None:
    """On the page that an answer links to, whatever the alert's labels are."""
    url = start()
    _, found = post(url, make_group(make_alert(model=SCRIPT, alertname=SCRIPT)))
    page = found["answers"][0]["page"]
    assert page.startswith("/why?") and "<" not in page
    with urlopen(url + page, timeout=60) as answer:
        text = answer.read().decode()
    assert "<script>alert" not in text and "&lt;script&gt;" in text
