# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry's declarative configuration: what a file says is what the exporter does, or it is told."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from full_record import FULL_RECORD

from lab.http_servers import HttpServerThread, SilentHandler
from ttft_otel.model.names import env_names
from ttft_otel.model.record import encode_record
from ttft_otel.tracing import handoff
from ttft_otel.tracing.settings import Settings, read_settings

pytest.importorskip("opentelemetry.configuration", reason="run scripts/install")

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
def read(tmp_path: Path) -> Callable[..., Settings]:
    """The settings of a file with this text, among other variables."""

    def read_text(text: str, name: str = "otel.yaml", **env: str) -> Settings:
        (tmp_path / name).write_text(text)
        return read_settings({**env, env_names.OTEL_CONFIG_FILE: str(tmp_path / name)})

    return read_text


def test_all(read: Callable[..., Settings]) -> None:
    """Every part that can be followed becomes what its variable says; nothing is left to tell."""
    found = read(FULL, TTFT_OTEL_METRICS="1")

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


def test_spelled_out(read: Callable[..., Settings]) -> None:
    """Defaults of the specification that a file spells out are nothing to tell, other values are."""
    text = FULL.replace(
        "{parent_based: {root:", "{parent_based: {remote_parent_sampled: {always_on: }, root:"
    )
    text = text.replace("schedule_delay", "max_queue_size: 2048\n        schedule_delay")
    text += "instrumentation/development: {}\n"
    text = text.replace(
        "resource:", "resource:\n  detection/development: {detectors: [{service: }, {host: }]}"
    )
    found = read(text)

    assert found.problems == ()
    assert (
        found.variables and found.variables["OTEL_EXPERIMENTAL_RESOURCE_DETECTORS"] == "otel,host"
    )
    (problem,) = read(text.replace("2048", "4096")).problems
    assert "max_queue_size" in problem


def test_file_replaces_variables(read: Callable[..., Settings]) -> None:
    """Of the environment only what the file cannot say is followed, and ours."""
    found = read(
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
def test_told(read: Callable[..., Settings], before: str, after: str, path: str) -> None:
    """What cannot be followed is told by its path, with a remedy."""
    assert before in SHORT
    problems = read(SHORT.replace(before, after, 1)).problems

    assert any(path in line and "; " in line for line in problems), problems


def test_unreadable(read: Callable[..., Settings]) -> None:
    """Nothing is sent to a default that nobody meant."""
    found = read("file_format: [", TTFT_OTEL_METRICS="1")

    assert found.problems
    assert (found.sampler, found.metrics) == ("always_off", False)


def test_real_process(read: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
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
        sender = handoff.RecordSender(read(without_tls))
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
