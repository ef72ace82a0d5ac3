# SPDX-License-Identifier: Apache-2.0
"""Actors of a real Ray, with the variables that vLLM copies to its engine cores there.

Runs with `scripts/test --full` where Ray is installed (`pip install ray`), which nothing else here needs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import free_ports
from ttft_otel.model.names import env_names

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install ray"),
]
ROOT = Path(__file__).parents[2]
# As CoreEngineActorManager makes its actors (vllm/v1/engine/utils.py), and as they load plugins.
DRIVER = """
import os, ray
from ttft_otel import plugin
plugin.register()
from vllm.ray.ray_env import get_env_vars_to_copy
copied = {name: os.environ[name] for name in get_env_vars_to_copy() if name in os.environ}
ray.init()

@ray.remote
class Actor:
    def has_hooks(self):
        from vllm.plugins import load_general_plugins
        from ttft_otel.hooks.wrap import find_patcher
        load_general_plugins()
        return find_patcher() is not None

actor = Actor.options(runtime_env=ray.runtime_env.RuntimeEnv(env_vars=copied)).remote()
print("hooks:", ray.get(actor.has_hooks.remote()))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of a Ray on this machine that has not heard of TTFT_OTEL, and its address."""
    own = {name: os.environ[name] for name in os.environ if not name.startswith(("TTFT_", "OTEL_"))}
    # Actors as important as all else: by default they starve on a busy machine.
    own |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    own["PYTHONPATH"] = f"{ROOT}:{own.get('PYTHONPATH', '')}"
    port = free_ports.find_free_port()
    start = ("start", "--head", f"--port={port}", "--include-dashboard=false", "--block")
    with subprocess.Popen(
        (sys.executable, "-m", "ray.scripts.scripts", *start),
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as head:
        said = ""
        while "Ray runtime started" not in said:
            line = head.stdout.readline()  # type: ignore[union-attr]
            assert line, said
            said += line
        (host,) = re.findall(r"Local node IP: (\S+)", said)
        yield {**own, "RAY_ADDRESS": f"{host}:{port}"}
        head.terminate()


@pytest.mark.parametrize("switch", ["1", "0"])
def test_actors_have_hooks(cluster: dict[str, str], switch: str) -> None:
    """An actor has the hooks if the server has them, though its Ray was started without the variable."""
    answer = subprocess.run(
        (sys.executable, "-c", DRIVER),
        env={**cluster, env_names.TTFT_OTEL: switch},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert f"hooks: {switch == '1'}" in answer.stdout, answer.stderr[-3000:]
