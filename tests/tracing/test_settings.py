# SPDX-License-Identifier: Apache-2.0
"""Settings from the variables or a configuration file: values, defaults, remedies for what is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tracing_fakes import FULL_RECORD

from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.model.names import env_names
from ttft_otel.model.record import encode_record
from ttft_otel.tracing import handoff, settings
from ttft_otel.tracing.settings import Settings, read_settings


def test_defaults() -> None:
    """An empty environment is off, and would send to a collector beside it."""
    read = read_settings({})

    assert not read.on
    assert (read.protocol, read.endpoint) == ("http/protobuf", settings.DEFAULT_HTTP_ENDPOINT)
    assert read.problems == ()
    read = read_settings({env_names.OTEL_EXPORTER_OTLP_PROTOCOL: "grpc"})
    assert read.endpoint == settings.DEFAULT_GRPC_ENDPOINT


@pytest.mark.parametrize(
    ("env", "protocol", "reason"),
    [
        ({env_names.OTEL_EXPORTER_OTLP_ENDPOINT: "http://c:4317"}, "grpc", "port 4317"),
        # gRPC takes an address without a scheme.
        ({env_names.OTEL_EXPORTER_OTLP_ENDPOINT: "c:4317"}, "grpc", "port 4317"),
        ({env_names.OTEL_EXPORTER_OTLP_ENDPOINT: "http://c:14317"}, "http/protobuf", "default"),
        (
            {
                env_names.OTEL_EXPORTER_OTLP_ENDPOINT: "http://c:4317",
                env_names.OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: "http://d/v1/traces",
            },
            "http/protobuf",
            "default",
        ),
        (
            {
                env_names.OTEL_EXPORTER_OTLP_PROTOCOL: "grpc",
                env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: "http/protobuf",
            },
            "http/protobuf",
            env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
        ),
    ],
)
def test_protocol_by_port(env: dict[str, str], protocol: str, reason: str) -> None:
    """Where no variable says the protocol, port 4317 means gRPC and any other HTTP; it is said why."""
    read = read_settings(env)

    assert (read.protocol, read.protocol_reason) == (protocol, reason)
    assert read.endpoint in env.values() or reason == env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
    assert not read.problems


def test_unknown_protocol_at_grpc_port() -> None:
    """A protocol that is not known is a problem, and the port decides as if there were none."""
    env = {
        env_names.OTEL_EXPORTER_OTLP_ENDPOINT: "http://c:4317",
        env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: "http/json",
    }
    read = read_settings(env)

    assert (read.protocol, read.endpoint) == ("grpc", "http://c:4317")
    assert read.problems[0].startswith(
        f"{env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL}='http/json'"
    )


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        (env_names.TTFT_OTEL, "maybe", f"{env_names.TTFT_OTEL}=1"),
        (env_names.OTEL_EXPORTER_OTLP_PROTOCOL, "http/json", "http/protobuf"),
        (env_names.OTEL_EXPORTER_OTLP_ENDPOINT, "collector:4318", settings.DEFAULT_HTTP_ENDPOINT),
        (
            env_names.OTEL_EXPORTER_OTLP_ENDPOINT,
            "http://collector:43l7",
            settings.DEFAULT_HTTP_ENDPOINT,
        ),
        (env_names.OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, "ftp://x", settings.DEFAULT_HTTP_ENDPOINT),
        (env_names.OTEL_TRACES_SAMPLER, "jaeger_remote", "always_on"),
        (env_names.OTEL_TRACES_SAMPLER_ARG, "half", "from 0 to 1"),
        (env_names.OTEL_TRACES_SAMPLER_ARG, "nan", "from 0 to 1"),
        (env_names.TTFT_OTEL_QUEUE_BYTES, "many", "65536"),
        (env_names.TTFT_OTEL_ROLE, "router", "prefill_decode"),
        (env_names.TTFT_OTEL_METRICS, "some", "1 or 0"),
    ],
)
def test_wrong(name: str, value: str, remedy: str) -> None:
    """What is wrong is named with its value and its remedy; the default is taken instead."""
    read = read_settings({name: value})
    (line,) = read.problems

    assert line.startswith(f"{name}={value!r}")
    assert remedy in line
    assert read == Settings(on=False, problems=read.problems)


def test_empty_is_unset() -> None:
    """An empty standard variable counts as unset, as OpenTelemetry has it."""
    env = dict.fromkeys(
        (
            env_names.OTEL_EXPORTER_OTLP_ENDPOINT,
            env_names.OTEL_EXPORTER_OTLP_PROTOCOL,
            env_names.OTEL_TRACES_SAMPLER,
            env_names.TTFT_OTEL_QUEUE_BYTES,
            env_names.TTFT_OTEL_ROLE,
            env_names.TTFT_OTEL_DETAIL,
            env_names.TTFT_OTEL_METRICS,
            env_names.OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE,
        ),
        "",
    )

    assert read_settings(env) == Settings()


def test_all() -> None:
    """Everything said is taken."""
    read = read_settings(
        {
            env_names.TTFT_OTEL: "1",
            env_names.OTEL_SERVICE_NAME: "mine",
            env_names.OTEL_TRACES_SAMPLER: "traceidratio",
            env_names.OTEL_TRACES_SAMPLER_ARG: "0.25",
            env_names.TTFT_OTEL_TRUST_SAMPLED: "0",
            env_names.TTFT_OTEL_SAMPLING_KEY: "secret",
            env_names.TTFT_OTEL_QUEUE_BYTES: "131072",
            env_names.TTFT_OTEL_ROLE: "Encode",
            env_names.TTFT_OTEL_DETAIL: "Stages",
            env_names.OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE: "Delta",
        }
    )

    assert read == Settings(
        on=True,
        service="mine",
        sampler="traceidratio",
        ratio=0.25,
        trust_sampled=False,
        sampling_key="secret",
        queue_bytes=131072,
        role="encode",
        detail="stages",
        temporality="delta",
    )


@pytest.mark.parametrize(
    ("env", "spans", "metrics"),
    [
        ({}, True, True),
        ({env_names.OTEL_SDK_DISABLED: "true"}, False, False),
        ({env_names.OTEL_TRACES_EXPORTER: "none"}, False, True),
        ({env_names.OTEL_METRICS_EXPORTER: "none"}, True, False),
    ],
)
def test_silenced(env: dict[str, str], spans: bool, metrics: bool) -> None:
    """The standard ways to switch spans and metrics off are honoured, whatever our own variables ask for."""
    asked = {"TTFT_OTEL": "1", "TTFT_OTEL_METRICS": "1", "OTEL_TRACES_SAMPLER": "always_on"}
    found = read_settings(asked | env)

    assert (found.sampler, found.metrics) == ("always_on" if spans else "always_off", metrics)


def test_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds is what the process was started with, whatever its host writes later."""
    monkeypatch.setattr(settings, "_frozen", [])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://ours:4318")
    settings.freeze_settings()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://theirs:4318/v1/traces")

    assert settings.get_settings().endpoint == "http://ours:4318"


