# SPDX-License-Identifier: Apache-2.0
"""The plugin as vLLM calls it: off is absent, on is idempotent, and it never raises."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence

import pytest

from ttft_otel import plugin
from ttft_otel.distro import VllmInstrumentor, VllmResourceDetector, find_served_model
from ttft_otel.hooks import install
from ttft_otel.model.names import env_names, keys

# What a process looks like after the plugin was called: modules, patches, threads, sockets.
PROBE_CODE = """
import os, stat, sys, threading
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
def sockets():
    count = 0
    for fd in range(3, 64):
        try:
            count += stat.S_ISSOCK(os.fstat(fd).st_mode)
        except OSError:
            pass
    return count
from ttft_otel.plugin import register
before = set(sys.modules), len(sys.meta_path), threading.active_count(), sockets()
{calls}
ours = sorted(name for name in sys.modules if name.startswith("ttft_otel"))
new = sorted(set(sys.modules) - before[0])
quiet = (len(sys.meta_path), threading.active_count(), sockets()) == before[1:]
print(ours, new, quiet, sep="|")
"""


def run_probe(
    value: str | None, calls: str = "register()"
) -> tuple[list[str], list[str], bool, str]:
    """Our modules, newly imported ones, whether nothing was installed or started, the log."""
    env = {name: word for name, word in os.environ.items() if name != env_names.TTFT_OTEL}
    if value is not None:
        env[env_names.TTFT_OTEL] = value
    code = PROBE_CODE.format(calls=textwrap.dedent(calls))
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    ours, new, quiet = done.stdout.strip().splitlines()[-1].split("|")
    return ast.literal_eval(ours), ast.literal_eval(new), quiet == "True", done.stderr


@pytest.mark.parametrize("value", [None, "", "0", "false", "No", " off "])
def test_off(value: str | None) -> None:
    """Off: nothing is imported, patched, started, opened or said."""
    ours, new, quiet, log = run_probe(value)

    assert ours == ["ttft_otel", "ttft_otel.plugin"]
    assert new == []
    assert quiet
    assert log == ""


# What each way into vLLM imports; the Rust front-end's engine core too. The gRPC server is an AsyncLLM, in a
# module that needs smg-grpc-servicer.
LOAD = """
from vllm.plugins import load_general_plugins
load_general_plugins()
"""
DOORS = """
import importlib
for name in (
    "v1.engine.async_llm", "v1.engine.core", "v1.worker.gpu_worker", "entrypoints.llm",
    "entrypoints.cli.main",
    "entrypoints.launchers.api_server.entry", "entrypoints.launchers.run_batch",
    "entrypoints.launchers.render.entry", "entrypoints.launchers.dp_supervisor",
):
    importlib.import_module(f"vllm.{name}")
"""


@pytest.mark.full  # a process imports most of vLLM
def test_off_in_every_door() -> None:
    """Off: whichever way vLLM is asked, its plugins bring no module of ours but the one that looks."""
    ours, new, _, log = run_probe(None, DOORS + LOAD)
    traced, *_ = run_probe("1", LOAD)  # one door suffices to see that they are loaded

    assert ours == ["ttft_otel", "ttft_otel.plugin"] and "vllm.v1.engine.async_llm" in new
    assert "ttft_otel" not in log
    assert "ttft_otel.hooks.api_server" in traced


def test_nonsense() -> None:
    """A word that is neither on nor off is off, with one line that says so."""
    ours, _, quiet, log = run_probe("maybe")

    assert ours == ["ttft_otel", "ttft_otel.plugin"]
    assert quiet
    assert len(log.strip().splitlines()) == 1
    assert "maybe" in log and f"{env_names.TTFT_OTEL}=1" in log


def test_on() -> None:
    """On: wrappers wait for their modules; no vLLM is imported, no thread or socket made."""
    ours, new, _, log = run_probe(
        "1",
        """
        for _ in range(5):
            register()
        from ttft_otel.hooks import wrap
        assert sum(isinstance(each, wrap.Patcher) for each in sys.meta_path) == 1
        assert threading.active_count() == before[2] and sockets() == before[3]
        """,
    )

    assert "ttft_otel.hooks.wrap" in ours
    assert not [name for name in new if name.partition(".")[0] in ("vllm", "torch")]
    assert not [name for name in new if name.startswith("opentelemetry")]
    assert log == ""


@pytest.mark.parametrize("missing", ["msgspec", "ttft_otel.hooks.targets", "prometheus_client"])
def test_never_raises(missing: str) -> None:
    """A broken installation costs the tracing, never the server."""
    _, _, _, log = run_probe("1", f"sys.modules[{missing!r}] = None\nregister()")

    assert "runs without tracing" in log


def test_entry_point() -> None:
    """vLLM finds the plugin by its entry point."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")

    (found,) = [point for point in points if point.value.startswith("ttft_otel.")]
    assert found.load() is plugin.register


def test_ray_actors_get_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM copies few variables to actors of Ray: with the plugin on TTFT_OTEL is one, and no header is."""
    ray_env = pytest.importorskip("vllm.ray.ray_env", reason="vLLM is missing; run scripts/install")
    for name, value in (
        ("TTFT_OTEL", "1"),
        ("TTFT_OTEL_TEMPO_HEADERS", "authorization=secret"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret"),
        ("MINE", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(install.RAY_VARIABLES, "MINE")
    assert "TTFT_OTEL" not in ray_env.get_env_vars_to_copy()

    for _ in range(2):  # idempotent
        install._pass_switch_to_ray()

    assert os.environ[install.RAY_VARIABLES] == "MINE,TTFT_OTEL"
    copied = ray_env.get_env_vars_to_copy()
    assert {"TTFT_OTEL", "MINE"} <= copied
    assert not {"TTFT_OTEL_TEMPO_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"} & copied


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
