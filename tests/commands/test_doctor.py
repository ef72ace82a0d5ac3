# SPDX-License-Identifier: Apache-2.0
"""The doctor against a real HTTP server that is well, ill, or away."""

from __future__ import annotations

import contextvars
import json
import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily

from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.commands import doctor
from ttft_otel.hooks import target_check
from ttft_otel.model import timing
from ttft_otel.model.names import env_names, header_names, metric_names
from ttft_otel.tracing import settings

TIMING = timing.format_server_timing({"receive": 1000, "prefill.compute": 9000}, 100, 10100)


@pytest.fixture
def fake_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An OTLP receiver and a vLLM server in one, in the environment's variables; `asked`: what it got.

    The test says what it answers: the statuses `traces`, `chat`, `models`, its `timing` and `metrics`.
    """
    made = SimpleNamespace(
        traces=200, chat=200, models=200, timing=TIMING, metrics=None, asked=[], url=""
    )

    class Handler(SilentHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            if self.path == "/metrics" and made.metrics is not None:
                self.send_answer(200, made.metrics)
            else:
                self.send_timed(made.models, json.dumps({"data": [{"id": "tiny"}]}).encode())

        def do_POST(self) -> None:
            data = self.read_body()
            is_plain = self.headers["content-type"] == "application/json"
            made.asked.append(
                (self.path, self.list_headers(), json.loads(data) if is_plain else data)
            )
            is_chat = self.path.endswith("/chat/completions")
            is_export = "traces" in self.path
            status = made.traces if is_export else made.chat if is_chat else 200
            self.send_timed(status, b"" if is_export else b"{}")

        def send_timed(self, status: int, body: bytes) -> None:
            asked = made.timing and self.headers.get(header_names.ASK_TIMING)
            header = {header_names.SERVER_TIMING: made.timing} if asked else {}
            self.send_answer(status, body, **header)

    for name in (
        env_names.OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
        env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
        env_names.OTEL_EXPORTER_OTLP_PROTOCOL,
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(env_names.TTFT_OTEL, "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    # The SDK's loggers, which the exporter changes.
    for name in ("opentelemetry", "urllib3", "requests", "grpc"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", logger.handlers[:])
        monkeypatch.setattr(logger, "propagate", logger.propagate)
    with HttpServerThread(Handler) as server:
        made.url = server.url
        monkeypatch.setenv(env_names.OTEL_EXPORTER_OTLP_ENDPOINT, made.url)
        yield made


def run_doctor(*arguments: str) -> Result:
    """The command; the exporter's changes to the context stay in a copy of it."""
    return contextvars.copy_context().run(CliRunner().invoke, doctor.command, list(arguments))