FULL = """
file_format: "1.0"
disabled: false
log_level: info
attribute_limits: {attribute_value_length_limit: 100, attribute_count_limit: 90}
resource:
  attributes:
    - {name: service.name, value: chat}
    - {name: team, value: "a, b"}
  attributes_list: region=north
propagator:
  composite: [{tracecontext: }, {baggage: }]
tracer_provider:
  processors:
    - batch:
        schedule_delay: 250
        max_export_batch_size: 64
        exporter:
          otlp_http:
            endpoint: ${SINK:-http://c:4318/v1/traces}
            compression: gzip
            timeout: 2500
            headers: [{name: x-key, value: "a b"}]
            headers_list: x-team=chat
            tls: {ca_file: /ca.pem, key_file: /key.pem, cert_file: /cert.pem}
  limits: {event_count_limit: 7, link_count_limit: 6, attribute_count_limit: 80}
  sampler: {parent_based: {root: {trace_id_ratio_based: {ratio: 0.25}}}}
meter_provider:
  readers:
    - periodic:
        interval: 5000
        exporter:
          otlp_grpc: {endpoint: "http://m:4317", temporality_preference: low_memory}
logger_provider:
  processors: [{batch: {exporter: {otlp_http: }}}]
"""
SHORT = """
file_format: "1.0"
tracer_provider:
  processors: [{batch: {exporter: {otlp_grpc: {endpoint: "c:4317", tls: {insecure: true}}}}}]
"""


@pytest.fixture
def read_file(tmp_path: Path) -> Callable[..., Settings]:
    """The settings of a file with this text, among other variables."""
    pytest.importorskip("opentelemetry.configuration", reason="run scripts/install")

    def read_text(text: str, name: str = "otel.yaml", **env: str) -> Settings:
        (tmp_path / name).write_text(text)
        return read_settings({**env, env_names.OTEL_CONFIG_FILE: str(tmp_path / name)})

    return read_text


def test_whole_file(read_file: Callable[..., Settings]) -> None:
    """Every part that can be followed becomes what its variable says; nothing is left to tell."""
    found = read_file(FULL, TTFT_OTEL_METRICS="1")

    assert found.problems == ()
    assert found.variables == {
        "OTEL_SDK_DISABLED": "false",
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_RESOURCE_ATTRIBUTES": "region=north,service.name=chat,team=a%2C%20b",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
        "OTEL_PROPAGATORS": "tracecontext,baggage",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-team=chat,x-key=a%20b",
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "2.5",
        "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": "/ca.pem",
        "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY": "/key.pem",
        "OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE": "/cert.pem",
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m:4317",
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "lowmemory",
        "OTEL_METRIC_EXPORT_INTERVAL": "5000",
        "OTEL_BSP_SCHEDULE_DELAY": "250",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "64",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "100",
        "OTEL_ATTRIBUTE_COUNT_LIMIT": "90",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "80",
        "OTEL_SPAN_EVENT_COUNT_LIMIT": "7",
        "OTEL_SPAN_LINK_COUNT_LIMIT": "6",
    }
    assert (found.endpoint, found.protocol) == ("http://c:4318/v1/traces", "http/protobuf")
    assert (found.sampler, found.ratio) == ("parentbased_traceidratio", 0.25)
    assert found.metrics and found.temporality == "lowmemory"


