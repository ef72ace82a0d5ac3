# SPDX-License-Identifier: Apache-2.0
"""Auto-instrumentation: asked for, tracing is on and no SDK; only installed, it changes nothing of others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from ttft_otel.distro import VllmInstrumentor, VllmResourceDetector, find_served_model
from ttft_otel.model.names import env_names, keys

# What a program sees that opentelemetry-instrument has started.
PROGRAM = """
import os, sys, threading
from opentelemetry import trace
print(os.environ.get("TTFT_OTEL"), type(trace.get_tracer_provider()).__module__, threading.active_count(),
      "opentelemetry.sdk.trace.export" in sys.modules)
"""
PLAIN = "opentelemetry.trace"  # the API's provider, which makes nothing
SDK = "opentelemetry.sdk.trace"


def run_instrumented(**env: str) -> tuple[list[str], str]:
    """The words that PROGRAM prints, and the log."""
    unset = ("TTFT_OTEL", "OTEL_PYTHON_DISTRO", "OTEL_PYTHON_CONFIGURATOR", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    tool = os.path.join(os.path.dirname(sys.executable), "opentelemetry-instrument")
    if not os.path.exists(tool):
        pytest.skip("opentelemetry-instrument is missing; run scripts/install")
    done = subprocess.run(
        [tool, sys.executable, "-c", PROGRAM],
        env={**kept, "OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none", **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.split()[:4], done.stderr


def test_asked_for() -> None:
    """OTEL_PYTHON_DISTRO=ttft_otel is TTFT_OTEL=1: no provider of the SDK, no thread, no exporter."""
    words, log = run_instrumented(OTEL_PYTHON_DISTRO="ttft_otel")

    assert words == ["1", PLAIN, "1", "False"]
    assert "Traceback" not in log


@pytest.mark.parametrize(
    "env", [{}, pytest.param({"OTEL_PYTHON_DISTRO": "distro"}, marks=pytest.mark.full)]
)
def test_another_distribution_is_left_as_it_is(env: dict[str, str]) -> None:
    """Named or not, the other one sets up the SDK, and vLLM is traced as its instrumentor says."""
    words, log = run_instrumented(**env)

    assert words[:2] == ["1", SDK]
    assert "Traceback" not in log


@pytest.mark.parametrize("disabled", ["requests, vllm", pytest.param("*", marks=pytest.mark.full)])
def test_disabled(disabled: str) -> None:
    """OTEL_PYTHON_DISABLED_INSTRUMENTATIONS leaves tracing off."""
    words, _ = run_instrumented(
        OTEL_PYTHON_DISTRO="ttft_otel", OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=disabled
    )

    assert words[0] == "None"


def test_an_operator_has_the_last_word() -> None:
    """TTFT_OTEL=0 stays 0."""
    assert run_instrumented(OTEL_PYTHON_DISTRO="ttft_otel", TTFT_OTEL="0")[0][0] == "0"


def test_from_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """instrument() before vLLM is imported switches on, uninstrument() off again."""
    monkeypatch.delenv(env_names.TTFT_OTEL, raising=False)
    VllmInstrumentor().instrument()
    assert os.environ[env_names.TTFT_OTEL] == "1"
    VllmInstrumentor().uninstrument()
    assert env_names.TTFT_OTEL not in os.environ


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (("vllm", "serve", "org/model"), "org/model"),
        (("vllm", "serve", "org/model", "--served-model-name", "tiny"), "tiny"),
        (("vllm", "serve", "--served-model-name=tiny", "--model", "org/model"), "tiny"),
        (("vllm", "serve", "--port", "1", "--model=org/model"), "org/model"),
        (("vllm", "serve"), ""),
        (("vllm", "serve", "/models/\udcff"), "/models/?"),
        (("vllm", "bench", "serve", "org/model"), ""),
        ((), ""),
    ],
)
def test_model(words: Sequence[str], model: str) -> None:
    """What `vllm serve` is told, in each of its forms; nothing of another program."""
    assert find_served_model(words) == model


def test_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """An SDK that asks gets our name and the model."""
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "org/model"])
    attributes = VllmResourceDetector().detect().attributes

    assert attributes["telemetry.distro.name"] == "ttft-otel"
    assert attributes[keys.MODEL] == "org/model"