def read_states(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the last check of each name."""
    result = run_doctor("--json", *arguments)
    document = json.loads(result.output)
    assert document["ok"] is (result.exit_code == 0), result.output
    return result.exit_code, {check["name"]: check for check in document["checks"]}


def test_well(fake_host: Any) -> None:
    """All is well: exit code 0; one test span was accepted, one request of one token was sent."""
    code, found = read_states("--url", fake_host.url)

    assert code == 0, found
    found.pop("others", None)  # of what is installed beside
    assert {name: check["state"] for name, check in found.items()} == {
        **dict.fromkeys(("settings", "metrics", "plugin", "endpoint", fake_host.url), "ok"),
        "vllm": "ok" if target_check.find_vllm_folder() else "note",
    }
    (span_path, _, span), (path, headers, body) = fake_host.asked
    assert (span_path, path) == ("/v1/traces", "/v1/chat/completions")
    assert b"ttft-otel doctor" in span
    assert headers[header_names.ASK_TIMING] == "1"
    assert (body["model"], body["max_tokens"]) == ("tiny", 1)


AWAY = "http://127.0.0.1:9"
PROTOCOL, ENDPOINT = env_names.OTEL_EXPORTER_OTLP_PROTOCOL, env_names.OTEL_EXPORTER_OTLP_ENDPOINT
LOST = timing.format_server_timing({"receive": 1000}, 9000, 10000)
# What the host answers, or an environment variable (in capitals), and the check that names it.
FAULTS: tuple[tuple[dict[str, Any], str, str, str, str], ...] = (
    ({"traces": 404}, "endpoint", "fail", "404", "4318"),
    ({"traces": 401}, "endpoint", "fail", "401", "OTEL_EXPORTER_OTLP_HEADERS"),
    ({"traces": 400}, "endpoint", "fail", "400", "ttft-otel serve"),
    ({PROTOCOL: "grpc"}, "endpoint", "fail", "grpc (by {protocol}) to {url}", "http/protobuf"),
    # With 0.5 s the SDK has no time to try again, and does not say what failed.
    *(
        (
            {ENDPOINT: AWAY, "OTEL_EXPORTER_OTLP_TIMEOUT": seconds},
            "endpoint",
            "fail",
            "no answer: nothing listens there",
            "ttft-otel serve",
        )
        for seconds in ("0.5", "2")
    ),
    ({doctor.ENV_PLUGINS: "other,another"}, "plugin", "fail", "", "add ttft_otel"),
    ({env_names.TTFT_OTEL: "0"}, "settings", "note", "", "TTFT_OTEL=1"),
    ({"chat": 500}, "{url}", "fail", "500", "log"),
    ({"models": 404}, "{url}", "fail", "404", "log"),
    ({"timing": LOST}, "{url}", "note", "9.0 ms unattributed", "log"),
    ({}, AWAY, "fail", "no answer", "is it up"),
)


@pytest.mark.parametrize(("fault", "name", "state", "says", "remedy"), FAULTS)
def test_faults(
    fake_host: Any,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    name: str,
    state: str,
    says: str,
    remedy: str,
) -> None:
    """What is wrong is quoted, with its remedy; a failure ends with exit code 1, a note with 0."""
    for field, value in fault.items():
        if field.isupper():
            monkeypatch.setenv(field, value)
        else:
            setattr(fake_host, field, value)
    name, says = (each.format(url=fake_host.url, protocol=PROTOCOL) for each in (name, says))
    flags = ("--url", name, "--timeout", "2") if name.startswith("http") else ()
    code, found = read_states(*flags)

    assert (code, found[name]["state"]) == (int(state == "fail"), state)
    assert says in found[name]["says"] and remedy in found[name]["remedy"]


def test_completion(fake_host: Any) -> None:
    """A model without a chat template is asked for a completion."""
    fake_host.chat = 400
    code, found = read_states("--url", fake_host.url)

    assert code == 0
    assert fake_host.asked[-1][0] == "/v1/completions"


@pytest.mark.parametrize(
    ("note", "state", "says"),
    [
        (timing.ClockNote("host", 0), "ok", "host clock: it runs on a CPU"),
        (timing.ClockNote("device", 31), "ok", "to about 31 us"),
        (timing.ClockNote("device", 1900), "note", "to about 1900 us"),
        (timing.ClockNote("lengths", 0), "note", "lengths only"),
        (timing.ClockNote("none", 0), "note", "no clock"),
    ],
)
def test_clock(fake_host: Any, note: timing.ClockNote, state: str, says: str) -> None:
    """It names the clock that the server uses for its worker's marks, and why."""
    fake_host.timing = timing.format_server_timing({"receive": 1000}, 0, 1000, clock=note)
    check = read_states("--url", fake_host.url)[1][f"{fake_host.url} worker"]

    assert check["state"] == state and says in check["says"]
    assert bool(check["remedy"]) == (state == "note")


def write_page(*items: int) -> bytes:
    """A /metrics page as a router writes it, with the items that its instances a, b, c encoded again."""
    name = metric_names.ROUTER_RECOMPUTED_ITEMS
    counted = CounterMetricFamily(name, "Items.", labels=["leg", "instance"])
    for instance, count in zip("abc", items, strict=False):
        counted.add_metric(["prefill_decode", f"http://{instance}:8002"], count)
    registry = CollectorRegistry()
    registry.register(type("Own", (), {"collect": lambda self: [counted]})())
    return generate_latest(registry)


def test_people_get_lines(fake_host: Any) -> None:
    """What fails carries its remedy; the help says what a --url costs."""
    fake_host.timing = ""
    result = run_doctor("--url", f"{fake_host.url}/v1/")

    assert result.exit_code == 1
    assert "not traced" in result.output and "-> start it with TTFT_OTEL=1" in result.output
    assert "ONE REQUEST OF ONE TOKEN" in " ".join(run_doctor("--help").output.split())


@pytest.mark.parametrize(
    ("page", "state", "says"),
    [
        (
            write_page(2, 0, 1),
            "note",
            "3 media items were encoded twice since this router started, by http://a:8002 (2), "
            "http://c:8002 (1)",
        ),
        (write_page(0, 0), "ok", "no media item was encoded twice since this router started"),
        # A server, or a router without encoders, says nothing.
        (write_page(), None, None),
        (b"vllm:num_requests_running 0.0\n", None, None),
        (b"\xff\x00" * 1000, None, None),
    ],
)
def test_media_encoded_twice(
    fake_host: Any, page: bytes, state: str | None, says: str | None
) -> None:
    """What a router counted is noted with instance and remedy, though a request of text shows none of it."""
    fake_host.metrics = page
    code, found = read_states("--url", fake_host.url)

    check = found.get(f"{fake_host.url}/metrics", {})
    assert (code, check.get("state"), check.get("says")) == (0, state, says)
    remedy = "docs/router.md#encoder-cache-parameters"
    assert (remedy in check.get("remedy", "")) is (state == "note")


@pytest.mark.parametrize(
    ("env", "state", "says"),
    [
        ({}, "ok", "the collector makes them of the spans"),
        (
            {
                env_names.OTEL_TRACES_SAMPLER: "traceidratio",
                env_names.OTEL_TRACES_SAMPLER_ARG: "0.1",
            },
            "note",
            "ratio 0.1",
        ),
        ({env_names.OTEL_TRACES_SAMPLER: "always_off"}, "note", "sampled requests alone"),
        (
            {env_names.TTFT_OTEL_METRICS: "1", env_names.OTEL_TRACES_SAMPLER: "always_off"},
            "ok",
            "counts every request",
        ),
        (
            {
                env_names.TTFT_OTEL_METRICS: "1",
                env_names.OTEL_EXPORTER_OTLP_METRICS_ENDPOINT: "http://m:1",
            },
            "ok",
            "http://m:1",
        ),
    ],
)
def test_metrics(
    env: dict[str, str], state: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who counts the requests is named, and a count of sampled ones alone is noted with its remedy."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (found,) = [
        check
        for check in doctor.check_settings(settings.read_settings())
        if check.name == "metrics"
    ]

    assert (found.state, says in found.says) == (state, True), found
    assert (f"{env_names.TTFT_OTEL_METRICS}=1" in found.remedy) == (state == "note")


def test_wrong_settings() -> None:
    """What is wrong in the environment fails, each with its remedy."""
    now = settings.read_settings(
        {env_names.TTFT_OTEL: "1", env_names.OTEL_TRACES_SAMPLER_ARG: "half"}
    )
    first, *_ = doctor.check_settings(now)

    assert (first.state, first.remedy) == ("fail", "use a number from 0 to 1")


def test_other_tracers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that trace the same servers, and another distribution, are named."""
    before = [each.says for each in doctor.check_other_tracers()]
    assert not any("mine" in each or "ddtrace 9.9" in each for each in before)
    folder = tmp_path / "ddtrace-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtrace\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OTEL_PYTHON_DISTRO", "mine")
    after = [each.says for each in doctor.check_other_tracers()]

    assert any("ddtrace 9.9" in each for each in after)
    assert any("OTEL_PYTHON_DISTRO=mine" in each for each in after)


def test_missing_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is gone names what it costs."""
    gone = {"worker.sample": "vllm.x:Y.z", "engine.input": ""}
    monkeypatch.setattr(target_check, "check_targets", lambda root: gone)
    monkeypatch.setattr(target_check, "find_vllm_folder", lambda: "here")
    (check,) = doctor.check_vllm()

    assert check.state == "fail"
    assert check.says == "worker.sample: vllm.x:Y.z is gone; costs sample, output"


def test_platform_and_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A platform's own model runner is named, and a file that keeps our switch from Ray's actors."""
    runner = "class {}:\n    def execute_model(self):\n        return {}\n"
    (tmp_path / "npu").mkdir()
    (tmp_path / "npu" / "__init__.py").write_text("")
    (tmp_path / "npu" / "runners.py").write_text(
        runner.format("NPUModelRunner", 1)
        + runner.format("ExtendedModelRunner", "super().execute_model()")
        + runner.format("NPUWorker", 1)
    )
    (tmp_path / "npu" / "template.py").write_text("def execute_model({{ name }}:")
    (tmp_path / "ray.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("npu", "npu:register", "g"), EntryPoint("cpu", "vllm.cpu:register", "g")]
    monkeypatch.setattr(target_check, "entry_points", lambda group: points)
    monkeypatch.setattr(target_check, "check_targets", lambda root: {})
    monkeypatch.setattr(target_check, "find_vllm_folder", lambda: tmp_path)
    monkeypatch.setenv("VLLM_CONFIG_ROOT", str(tmp_path))
    _, found, ray = doctor.check_vllm()
    (tmp_path / "ray_non_carry_over_env_vars.json").write_text('["TTFT_OTEL"]')
    *_, refused = doctor.check_vllm()

    assert found.state == "note" and found.says.startswith("NPUModelRunner of npu has an")
    assert (ray.state, refused.state) == ("ok", "fail")


@pytest.mark.parametrize(("value", "is_told"), [("1", True), ("0", False), ("", False)])
def test_rust_frontend(monkeypatch: pytest.MonkeyPatch, value: str, is_told: bool) -> None:
    """In vLLM's Rust front-end none of our code runs: it is said what is lost, and how to have it."""
    monkeypatch.setattr(target_check, "check_targets", lambda root: {})
    monkeypatch.setattr(target_check, "find_vllm_folder", lambda: "here")
    monkeypatch.setenv(target_check.RUST_FRONTEND, value)
    told = [each for each in doctor.check_vllm() if each.name == "front-end"]

    assert bool(told) is is_told
    assert all(each.state == "note" and "unattributed" in each.says for each in told)


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (
            "Transient error HTTPConnectionPool(host='localhost', port=4318): (Caused by "
            'NewConnectionError("Failed to establish a new connection: [Errno 111] Connection refused"))',
            "no answer: nothing listens there",
        ),
        (
            "(NameResolutionError(\"Failed to resolve 'a' ([Errno -2] Name or service not known)\"))",
            "no answer: its host name is not known",
        ),
        ("Failed to export span batch code: 404, reason: Not Found", "answers 404"),
        ("Failed to export traces, error code: StatusCode.UNIMPLEMENTED", "answers UNIMPLEMENTED"),
        ("<urlopen error timed out>", "no answer in time"),
        ("", "no answer"),
    ],
)
def test_failure_sentences(reason: str, sentence: str) -> None:
    """What the SDK says of a failed attempt becomes one sentence, without the text of an exception."""
    assert doctor.describe_failure(reason) == sentence