def test_spelled_out_defaults(read_file: Callable[..., Settings]) -> None:
    """Defaults of the specification that a file spells out are nothing to tell, other values are."""
    text = FULL.replace(
        "{parent_based: {root:", "{parent_based: {remote_parent_sampled: {always_on: }, root:"
    )
    text = text.replace("schedule_delay", "max_queue_size: 2048\n        schedule_delay")
    text += "instrumentation/development: {}\n"
    text = text.replace(
        "resource:", "resource:\n  detection/development: {detectors: [{service: }, {host: }]}"
    )
    found = read_file(text)

    assert found.problems == ()
    assert (
        found.variables and found.variables["OTEL_EXPERIMENTAL_RESOURCE_DETECTORS"] == "otel,host"
    )
    (problem,) = read_file(text.replace("2048", "4096")).problems
    assert "max_queue_size" in problem


def test_file_replaces_variables(read_file: Callable[..., Settings]) -> None:
    """Of the environment only what the file cannot say is followed, and ours."""
    found = read_file(
        SHORT,
        OTEL_EXPORTER_OTLP_ENDPOINT="http://other:4318",
        OTEL_TRACES_SAMPLER="always_off",
        TTFT_OTEL_METRICS="1",
        TTFT_OTEL_DETAIL="ttft",
    )

    assert not found.problems
    assert (found.endpoint, found.protocol, found.sampler, found.detail) == (
        *("c:4317", "grpc", "parentbased_always_on", "ttft"),
    )
    # The file has no meter provider: by the specification nothing is measured.
    assert not found.metrics


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        ("batch: {exporter", "simple: {exporter", "tracer_provider.processors[0].simple"),
        ("otlp_grpc: {", "console: {}, otlp_grpc: {", "does not match schema"),
        (
            "{exporter",
            "{max_queue_size: 9, exporter",
            "tracer_provider.processors[0].batch.max_queue_size",
        ),
        (
            "tracer_provider:",
            "propagator: {composite: [{b3: }]}\ntracer_provider:",
            "leaves out tracecontext",
        ),
        ('"1.0"', '"7.0"', "7.0"),
        ("tracer_provider:", "tracer_provider: [", "Failed to parse"),
    ],
)
def test_file_that_cannot_be_followed(
    read_file: Callable[..., Settings], before: str, after: str, path: str
) -> None:
    """What cannot be followed is told by its path, with a remedy."""
    assert before in SHORT
    problems = read_file(SHORT.replace(before, after, 1)).problems

    assert any(path in line and "; " in line for line in problems), problems


def test_unreadable_file(read_file: Callable[..., Settings]) -> None:
    """Nothing is sent to a default that nobody meant."""
    found = read_file("file_format: [", TTFT_OTEL_METRICS="1")

    assert found.problems
    assert (found.sampler, found.metrics) == ("always_off", False)


def test_real_process(read_file: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """A real exporter process sends where the file says, with the file's headers, compressed.

    It has the variables in place of the file, and none that it replaces.
    """
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-secret=1")
    monkeypatch.setenv(env_names.OTEL_CONFIG_FILE, "is not read again")
    arrived: list[dict[str, str]] = []

    class Handler(SilentHandler):
        def do_POST(self) -> None:
            self.read_body()
            arrived.append(self.list_headers() | {"path": self.path})
            self.send_answer(200)

    server = HttpServerThread(Handler)
    monkeypatch.setenv("SINK", f"{server.url}/here")
    without_tls = re.sub(r"tls: .*", "", FULL)
    try:
        sender = handoff.RecordSender(read_file(without_tls))
        assert sender.send(encode_record(FULL_RECORD))
        sender.close(30)
    finally:
        server.close()

    assert [each["path"] for each in arrived] == ["/here"]
    assert (arrived[0]["x-key"], arrived[0]["content-encoding"]) == ("a b", "gzip")
    assert "x-secret" not in arrived[0]


def test_nothing_is_imported_without_a_file() -> None:
    """Neither the reader nor YAML, unless the variable is set."""
    code = (
        "import sys; from ttft_otel.tracing import settings; settings.read_settings({'TTFT_OTEL': '1'});"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'yaml', "
        "'ttft_otel.tracing.config_file'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
