# SPDX-License-Identifier: Apache-2.0
"""Settings from the environment: values, defaults, and remedies for invalid ones."""

from __future__ import annotations

import pytest

from ttft_otel.model.names import env_names
from ttft_otel.tracing import settings


def test_defaults() -> None:
    """An empty environment is off, and would send to a collector beside it."""
    read = settings.read_settings({})

    assert not read.on
    assert (read.protocol, read.endpoint) == ("http/protobuf", settings.DEFAULT_HTTP_ENDPOINT)
    assert read.problems == ()
    read = settings.read_settings({env_names.OTEL_EXPORTER_OTLP_PROTOCOL: "grpc"})
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
    read = settings.read_settings(env)

    assert (read.protocol, read.protocol_reason) == (protocol, reason)
    assert read.endpoint in env.values() or reason == env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
    assert not read.problems


def test_unknown_protocol_at_grpc_port() -> None:
    """A protocol that is not known is a problem, and the port decides as if there were none."""
    env = {
        env_names.OTEL_EXPORTER_OTLP_ENDPOINT: "http://c:4317",
        env_names.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: "http/json",
    }
    read = settings.read_settings(env)

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
    read = settings.read_settings({name: value})
    (line,) = read.problems

    assert line.startswith(f"{name}={value!r}")
    assert remedy in line
    assert read == settings.Settings(on=False, problems=read.problems)


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

    assert settings.read_settings(env) == settings.Settings()


def test_all() -> None:
    """Everything said is taken."""
    read = settings.read_settings(
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

    assert read == settings.Settings(
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
    found = settings.read_settings(asked | env)

    assert (found.sampler, found.metrics) == ("always_on" if spans else "always_off", metrics)


def test_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds is what the process was started with, whatever its host writes later."""
    monkeypatch.setattr(settings, "_frozen", [])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://ours:4318")
    settings.freeze_settings()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://theirs:4318/v1/traces")

    assert settings.get_settings().endpoint == "http://ours:4318"
