# SPDX-License-Identifier: Apache-2.0
"""deploy/inject.Dockerfile, built and used as an init container: PYTHONPATH alone finds the plugin."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from lab.container_engine import ContainerEngine
from lab.container_images import list_named_images

pytestmark = pytest.mark.full

IMAGE, VOLUME = "ttft-otel-inject", "injected"
# As vLLM does it in every process; ttft-otel itself is found where the plugin put it.
LOAD_PLUGIN = """
import importlib.metadata, json
(point,) = importlib.metadata.entry_points(group="vllm.general_plugins")
point.load()()
import ttft_otel
print(json.dumps({"plugin": point.name, "file": ttft_otel.__file__}))
"""


@pytest.fixture(scope="module")
def injected(engine: ContainerEngine) -> Iterator[str]:
    """A volume that an init container has filled, as any user."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    engine.run_docker(
        "build", "-f", "deploy/inject.Dockerfile", "--build-arg", f"PYTHONS={version}",
        "-t", IMAGE, ".",
    )  # fmt: skip
    engine.run_docker("volume", "create", VOLUME)
    # emptyDir belongs to everybody; a volume of Docker to root.
    engine.run_docker(
        "run", "--rm", "--user", "0", "-v", f"{VOLUME}:/v", "busybox:1.37.0", "chmod", "777", "/v"
    )
    engine.run_docker("run", "--rm", "--user", "4711:4711", "-v", f"{VOLUME}:/ttft-otel", IMAGE)
    yield VOLUME
    engine.run_docker("volume", "rm", VOLUME)


def test_the_switch(engine: ContainerEngine, injected: str) -> None:
    """A Python that never heard of us loads the plugin with two variables; read-only suffices."""
    (python,) = [name for name in list_named_images() if name.startswith("python:")]
    words = ("run", "--rm", "--read-only", "--tmpfs", "/tmp", "-v", f"{injected}:/ttft-otel:ro")
    reported = engine.run_docker(
        *words, "-e", "PYTHONPATH=/ttft-otel", "-e", "TTFT_OTEL=1", python,
        "python", "-c", LOAD_PLUGIN,
    )  # fmt: skip
    found = json.loads(reported.splitlines()[-1])

    assert found["plugin"] == "ttft_otel"
    assert found["file"].startswith("/ttft-otel/python")


def test_only_what_is_needed(engine: ContainerEngine) -> None:
    """The image has neither vLLM nor torch, and runs as a user without rights."""
    reported = engine.run_docker("run", "--rm", IMAGE, "ls", "/autoinstrumentation")
    (folder,) = [name for name in reported.split() if name.startswith("python3")]
    packages = engine.run_docker(
        "run", "--rm", IMAGE, "ls", f"/autoinstrumentation/{folder}"
    ).split()

    assert "ttft_otel" in packages
    assert not {"vllm", "torch"} & set(packages)
    assert "10001" in engine.run_docker("inspect", "--format", "{{.Config.User}}", IMAGE)
