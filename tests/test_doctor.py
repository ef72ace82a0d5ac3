# SPDX-License-Identifier: Apache-2.0
"""The doctor against a real HTTP server that is well, ill, or away."""

from __future__ import annotations

import contextvars
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ttft_otel import doctor, names, settings, timing
from ttft_otel.hooks import ledger

TIMING = timing.write({"receive": 1000, "prefill.compute": 9000}, 100, 10100)


class Host:
    """An OTLP receiver and a vLLM server in one; the test says what it answers."""

    def __init__(self) -> None:
        self.traces = self.chat = self.models = 200
        self.timing = TIMING
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(outer.models, {"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                plain = self.headers["content-type"] == "application/json"
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.asked.append((self.path, headers, json.loads(data) if plain else data))
                chat = self.path.endswith("/chat/completions")
                status = outer.traces if "traces" in self.path else outer.chat if chat else 200
                self.answer(status, {})

            def answer(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode() if "traces" not in self.path else b""
                self.send_response(status)
                if outer.timing and self.headers.get(names.ASK):
                    self.send_header(names.TIMING, outer.timing)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """The environment points to this host; what the SDK's loggers lose is given back."""
    for name in (names.ENV_TRACES_ENDPOINT, names.ENV_TRACES_PROTOCOL, names.ENV_PROTOCOL):
        monkeypatch.delenv(name, raising=False)
    made = Host()
    monkeypatch.setenv(names.ENV_ON, "1")
    monkeypatch.setenv(names.ENV_ENDPOINT, made.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    loggers = [logging.getLogger(name) for name in ("opentelemetry", "urllib3", "requests", "grpc")]
    before = [(each, each.handlers[:], each.propagate) for each in loggers]
    yield made
    for logger, handlers, propagate in before:
        logger.handlers[:] = handlers
        logger.propagate = propagate
    made.close()


def run(*arguments: str) -> Result:
    """The command; the exporter's changes to the context stay in a copy of it."""
    return contextvars.copy_context().run(CliRunner().invoke, doctor.command, list(arguments))


def states(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the last check of each name."""
    result = run("--json", *arguments)
    told = json.loads(result.output)
    assert told["ok"] is (result.exit_code == 0), result.output
    return result.exit_code, {check["name"]: check for check in told["checks"]}


def test_well(host: Host) -> None:
    """All is well: exit code 0; one test span was accepted, one request of one token was sent."""
    code, found = states("--url", host.url)

    assert code == 0, found
    assert {name: check["state"] for name, check in found.items()} == {
        "settings": "ok",
        "plugin": "ok",
        "vllm": "ok" if ledger.root() else "note",
        "endpoint": "ok",
        host.url: "ok",
    }
    (span_path, _, span), (path, headers, body) = host.asked
    assert (span_path, path) == ("/v1/traces", "/v1/chat/completions")
    assert b"ttft-otel doctor" in span
    assert headers[names.ASK] == "1"
    assert (body["model"], body["max_tokens"]) == ("tiny", 1)


def test_page(host: Host) -> None:
    """People get lines; what fails carries its remedy."""
    host.timing = ""
    result = run("--url", f"{host.url}/v1/")

    assert result.exit_code == 1
    assert "not traced" in result.output and "-> start it with TTFT_OTEL=1" in result.output


@pytest.mark.parametrize(
    ("status", "remedy"),
    [(404, "4318"), (401, "OTEL_EXPORTER_OTLP_HEADERS"), (400, "ttft-otel serve")],
)
def test_endpoint_refuses(host: Host, status: int, remedy: str) -> None:
    """An endpoint that answers with an error is quoted."""
    host.traces = status
    code, found = states()

    assert code == 1
    assert str(status) in found["endpoint"]["says"]
    assert remedy in found["endpoint"]["remedy"]


def test_endpoint_away(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens the remedy is a receiver."""
    monkeypatch.setenv(names.ENV_ENDPOINT, "http://127.0.0.1:9")
    code, found = states()

    assert code == 1
    assert "ttft-otel serve" in found["endpoint"]["remedy"]


def test_completion(host: Host) -> None:
    """A model without a chat template is asked for a completion."""
    host.chat = 400
    code, found = states("--url", host.url)

    assert code == 0
    assert host.asked[-1][0] == "/v1/completions"


@pytest.mark.parametrize(
    ("field", "status", "says"), [("chat", 500, "500"), ("models", 404, "404")]
)
def test_server_fails(host: Host, field: str, status: int, says: str) -> None:
    """A server that answers with an error is quoted, with the address."""
    setattr(host, field, status)
    code, found = states("--url", host.url)

    assert code == 1
    assert says in found[host.url]["says"] and found[host.url]["remedy"]


def test_server_away(host: Host) -> None:
    """A server that does not answer at all is named."""
    code, found = states("--url", "http://127.0.0.1:9", "--timeout", "2")

    assert code == 1
    assert "no answer" in found["http://127.0.0.1:9"]["says"]


def test_unattributed(host: Host) -> None:
    """A server with lost marks is noted, not failed."""
    host.timing = timing.write({"receive": 1000}, 9000, 10000)
    code, found = states("--url", host.url)

    assert code == 0
    assert found[host.url]["state"] == "note"
    assert "9.0 ms unattributed" in found[host.url]["says"]


def test_off(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that does not trace is noted with the word that would."""
    monkeypatch.delenv(names.ENV_ON)
    code, found = states()

    assert code == 0
    assert found["settings"]["state"] == "note"
    assert f"{names.ENV_ON}=1" in found["settings"]["remedy"]


def test_wrong_settings() -> None:
    """What is wrong in the environment fails, each with its remedy."""
    now = settings.read({names.ENV_ON: "1", names.ENV_SAMPLER_ARG: "half"})
    first, *_ = doctor.switched(now)

    assert (first.state, first.remedy) == ("fail", "use a number from 0 to 1")


def test_left_out(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own list of plugins can leave us out."""
    monkeypatch.setenv(doctor.ENV_PLUGINS, "other,another")
    code, found = states()

    assert code == 1
    assert "add ttft_otel" in found["plugin"]["remedy"]


def test_missing_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is gone names what it costs."""
    gone = {"worker.sample": "vllm.x:Y.z", "engine.input": ""}
    monkeypatch.setattr(ledger, "check", lambda root: gone)
    monkeypatch.setattr(ledger, "root", lambda: "here")
    (check,) = doctor.targets()

    assert check.state == "fail"
    assert check.says == "worker.sample: vllm.x:Y.z is gone; costs sample, output"


def test_help() -> None:
    """The help has examples and says what a --url costs."""
    result = run("--help")

    assert "Examples:" in result.output
    assert "ONE REQUEST OF ONE TOKEN" in " ".join(result.output.split())
